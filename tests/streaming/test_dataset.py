"""StreamingDataset and its loader: every sample once, the same batches however they are read."""

from __future__ import annotations

import copy
import gc
import io
import multiprocessing
import os
import pickle
import subprocess
import sys

import numpy as np
import PIL.Image
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from datasync import LocalDataset, Stream, StreamingDataLoader, StreamingDataset
from datasync.errors import DatasyncError, UsageError
from datasync.streaming import images
from datasync.streaming.decode import Decoder
from shards import encodings
from shards.writer import ShardWriter
from tests.streaming.order_helpers import as_rank, flat, ids, write_dataset

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(scope="module")
def remote(tmp_path_factory):
    return str(write_dataset(tmp_path_factory.mktemp("remote"), 500))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return str(write_dataset(tmp_path_factory.mktemp("other"), 300, first=1000))


@pytest.fixture
def local(tmp_path):
    return str(tmp_path / "cache")


def dataset(remote, local, **options):
    return StreamingDataset(remote=remote, local=local, **{"batch_size": 8, "shuffle": True, **options})


def test_without_shuffling_samples_come_as_they_are_stored(remote, local):
    samples = list(dataset(remote, local, shuffle=False))
    assert [sample["id"] for sample in samples] == list(range(500))
    assert samples[7]["text"] == "sample 7"
    assert samples[7]["tokens"].tolist() == [7] * 8


def test_every_epoch_has_every_sample_in_an_order_of_its_own(remote, local):
    made = dataset(remote, local)
    epochs = [[sample["id"] for sample in made] for _ in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(500))
    assert epochs[0] != epochs[1] != epochs[2]
    again = dataset(remote, local)
    assert [[sample["id"] for sample in again] for _ in range(3)] == epochs


LOADERS = [
    pytest.param({"num_workers": 0}, id="no-workers"),
    pytest.param({"num_workers": 2}, id="fork"),
    pytest.param({"num_workers": 3, "persistent_workers": True}, id="persistent"),
    pytest.param({"num_workers": 2, "multiprocessing_context": "spawn"}, id="spawn"),
]


@pytest.mark.parametrize("options", LOADERS)
@pytest.mark.parametrize("kind", [StreamingDataLoader, DataLoader])
def test_batches_do_not_depend_on_loader_or_workers(remote, local, kind, options):
    reference = dataset(remote, local)
    expected = []
    for _ in range(2):
        order = [sample["id"] for sample in reference]
        expected.append([order[i : i + 8] for i in range(0, 500, 8)])
    loader = kind(dataset(remote, local), batch_size=8, **options)
    assert [[ids(batch) for batch in loader] for _ in range(2)] == expected
    assert len(loader) == 63


def test_whole_batches_are_what_collating_samples_gives(remote, local):
    made = dataset(remote, local)
    fast = list(StreamingDataLoader(made))
    made.next_epoch = 0
    slow = list(DataLoader(made, batch_size=8))
    for quick, plain in zip(fast, slow, strict=True):
        assert quick.keys() == plain.keys()
        for name in plain:
            assert type(quick[name]) is type(plain[name])
            if isinstance(plain[name], torch.Tensor):
                assert quick[name].dtype == plain[name].dtype
                assert torch.equal(quick[name], plain[name])
            else:
                assert quick[name] == plain[name]


def test_a_batch_may_be_written_to_without_touching_the_cache(remote, local):
    made = dataset(remote, local, shuffle=False)
    for batch in StreamingDataLoader(made):
        batch["tokens"].fill_(9)
        batch["id"].zero_()
    made.next_epoch = 0
    assert flat(ids(batch) for batch in StreamingDataLoader(made)) == list(range(500))


