"""Wrong arguments: what, where and the mend, before anything is read."""

from __future__ import annotations

import pytest

from datasync import LocalDataset, Stream, StreamingDataLoader, StreamingDataset
from datasync.errors import FormatError, NotFoundError, UsageError
from tests.streaming.order_helpers import write_dataset


@pytest.fixture(scope="module")
def remote(tmp_path_factory):
    return str(write_dataset(tmp_path_factory.mktemp("remote"), 40))


def refusal(kind, call) -> str:
    with pytest.raises(kind) as caught:
        call()
    assert caught.value.mend
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 2.5}, "`batch_size` is 2.5"),
        ({"batch_size": True}, "`batch_size` is True"),
        ({"batch_size": "8"}, "`batch_size` is '8'"),
        ({"predownload": -1}, "`predownload` is -1"),
        ({"shuffle_seed": -1}, "`shuffle_seed` is -1"),
        ({"num_canonical_nodes": 0}, "`num_canonical_nodes` is 0"),
        ({"download_timeout": "1m"}, "`download_timeout` is '1m'"),
        ({"download_timeout": 0}, "`download_timeout` is 0"),
        ({"download_retry": -1}, "`download_retry` is -1"),
    ],
)
def test_a_value_that_cannot_be_is_named(remote, tmp_path, options, message):
    options = {"remote": remote, "local": str(tmp_path / "cache"), **options}
    assert message in refusal(UsageError, lambda: StreamingDataset(**options))


def test_what_is_missing_is_told_from_what_is_too_much(remote):
    assert "nothing says what to read" in refusal(UsageError, StreamingDataset)
    assert "nothing says what to read" in refusal(UsageError, lambda: StreamingDataset(streams=[]))
    both = refusal(UsageError, lambda: StreamingDataset(streams=[Stream(remote=remote)], remote=remote))
    assert "are both given" in both


def test_an_epoch_that_cannot_be_planned_is_refused_before_it_takes_the_memory(remote, tmp_path):
    options = {"remote": remote, "local": str(tmp_path / "cache"), "batch_size": 8, "shuffle": True}
    message = refusal(UsageError, lambda: StreamingDataset(epoch_size="1t", **options))
    assert "25,000,000,000 times over a stream of 40 samples" in message
    most = int(message.partition("use at most ")[2].partition(";")[0].replace(",", ""))
    assert next(iter(StreamingDataset(epoch_size=most // 100, **options)))


def test_a_stream_of_another_package_is_named(remote):
    message = refusal(UsageError, lambda: StreamingDataset(streams=[object()]))
    assert "streams[0] is a builtins.object" in message


def test_weights_say_how_they_are_mended(remote):
    message = refusal(UsageError, lambda: Stream(remote=remote, proportion=1, repeat=2))
    assert "give one of them" in message
    streams = [Stream(remote=remote, proportion=1), Stream(remote=remote, choose=3)]
    assert "or none of them" in refusal(UsageError, lambda: StreamingDataset(streams=streams))
    assert "`proportion` is '0.5'" in refusal(UsageError, lambda: Stream(remote=remote, proportion="0.5"))


def test_one_cluster_may_be_given_as_a_word(tmp_path, monkeypatch):
    write_dataset(tmp_path / "a" / "numbers", 40)
    (tmp_path / "datasync.toml").write_text(f'[clusters.a]\nurl = "{tmp_path / "a"}"\n')
    monkeypatch.chdir(tmp_path)
    dataset = StreamingDataset(dataset="numbers", clusters="a", local="cache", batch_size=4)
    assert len(dataset) == 40


@pytest.mark.parametrize("split", [None, "vall"])
def test_the_splits_that_are_there_are_named(remote, tmp_path, split):
    (tmp_path / "data").mkdir()
    for name in ("train", "val"):
        write_dataset(tmp_path / "data" / name, 20)
    place = str(tmp_path / "data")
    for options in ({"remote": place, "local": str(tmp_path / "cache")}, {"local": place}):
        message = refusal(NotFoundError, lambda options=options: StreamingDataset(split=split, **options))
        assert "there are the splits train, val" in message


def test_a_file_in_the_way_of_the_cache_is_named(remote, tmp_path):
    (tmp_path / "file").write_text("")
    options = {"remote": remote, "local": str(tmp_path / "file" / "cache")}
    assert f"{tmp_path / 'file'} is a file" in refusal(UsageError, lambda: StreamingDataset(**options))


def test_a_tilde_is_the_home_folder(remote, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    dataset = StreamingDataset(remote=remote, local="~/cache", batch_size=4)
    assert dataset[3]["id"] == 3
    assert (tmp_path / "cache" / "index.json").exists()
    assert not (tmp_path / "~").exists()
    write_dataset(tmp_path / "data", 20)
    assert len(LocalDataset("~/data")) == 20


def test_no_state_and_no_count_are_refused(remote, tmp_path):
    dataset = StreamingDataset(remote=remote, local=str(tmp_path / "cache"), batch_size=4)
    assert "None is no state" in refusal(FormatError, lambda: dataset.load_state_dict(None))
    assert "`num_samples` is -1" in refusal(UsageError, lambda: dataset.state_dict(-1))


def test_a_sample_that_is_not_there_is_named(remote, tmp_path):
    dataset = StreamingDataset(remote=remote, local=str(tmp_path / "cache"))
    assert dataset.where(39)["row"] >= 0
    with pytest.raises(IndexError, match="there are 40 samples, none at 40"):
        dataset.where(40)


def test_an_epoch_without_a_batch_is_no_epoch(remote, tmp_path):
    """Nothing would be trained on, and nothing said."""
    options = {"remote": remote, "local": str(tmp_path / "cache"), "batch_size": 64}
    message = refusal(UsageError, lambda: list(StreamingDataLoader(StreamingDataset(tail="drop", **options))))
    assert "an epoch of 40 samples has no batch of 64" in message
    assert [len(batch["id"]) for batch in StreamingDataLoader(StreamingDataset(**options))] == [40]


def test_what_a_dataset_is_can_be_printed(remote, tmp_path):
    dataset = StreamingDataset(remote=remote, local=str(tmp_path / "cache"), batch_size=8, shuffle=True)
    loader = StreamingDataLoader(dataset)
    next(iter(loader))
    text = repr(loader)
    assert "batches of 8 by 0 workers, 1 given in this pass" in text
    assert f"StreamingDataset {remote}: 40 samples in " in text
    assert "shuffled (lanes, seed 9176); rank 0 of 1; in epoch 0>" in text
    dataset.load_state_dict(loader.state_dict())
    assert "before epoch 0 from sample 8 on" in repr(dataset)
    folders = [str(tmp_path / f"cache{i}") for i in range(5)]
    many = StreamingDataset(streams=[Stream(remote=remote, local=folder) for folder in folders])
    assert "3 more streams: 200 samples" in repr(many)
    assert "no batch size yet, not shuffled" in repr(many)
    assert repr(Stream(dataset="shapes", clusters="a", choose=8)) == (
        "Stream(dataset='shapes', clusters=['a'], choose=8)"
    )
    assert "secret" not in repr(Stream(remote=["sftp://me:secret@host/x", "https://host/x?key=secret"]))
    assert f"LocalDataset {remote}: 40 samples" in repr(LocalDataset(remote))

    class Early(StreamingDataset):
        def __init__(self):
            assert repr(self) == "<Early, not open>"

    Early()
