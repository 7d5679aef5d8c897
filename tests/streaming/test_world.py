"""Ranks that are started after the dataset was made, as Lightning's own launcher does."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from datasync import StreamingDataLoader, StreamingDataset
from datasync.errors import UsageError
from tests.streaming.order_helpers import as_rank, flat, ids, write_dataset


@pytest.fixture(scope="module")
def remote(tmp_path_factory):
    return str(write_dataset(tmp_path_factory.mktemp("remote"), 96))


@pytest.fixture
def build(remote, tmp_path):
    def make(**options):
        options = {"batch_size": 8, "shuffle": True, **options}
        return StreamingDataset(remote=remote, local=str(tmp_path / "cache"), **options)

    return make


def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("kind", [StreamingDataLoader, DataLoader])
@pytest.mark.parametrize("method", [None, "fork", "spawn"])
def test_every_rank_reads_its_own_part(build, monkeypatch, kind, method):
    by_rank = []
    for rank in range(2):
        alone(monkeypatch)
        dataset = build()
        assert len(dataset) == 96
        loader = kind(dataset, batch_size=8, num_workers=1 if method else 0, multiprocessing_context=method)
        as_rank(monkeypatch, rank, 2)
        assert (len(loader), len(dataset)) == (6, 48)
        by_rank.append([ids(batch) for batch in loader])
        if kind is StreamingDataLoader:
            assert loader.state_dict()["epoch"] == 1
    assert sorted(flat(by_rank[0] + by_rank[1])) == list(range(96))
    as_rank(monkeypatch, 0, 2)
    assert [ids(batch) for batch in StreamingDataLoader(build())] == by_rank[0]


def test_a_world_that_has_ended_changes_nothing(build, monkeypatch):
    as_rank(monkeypatch, 1, 2)
    loader = StreamingDataLoader(build())
    next(iter(loader))
    alone(monkeypatch)
    assert loader.state_dict()["sample_in_epoch"] == 16
    assert len(loader) == 6


def test_a_global_batch_that_was_cut_for_other_ranks_is_refused(build, monkeypatch):
    loader = StreamingDataLoader(build(batch_size=None, global_batch_size=8))
    as_rank(monkeypatch, 0, 2)
    with pytest.raises(UsageError, match="made for 1 ranks, and now there are 2"):
        next(iter(loader))