@pytest.mark.parametrize("workers", [0, 2])
def test_values_that_cannot_be_collated_stay_lists(tmp_path, workers):
    from PIL import Image

    with ShardWriter(
        out=tmp_path / "images", columns={"image": "png", "id": "int", "n": "str_int"}
    ) as writer:
        for i in range(40):
            writer.write({"image": Image.new("RGB", (4, 4), (i, 0, 0)), "id": i, "n": i * 10**12})
    made = dataset(str(tmp_path / "images"), str(tmp_path / "cache"))
    for batch in StreamingDataLoader(made, num_workers=workers):
        assert [image.getpixel((0, 0))[0] for image in batch["image"]] == ids(batch)
        assert [int(n) // 10**12 for n in batch["n"]] == ids(batch)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Pictures of one colour, that of their number, in two streams: one has a column `png`, one `bytes`."""
    root = tmp_path_factory.mktemp("pictures")
    for name, numbers in (("a", range(40)), ("b", range(40, 48))):
        columns = {"image": "png" if name == "a" else "bytes", "id": "int64"}
        with ShardWriter(out=root / name, columns=columns, size_limit=4 << 10) as writer:
            for i in numbers:
                out = io.BytesIO()
                PIL.Image.new("RGB", (8, 6), (i, 0, 255 - i)).save(out, "PNG")
                writer.write({"image": out.getvalue(), "id": i})
    return root


def test_a_picture_is_not_copied_between_its_shard_and_its_batch(pictures, tmp_path):
    made = dataset(str(pictures / "a"), str(tmp_path))
    (batch, *_) = made.samples(batches=True, files={"image"})
    shards = made.catalog.sources[0]
    assert all(isinstance(value, memoryview) for value in batch["image"])
    maps = {id(shards.open(i)._view.obj) for i in range(len(shards.index.shards))}
    assert {id(value.obj) for value in batch["image"]} <= maps
    room = images.decode_pixels(batch["image"][0], "RGB", into := np.zeros((6, 8, 3), np.uint8))
    assert room is into


@pytest.mark.parametrize("kind", [StreamingDataLoader, DataLoader])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stack", [True, False])
def test_a_decoder_gives_every_loader_the_same_batches(pictures, tmp_path, kind, workers, stack):
    def loader(**options):
        streams = [Stream(remote=str(pictures / n), local=str(tmp_path / n)) for n in "ab"]
        made = StreamingDataset(streams=streams, batch_size=10, shuffle=True, sample_ids=True)
        decoder = Decoder({"image": "tensor"}, threads=2, stack=stack, stats=made.stats)
        return kind(made, batch_size=10, collate_fn=decoder, num_workers=workers, **options)

    def numbers(batch):
        rows = batch
        if stack:
            columns = zip(*batch.values(), strict=True)
            rows = [dict(zip(batch, row, strict=True)) for row in columns]
        for row in rows:
            assert row["image"].shape == (3, 6, 8)
            assert row["image"][:, 2, 3].tolist() == [int(row["id"]), 0, 255 - int(row["id"])]
            assert int(row["sample_id"]) == int(row["id"])
        return [int(row["id"]) for row in rows]

    made = loader()
    got = [numbers(batch) for batch in made]
    expected = [ids(batch) for batch in loader().dataset.samples(batches=True)]
    assert got == expected
    assert made.dataset.stats()["decoded"] == 48
    seen = made.dataset.stats.workers()
    decoding = {name for name, counts in seen.items() if counts["decode_seconds"] > 0}
    assert decoding == ({f"worker {i}" for i in range(workers)} or {"main"})
    assert [len(batch) for batch in map(numbers, loader(drop_last=True))] == [10, 10, 10, 10]
    if kind is StreamingDataLoader:
        first, again = loader(), loader()
        batches = iter(first)
        head = [numbers(next(batches)) for _ in range(2)]
        again.load_state_dict(first.state_dict())
        assert head + [numbers(batch) for batch in again] == expected


def test_pinned_batches_without_a_gpu_are_the_same_batches(remote, local):
    plain = [ids(batch) for batch in StreamingDataLoader(dataset(remote, local))]
    for workers in (0, 1):
        loader = StreamingDataLoader(dataset(remote, local), num_workers=workers, pin_memory=True)
        assert [ids(batch) for batch in loader] == plain


class _Degrees:
    """A user's encoding, as they are written for MosaicML Streaming."""

    size = 2

    def encode(self, value):
        return value.to_bytes(2, "little", signed=True)

    def decode(self, data):
        return int.from_bytes(data, "little", signed=True)


def test_a_users_encoding_is_streamed(tmp_path):
    encodings.register("degrees", _Degrees)
    with ShardWriter(out=tmp_path / "remote", columns={"id": "int", "t": "degrees"}, size_limit=500) as out:
        for i in range(100):
            out.write({"id": i, "t": i - 50})
    for workers in (0, 1):
        made = dataset(str(tmp_path / "remote"), str(tmp_path / f"cache{workers}"))
        for batch in StreamingDataLoader(made, num_workers=workers):
            assert batch["t"].tolist() == [i - 50 for i in ids(batch)]


def test_the_next_epochs_first_shards_are_fetched_before_this_one_ends(remote, local):
    made = dataset(remote, local, num_canonical_nodes=1, shuffle_block_size=1, predownload=40)
    planned = []
    made.catalog.sources[0].prefetch = planned.append
    list(made)
    following = made.epoch_order(1)
    _, shard, _ = following.locate(np.arange(16))
    assert set(shard.tolist()) <= set(planned[-1])
    assert all(len(plan) <= 20 for plan in planned)  # of 29: as far ahead as asked for, and a chunk


def test_streams_with_different_columns_are_refused_like_by_collating(remote, tmp_path):
    with ShardWriter(out=tmp_path / "other", columns={"id": "int"}) as writer:
        for i in range(40):
            writer.write({"id": i})
    streams = [
        Stream(remote=remote, local=str(tmp_path / "a"), choose=40),
        Stream(remote=str(tmp_path / "other"), local=str(tmp_path / "b")),
    ]
    made = StreamingDataset(streams=streams, batch_size=8, batching_method="per_stream")
    columns = {tuple(sorted(batch)) for batch in StreamingDataLoader(made)}
    assert columns == {("id",), ("id", "text", "tokens")}


class Doubled(StreamingDataset):
    def __getitem__(self, at):
        sample = super().__getitem__(at)
        return {"id": sample["id"] * 2}


def test_a_subclass_that_changes_samples_is_honoured(remote, local):
    made = Doubled(remote=remote, local=local, batch_size=8, shuffle=True)
    got = flat(ids(batch) for batch in StreamingDataLoader(made))
    assert sorted(got) == list(range(0, 1000, 2))


def test_a_collate_function_is_honoured(remote, local):
    loader = StreamingDataLoader(
        dataset(remote, local), collate_fn=lambda rows: [row["text"] for row in rows]
    )
    assert next(iter(loader))[0].startswith("sample ")
    rows = StreamingDataLoader(dataset(remote, local), collate_fn=default_collate)
    assert isinstance(next(iter(rows))["id"], torch.Tensor)


def test_ranks_share_the_epoch_and_any_number_of_them_has_the_same_batches(remote, local, monkeypatch):
    def batches(ranks, workers):
        by_rank = []
        for rank in range(ranks):
            as_rank(monkeypatch, rank, ranks)
            made = StreamingDataset(
                remote=remote, local=local, global_batch_size=24, shuffle=True, tail="drop"
            )
            by_rank.append([ids(batch) for batch in StreamingDataLoader(made, num_workers=workers)])
        return [flat(step) for step in zip(*by_rank, strict=True)]

    one = batches(1, 0)
    assert len(one) == 500 // 24
    for ranks, workers in ((2, 0), (3, 2), (4, 0), (8, 0), (24, 0)):
        assert batches(ranks, workers) == one


@pytest.mark.parametrize("ranks", [3, 4])
def test_every_rank_has_equally_many_steps(remote, local, monkeypatch, ranks):
    for tail in ("pad", "drop", "uneven", "mask"):
        steps, seen = [], []
        for rank in range(ranks):
            as_rank(monkeypatch, rank, ranks)
            loader = StreamingDataLoader(dataset(remote, local, tail=tail))
            batches = list(loader)
            steps.append(len(batches))
            for batch in batches:
                keep = batch["mask"].tolist() if tail == "mask" else [True] * len(batch["id"])
                seen += [i for i, real in zip(ids(batch), keep, strict=True) if real]
        assert len(set(steps)) == 1, tail
        whole = list(range(500))
        if tail in ("uneven", "mask"):
            assert sorted(seen) == whole
        elif tail == "pad":
            assert sorted(set(seen)) == whole
        else:
            assert len(seen) == len(set(seen)) == 500 // (8 * ranks) * 8 * ranks


def test_a_tail_that_would_leave_a_rank_without_a_sample_is_no_uneven_one(remote, local, monkeypatch):
    """500 samples in global batches of 12 leave 8, 25 of them leave 1."""

    def build(**options):
        return StreamingDataset(remote=remote, local=local, tail="uneven", **options)

    as_rank(monkeypatch, 3, 4)
    for options in ({"epoch_size": 25}, {"epoch_size": 3}, {"batching_method": "device_per_stream"}):
        with pytest.raises(UsageError, match=r"for 4 ranks.*\n?.*tail='mask'"):
            build(global_batch_size=12, **options)
    assert len(list(StreamingDataLoader(build(global_batch_size=12)))) == 42
    # 500 samples leave 6 of 26, but behind the first 108 there are only 2 left.
    saved = build(global_batch_size=12)
    next(iter(saved))
    resumed = build(global_batch_size=26, uneven=True)
    resumed.load_state_dict(saved.state_dict(108))
    with pytest.raises(UsageError, match="has 2 samples for 4 ranks"):
        iter(resumed)


def test_ranks_that_do_not_divide_the_batch_need_uneven(remote, local, monkeypatch):
    as_rank(monkeypatch, 1, 3)
    with pytest.raises(UsageError, match="divided equally among 3 ranks"):
        StreamingDataset(remote=remote, local=local, global_batch_size=32)
    sizes = []
    for rank in range(3):
        as_rank(monkeypatch, rank, 3)
        made = StreamingDataset(remote=remote, local=local, global_batch_size=32, uneven=True, tail="drop")
        sizes.append({len(ids(batch)) for batch in StreamingDataLoader(made)})
    assert sizes == [{10}, {11}, {11}]


def test_replicated_ranks_get_the_same_samples(remote, local, monkeypatch):
    got = []
    for rank in range(4):
        as_rank(monkeypatch, rank, 4)
        got.append([ids(batch) for batch in StreamingDataLoader(dataset(remote, local, replication=2))])
    assert got[0] == got[1]
    assert got[2] == got[3]
    assert not set(flat(got[0])) & set(flat(got[2]))
    with pytest.raises(UsageError, match="replication 3"):
        dataset(remote, local, replication=3)


def test_streams_are_mixed_in_exact_proportion(remote, other, tmp_path):
    streams = [
        Stream(remote=remote, local=str(tmp_path / "a"), proportion=3),
        Stream(remote=other, local=str(tmp_path / "b"), proportion=1),
    ]
    made = StreamingDataset(streams=streams, batch_size=16, shuffle=True, epoch_size="400")
    got = flat(ids(batch) for batch in StreamingDataLoader(made))
    assert len(got) == 400
    assert sum(i >= 1000 for i in got) == 100
    assert len(set(got)) == 400
    for start in range(0, 400, 40):
        assert 9 <= sum(i >= 1000 for i in got[start : start + 40]) <= 11
    assert (streams[0].choose, streams[1].choose) == (300, 100)


def test_repeat_and_choose_use_samples_as_often_as_they_say(remote, other, tmp_path):
    streams = [
        Stream(remote=remote, local=str(tmp_path / "a"), repeat=1.5),
        Stream(remote=other, local=str(tmp_path / "b"), choose=50),
    ]
    made = StreamingDataset(streams=streams, batch_size=16, shuffle=True)
    got = np.array(flat(ids(batch) for batch in StreamingDataLoader(made)))
    uses = np.bincount(got[got < 1000], minlength=500)
    assert uses.sum() == 750
    assert set(uses.tolist()) == {1, 2}
    assert (got >= 1000).sum() == 50


def test_a_curriculum_changes_the_mixture_at_its_samples(remote, other, tmp_path):
    streams = [
        Stream(remote=remote, local=str(tmp_path / "a")),
        Stream(remote=other, local=str(tmp_path / "b")),
    ]
    made = StreamingDataset(
        streams=streams,
        batch_size=16,
        shuffle=True,
        epoch_size=640,
        curriculum=[(0, [1, 0]), (320, [1, 3])],
    )
    got = flat(ids(batch) for batch in StreamingDataLoader(made))
    assert sum(i >= 1000 for i in got[:320]) == 0
    assert sum(i >= 1000 for i in got[320:]) == 240
    with pytest.raises(UsageError, match="weights for 2 streams"):
        StreamingDataset(streams=streams, batch_size=16, curriculum=[(0, [1])])


@pytest.mark.parametrize("method", ["stratified", "per_stream", "device_per_stream"])
def test_batching_methods_compose_batches(remote, other, tmp_path, monkeypatch, method):
    steps = []
    for rank in range(2):
        as_rank(monkeypatch, rank, 2)
        streams = [
            Stream(remote=remote, local=str(tmp_path / "a")),
            Stream(remote=other, local=str(tmp_path / "b")),
        ]
        made = StreamingDataset(
            streams=streams, batch_size=8, shuffle=True, batching_method=method, tail="drop"
        )
        steps.append([[i >= 1000 for i in ids(batch)] for batch in StreamingDataLoader(made)])
    for pair in zip(*steps, strict=True):
        counts = [sum(flat(pair))]
        if method == "stratified":
            assert counts == [6]
        elif method == "per_stream":
            assert counts[0] in (0, 16)
        else:
            assert all(sum(part) in (0, 8) for part in pair)


def test_samples_can_be_had_by_number(remote, local):
    made = dataset(remote, local)
    assert made[3]["id"] == made[-497]["id"] == 3
    assert [sample["id"] for sample in made[10:16:2]] == [10, 12, 14]
    assert [sample["id"] for sample in made[np.array([4, 499])]] == [4, 499]
    assert made.size == made.num_samples == 500
    for outside in (500, -501):
        with pytest.raises(IndexError):
            made[outside]


def test_a_local_dataset_reads_a_folder(tmp_path):
    folder = write_dataset(tmp_path / "raw", 60, compression=None)
    made = LocalDataset(str(folder))
    assert len(made) == made.size == 60
    loader = DataLoader(made, batch_size=7, shuffle=True, num_workers=2)
    assert sorted(flat(ids(batch) for batch in loader)) == list(range(60))
    with pytest.raises(DatasyncError):
        LocalDataset(str(tmp_path / "nothing"))


def test_sample_ids_say_where_a_sample_is_from(remote, other, tmp_path):
    streams = [
        Stream(remote=remote, local=str(tmp_path / "a")),
        Stream(remote=other, local=str(tmp_path / "b")),
    ]
    made = StreamingDataset(streams=streams, batch_size=8, shuffle=True, sample_ids=True)
    batch = next(iter(StreamingDataLoader(made)))
    for i, number in zip(ids(batch), batch["sample_id"].tolist(), strict=True):
        assert made[number]["id"] == i
        place = made.where(number)
        assert place["dataset"] == (other if i >= 1000 else remote)
        assert place["shard"].startswith("shards/")


def test_two_loaders_over_one_dataset_have_epochs_of_their_own(remote, local):
    made = dataset(remote, local)
    first, second = (
        DataLoader(made, batch_size=8, num_workers=2),
        DataLoader(made, batch_size=8, num_workers=2),
    )
    pairs = list(zip(first, second, strict=True))
    assert sorted(flat(ids(a) for a, _ in pairs)) == list(range(500))
    assert sorted(flat(ids(b) for _, b in pairs)) == list(range(500))
    assert made.next_epoch == 2


def test_reseeding_before_every_epoch_does_not_repeat_the_epoch(remote, local):
    loader = DataLoader(dataset(remote, local), batch_size=8, num_workers=2)
    epochs = []
    for _ in range(3):
        torch.manual_seed(0)
        epochs.append(flat(ids(batch) for batch in loader))
    assert epochs[0] != epochs[1] != epochs[2]
    for epoch in epochs:
        assert sorted(epoch) == list(range(500))


def test_an_epoch_that_is_left_early_is_over(remote, local):
    made = dataset(remote, local)
    loader = DataLoader(made, batch_size=8, num_workers=2)
    for _ in range(3):
        next(iter(loader))
    reference = dataset(remote, local)
    reference.next_epoch = 3
    assert flat(ids(batch) for batch in loader) == [sample["id"] for sample in reference]


def test_a_dataset_can_be_copied_and_pickled(remote, local):
    made = dataset(remote, local)
    made.load_state_dict(made.state_dict(80, from_beginning=True))
    for twin in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert twin.state_dict() == made.state_dict()
        list(twin)
        assert made.next_epoch == 0  # a copy is on its own


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"shuffle_algo": "py3"}, "shuffle_algo"),
        ({"sampling_method": "x"}, "sampling_method"),
        ({"batching_method": "x"}, "batching_method"),
        ({"partition_algo": "x"}, "partition_algo"),
        ({"tail": "x"}, "tail"),
        ({"sampling_granularity": 0}, "sampling_granularity"),
        ({"shuffle_seed": -1}, "shuffle_seed"),
        ({"num_canonical_nodes": 0}, "num_canonical_nodes"),
        ({"batch_size": -4}, "batch_size"),
        ({"epoch_size": "12q"}, "epoch_size"),
        ({"cache_limit": "12 parsecs"}, "cache_limit"),
        ({"batch_size": 8, "global_batch_size": 8}, "global_batch_size"),
        ({"download_retry": -1}, "download_retry"),
        ({"download_timeout": 0}, "download_timeout"),
        ({"stream_name": "x"}, "stream_name"),
        ({"replication": 0}, "replication"),
        ({"split": 1}, "split"),
        ({"local": "x" * 300}, "too long"),
        ({"shuffle": "false"}, "shuffle"),
        ({"keep_zip": "no"}, "keep_zip"),
        ({"batch_size": 8, "curriculum": "x"}, "curriculum"),
        ({"batch_size": 8, "curriculum": [(0, "abc")]}, "curriculum"),
        ({"batch_size": 8, "curriculum": [(0.5, [1])]}, "curriculum"),
        ({"batch_size": 8, "curriculum": [0, 1]}, "curriculum"),
    ],
)
def test_arguments_that_cannot_be_are_refused_by_name(remote, local, options, named):
    with pytest.raises(ValueError, match=named):
        StreamingDataset(**{"remote": remote, "local": local, **options})


