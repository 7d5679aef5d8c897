"""What MosaicML Streaming's classes take and refuse, ours take and refuse, compared with the library."""

from __future__ import annotations

import inspect

import pytest

import datasync
from datasync.streaming import stream as our_stream
from tests.streaming.order_helpers import write_dataset

streaming = pytest.importorskip("streaming", reason="MosaicML Streaming is not installed")

CLASSES = ["StreamingDataset", "Stream", "StreamingDataLoader", "LocalDataset"]
# The default order is ours; docs/streaming.md says so.
OTHER_DEFAULTS = {("StreamingDataset", "shuffle_algo"): ("py1e", "lanes")}
OURS = {
    "StreamingDataset": [
        "dataset",
        "clusters",
        "config",
        "version",
        "global_batch_size",
        "uneven",
        "tail",
        "curriculum",
        "sample_ids",
    ],
    "Stream": ["dataset", "clusters", "config", "version"],
    "LocalDataset": ["allow_unsafe_types"],
    "StreamingDataLoader": ["filter"],
}


@pytest.fixture(scope="module")
def remote(tmp_path_factory):
    return str(write_dataset(tmp_path_factory.mktemp("remote"), 60))


@pytest.mark.parametrize("name", CLASSES)
def test_every_argument_is_taken_with_the_same_default(name):
    theirs = dict(inspect.signature(getattr(streaming, name)).parameters)
    ours = dict(inspect.signature(getattr(datasync, name)).parameters)
    if name == "StreamingDataLoader":
        ours.pop("dataset")  # theirs has it among *args, and so it may be given in the same two ways
    assert [parameter for parameter in ours if parameter not in theirs] == OURS[name]
    for parameter, theirs_ in theirs.items():
        ours_ = ours[parameter]
        assert ours_.kind == theirs_.kind, parameter
        if ours_.default != theirs_.default:
            assert (theirs_.default, ours_.default) == OTHER_DEFAULTS[name, parameter], parameter


def test_positional_arguments_mean_the_same(remote):
    assert datasync.LocalDataset(remote, None).num_samples == streaming.LocalDataset(remote, None).num_samples
    made = datasync.StreamingDataset(local=remote, batch_size=6)
    for loader in (datasync.StreamingDataLoader(made, 6), datasync.StreamingDataLoader(dataset=made)):
        assert [len(batch["id"]) for batch in loader] == [6] * 10


@pytest.mark.parametrize(
    "options",
    [
        {"sampling_method": "x"},
        {"sampling_granularity": 0},
        {"batching_method": "x"},
        {"shuffle_seed": -1},
        {"epoch_size": -5},
        {"epoch_size": "12q"},
        {"cache_limit": "2 stones"},
        {"cache_limit": 10},
        {"replication": 0},
        {"replication": 3},
        {"download_retry": -1},
        {"download_timeout": 0},
        {"stream_name": "unknown"},
        {"streams": "both"},
        {"local": None, "remote": None},
    ],
    ids=str,
)
def test_what_they_refuse_we_refuse(remote, tmp_path, options):
    for library, name in ((streaming, "theirs"), (datasync, "ours")):
        given = {"remote": remote, "local": str(tmp_path / name), "batch_size": 4, **options}
        if given.get("streams"):
            given["streams"] = [library.Stream(remote=remote, local=str(tmp_path / f"{name}-stream"))]
        with pytest.raises(ValueError):  # noqa: PT011  the words differ
            # Ours finds a limit that is too small for a shard when the shard is needed.
            library.StreamingDataset(**given)[0]


@pytest.mark.parametrize(
    "options",
    [
        {"proportion": 0.5, "repeat": 2},
        {"repeat": 2, "choose": 3},
        {"proportion": -1},
        {"repeat": -1},
        {"choose": -1},
        {"download_retry": -1},
        {"download_timeout": 0},
        {"download_timeout": -1},
    ],
    ids=str,
)
def test_what_their_stream_refuses_ours_refuses(tmp_path, options):
    for library in (streaming, datasync):
        with pytest.raises(ValueError):  # noqa: PT011  the words differ
            library.Stream(local=str(tmp_path / library.__name__), **options)


def test_streams_weighted_in_ways_that_exclude_each_other_are_refused(remote, tmp_path):
    weights = [{"proportion": 0.5}, {"repeat": 2}]
    for library in (streaming, datasync):
        streams = [
            library.Stream(remote=remote, local=str(tmp_path / f"{library.__name__}{i}"), **weight)
            for i, weight in enumerate(weights)
        ]
        with pytest.raises(ValueError):  # noqa: PT011  the words differ
            library.StreamingDataset(streams=streams, batch_size=4)


def test_a_registered_class_of_streams_is_made_from_the_arguments(remote, tmp_path, monkeypatch):
    class Noted(datasync.Stream):
        def __init__(self, *, note, **options):
            super().__init__(**options)
            self.note = note

    monkeypatch.setitem(our_stream.streams_registry, "noted", Noted)
    made = datasync.StreamingDataset(
        remote=remote, local=str(tmp_path), stream_name="noted", stream_config={"note": "x"}, batch_size=4
    )
    assert isinstance(made.streams[0], Noted)
    assert made.streams[0].note == "x"
    assert made.num_samples == 60


def test_what_subclasses_of_theirs_read_is_there_and_the_same(remote, tmp_path):
    other = str(write_dataset(tmp_path / "other", 50, first=1000))

    def made(library):
        return library.StreamingDataset(
            streams=[library.Stream(local=remote), library.Stream(local=other)], batch_size=5
        )

    theirs, ours = made(streaming), made(datasync)
    for name in ("samples_per_shard", "stream_per_shard", "sample_offset_per_shard", "shards_per_stream"):
        assert getattr(ours, name).tolist() == getattr(theirs, name).tolist(), name
    assert len(ours.shards) == len(theirs.shards) == ours.num_shards > 3
    assert ours.initial_physical_nodes is theirs.initial_physical_nodes is None
    for sample in range(110):
        shard, row = ours.spanner[sample]
        assert (shard, row) == theirs.spanner[sample]
        ours.prepare_shard(shard)
        theirs.prepare_shard(shard)
        assert ours.shards[shard][row]["id"] == theirs.shards[shard][row]["id"] == ours[sample]["id"]
    ours.prepare_shard(0, False)
    for library in (ours, theirs):
        with pytest.raises(IndexError):
            library.spanner[110]
    with pytest.raises(IndexError):
        ours.prepare_shard(ours.num_shards)
