"""Batches of values of fixed size by one gather over all shards: the values that were stored, copied once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from datasync import StreamingDataLoader, StreamingDataset
from datasync.streaming.catalog import Catalog
from datasync.streaming.gather import Gather
from datasync.streaming.plan import Chunk
from datasync.streaming.stats import Stats
from datasync.streaming.stream import Stream
from shards import ShardWriter

COLUMNS = {"label": "uint8", "tokens": "ndarray:int16:50", "weight": "float64"}
SAMPLE_BYTES = 1 + 100 + 8


def row(i):
    return {"label": i % 251, "tokens": np.arange(i, i + 50, dtype=np.int16), "weight": i / 7}


@pytest.fixture(scope="module")
def remote(tmp_path_factory):
    out = tmp_path_factory.mktemp("gather") / "remote"
    with ShardWriter(columns=COLUMNS, out=str(out), size_limit=4096) as writer:
        for i in range(700):
            writer.write(row(i))
    return str(out)


@pytest.fixture
def catalog(remote, tmp_path):
    stream = Stream(remote=remote, local=str(tmp_path / "cache"))
    made = Catalog([stream], cache_limit=None, allow_unsafe_types=False, stats=Stats())
    yield made
    made.close()


def gather(catalog):
    return Gather(catalog.sources, catalog.first_shard, catalog.samples_per_shard)


def chunk(catalog, samples):
    stream, shard, which = catalog.locate(np.asarray(samples))
    return Chunk(stream=stream, shard=shard, row=which, sizes=[len(samples)], real=None, first=0)


def check(columns, samples):
    for name in COLUMNS:
        expected = np.array([row(i)[name] for i in samples])
        np.testing.assert_array_equal(columns[name], expected)
        assert columns[name].dtype == np.dtype(
            COLUMNS[name].split(":")[1] if ":" in COLUMNS[name] else COLUMNS[name]
        )


def test_a_gather_over_many_shards_has_the_values_in_order(catalog):
    samples = np.random.default_rng(0).integers(0, 700, 5000)  # with repeats
    made = gather(catalog)
    places = made.places(chunk(catalog, samples))
    check(made.take(places), samples)
    check(made.take(places[17:40]), samples[17:40])
    assert made.bytes_copied == (5000 + 23) * SAMPLE_BYTES


def test_a_gather_into_given_memory_has_the_same_values_there(catalog):
    samples = np.random.default_rng(1).integers(0, 700, 5000)
    made, rooms = gather(catalog), []

    def room(shape):
        rooms.append(np.zeros(shape, np.uint8))
        return rooms[-1]

    columns = made.take_into(made.places(chunk(catalog, samples)), room)
    check(columns, samples)
    assert all(np.shares_memory(columns[name], memory) for name, memory in zip(columns, rooms, strict=True))


def test_a_batch_is_the_callers_own(catalog):
    made = gather(catalog)
    places = made.places(chunk(catalog, [5, 600]))
    batch = made.take(places)
    batch["tokens"][:] = 0
    check(made.take(places), [5, 600])


def test_a_row_outside_its_shard_is_an_error_and_no_look_into_memory(catalog):
    wrong = chunk(catalog, [3])
    for there in (-1, int(catalog.samples_per_shard[0]), 1 << 40):
        wrong.row[0] = there
        with pytest.raises(IndexError):
            gather(catalog).places(wrong)


def test_shards_that_cannot_all_be_open_are_read_one_by_one(catalog, monkeypatch):
    source = catalog.sources[0]
    source._process()._open_most = 4  # as where descriptors or room are short
    made = gather(catalog)
    assert made.places(chunk(catalog, range(700))) is None
    check(made.take(made.places(chunk(catalog, [3, 4, 5]))), [3, 4, 5])


def test_columns_without_a_fixed_size_are_no_table(tmp_path):
    with ShardWriter(columns={"text": "str", "x": "int"}, out=str(tmp_path / "remote")) as writer:
        for i in range(10):
            writer.write({"text": str(i), "x": i})
    stream = Stream(remote=str(tmp_path / "remote"), local=str(tmp_path / "cache"))
    mixed = Catalog([stream], cache_limit=None, allow_unsafe_types=False, stats=Stats())
    assert gather(mixed).places(chunk(mixed, [1, 2])) is None
    mixed.close()


@pytest.mark.parametrize(("workers", "copies"), [(0, 1), (2, 3)])
def test_copies_are_counted(remote, tmp_path, workers, copies):
    """Without workers a value is copied once; else twice, and once more to the rank's process."""
    dataset = StreamingDataset(remote=remote, local=str(tmp_path / "cache"), shuffle=True, batch_size=10)
    given = 0
    for batch in StreamingDataLoader(dataset, batch_size=10, num_workers=workers):
        check(
            {name: values.numpy() for name, values in batch.items()},
            (batch["weight"] * 7).round().int().tolist(),
        )
        given += sum(values.nbytes for values in batch.values())
    assert given == 700 * SAMPLE_BYTES
    assert dataset.stats.total()["bytes_copied"] == copies * given


def test_a_loop_that_was_left_keeps_no_shard_open(remote, tmp_path):
    dataset = StreamingDataset(remote=remote, local=str(tmp_path / "cache"), shuffle=True, batch_size=10)

    def mapped():
        return Path("/proc/self/maps").read_text().count(str(tmp_path / "cache"))

    batches = iter(StreamingDataLoader(dataset, batch_size=10))
    next(batches)
    assert mapped() > 0
    batches.close()
    dataset.close()
    assert mapped() == 0