def test_places_and_weights_that_exclude_each_other_are_refused(remote, local):
    with pytest.raises(ValueError, match="nothing says what to read"):
        StreamingDataset()
    with pytest.raises(ValueError, match="both given"):
        StreamingDataset(streams=[Stream(local=local)], remote=remote)
    with pytest.raises(ValueError, match="give one of them"):
        Stream(remote=remote, repeat=1, choose=2)
    with pytest.raises(ValueError, match="negative"):
        Stream(remote=remote, proportion=-1)
    streams = [Stream(remote=remote, local=local, proportion=1), Stream(remote=remote, local=local)]
    with pytest.raises(ValueError, match="stream 1 and stream 0"):
        StreamingDataset(streams=streams)


def test_iterating_needs_a_batch_size_that_loader_and_dataset_share(remote, local):
    made = StreamingDataset(remote=remote, local=local)
    with pytest.raises(ValueError, match="batch_size"):
        iter(made)
    with pytest.raises(ValueError, match="batch_size is 4, the dataset's is 8"):
        StreamingDataLoader(dataset(remote, local), batch_size=4)
    # The loader's is the dataset's where that has none.
    assert len(ids(next(iter(StreamingDataLoader(made, batch_size=5))))) == 5


def test_a_users_own_packages_do_not_break_the_import(tmp_path):
    (tmp_path / "shards").mkdir()
    (tmp_path / "train.py").write_text("raise SystemExit('the wrong train')")
    script = tmp_path / "script.py"
    script.write_text("from datasync import StreamingDataset, StreamingDataLoader, Stream, LocalDataset\n")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_reading_leaves_nothing_in_shared_memory(remote, local):
    before = set(os.listdir("/dev/shm"))
    loader = StreamingDataLoader(dataset(remote, local), num_workers=2)
    next(iter(loader))
    del loader
    left = {name for name in set(os.listdir("/dev/shm")) - before if "datasync" in name}
    assert not left


