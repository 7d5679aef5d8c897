"""The engine ray: the same result, whoever moved what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from datasync.ops import receipts
from datasync.replicate import replicate, spread
from datasync.replicate.journal import load
from datasync.storage.local import LocalStore
from tests.replicate.kit import QUICK, data_of, make_dataset, write_tree


def test_batches_are_bounded_and_cover_everything_once(tmp_path, monkeypatch):
    """Without Ray: what a node is given, and what comes back, is the same as moving it here."""
    monkeypatch.setattr(spread, "_BATCH_OBJECTS", 7)
    seen = []

    def here(mover, work, lanes, stop):
        for batch in spread.batches(work, mover.sources, lanes):
            assert len(batch.work) <= 7
            seen.extend(item.key for item, _ in batch.work)
            spread._add(mover, lanes, spread.run_batch(batch))

    monkeypatch.setattr(spread, "spread", here)
    source = LocalStore(tmp_path / "a")
    shards = make_dataset(source, count=30)
    b, c = LocalStore(tmp_path / "b"), LocalStore(tmp_path / "c")
    name = next(iter(shards))
    b.write(name, shards[name])
    outcomes = replicate(source, {"b": b, "c": c}, name="x", options=replace(QUICK, engine="ray"))
    assert [outcome.state for outcome in outcomes] == ["published", "published"]
    assert outcomes[0].tally.adopted == [name]
    assert sorted(seen) == sorted(shards)
    assert data_of(b) == data_of(c) == data_of(source)
    assert load(b).files == []


@pytest.mark.slow
def test_a_tree_and_a_dataset_over_ray(tmp_path):
    ray = pytest.importorskip("ray")
    source = LocalStore(tmp_path / "a" / "set")
    make_dataset(source, count=40)
    write_tree(tmp_path / "a" / "tree", {f"f{n}": bytes([n]) * 1000 for n in range(40)})
    try:
        for name in ("set", "tree"):
            here, there = LocalStore(tmp_path / "a" / name), LocalStore(tmp_path / "b" / name)
            (outcome,) = replicate(here, {"b": there}, name=name, options=replace(QUICK, engine="ray"))
            assert outcome.error is None
            assert outcome.tally.copied == 40
            assert data_of(there) == data_of(here)
            local = LocalStore(tmp_path / "c" / name)
            replicate(here, {"c": local}, name=name, options=QUICK)
            assert receipts.read(local).version == receipts.read(there).version
    finally:
        ray.shutdown()