def test_a_subclass_gets_the_batches_that_the_dataset_gives(tmp_path):
    """Also with values that PyTorch does not collate; only that samples are taken one by one."""

    class Own(StreamingDataset):
        def __getitem__(self, at):
            return super().__getitem__(at)

    image = PIL.Image.new("RGB", (4, 4), "red")
    with ShardWriter(out=tmp_path / "remote", columns={"image": "png", "id": "int"}) as writer:
        for i in range(8):
            writer.write({"image": image, "id": i})
    options = {"remote": str(tmp_path / "remote"), "local": str(tmp_path / "cache"), "batch_size": 4}
    plain, own = (list(StreamingDataLoader(kind(**options))) for kind in (StreamingDataset, Own))
    for ours, theirs in zip(plain, own, strict=True):
        assert ours["id"].tolist() == theirs["id"].tolist()
        assert [a.tobytes() for a in ours["image"]] == [b.tobytes() for b in theirs["image"]]


def raising(samples):
    raise RuntimeError("a bug of the user's")


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_end_with_the_loop_also_while_its_error_is_kept(remote, local, persistent):
    loader = StreamingDataLoader(
        dataset(remote, local), num_workers=2, collate_fn=raising, persistent_workers=persistent
    )
    with pytest.raises(RuntimeError, match="a bug of the user's") as kept:
        next(iter(loader))
    assert kept.traceback
    assert len(multiprocessing.active_children()) == (2 if persistent else 0)
    del loader
    gc.collect()


def test_a_limit_that_is_less_than_a_shuffle_holds_is_said_once(remote, tmp_path, caplog):
    StreamingDataset(
        remote=str(remote), local=str(tmp_path / "a"), batch_size=4, cache_limit="1gb", shuffle=True
    )
    StreamingDataset(remote=str(remote), local=str(tmp_path / "b"), batch_size=4, cache_limit="9kb")
    assert "less than the shards" not in caplog.text
    StreamingDataset(
        remote=str(remote), local=str(tmp_path / "c"), batch_size=4, cache_limit="9kb", shuffle=True
    )
    assert caplog.text.count("less than the shards that this shuffle reads at a time") == 1
