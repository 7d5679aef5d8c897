"""Old versions go only when told, only ours, and never what anything newer needs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from datasync.errors import BusyError, NotFoundError, StoreError
from datasync.ops import receipts
from datasync.ops.gc import gc
from datasync.ops.status import is_here
from datasync.replicate import Stop, replicate
from datasync.replicate.lease import held
from datasync.storage.local import LocalStore
from tests.replicate.kit import QUICK, Spy, data_of, datasync, make_shards, publish_dataset


@pytest.fixture
def versions(tmp_path):
    """Four versions at b, each sharing half of its shards with the one before."""
    source, b = LocalStore(tmp_path / "a" / "emoji"), LocalStore(tmp_path / "b" / "emoji")
    pools = [make_shards(2, seed=n) for n in range(5)]
    found = []
    for n in range(4):
        found.append(publish_dataset(source, pools[n] | pools[n + 1]))
        (outcome,) = replicate(source, {"b": b}, name="emoji", options=QUICK)
        assert outcome.state == "published"
    return source, b, pools, found


def test_it_only_shows_unless_told(versions):
    _, b, pools, names = versions
    before = data_of(b)
    garbage = gc(b, name="emoji", keep=2)
    assert garbage.kept == [names[3], names[2]]
    assert garbage.removed == [names[1], names[0]]
    assert set(garbage.keys) == {*pools[0], *pools[1]}
    assert data_of(b) == before


def test_only_what_no_kept_version_needs_is_removed(versions):
    source, b, pools, names = versions
    garbage = gc(b, name="emoji", keep=2, apply=True)
    assert garbage.applied
    assert data_of(b).keys() == {*pools[2], *pools[3], *pools[4], "index.json"}
    assert is_here(b, names[3])
    assert is_here(b, names[2])
    assert not is_here(b, names[0])
    assert gc(b, name="emoji", keep=2).removed == []
    (outcome,) = replicate(source, {"b": b}, name="emoji", options=QUICK)
    assert outcome.state == "already"


def test_what_others_put_there_stays(tmp_path):
    source, b = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")
    old, new = make_shards(3, seed=1), make_shards(3, seed=2)
    theirs = next(iter(old))
    b.write(theirs, old[theirs])
    b.write("shards/by-hand.mds", b"by hand")
    for shards in (old, new):
        publish_dataset(source, shards)
        replicate(source, {"b": b}, name="emoji", options=QUICK)
    gc(b, name="emoji", keep=1, apply=True)
    assert data_of(b).keys() == {*new, theirs, "shards/by-hand.mds", "index.json"}


def test_what_a_newer_index_needs_stays(versions):
    """Somebody put an older index back by hand: it stays readable."""
    source, b, pools, _ = versions
    old = publish_dataset(source, pools[0] | pools[1])
    b.write("index.json", source.read("index.json"))
    gc(b, name="emoji", keep=1, apply=True)
    assert data_of(b).keys() >= {*pools[0], *pools[1], *pools[3], *pools[4]}
    assert old


def test_what_an_unfinished_run_has_brought_stays(versions):
    source, b, pools, _ = versions
    publish_dataset(source, pools[0] | make_shards(30, seed="new"))
    stop = Stop()
    spied = Spy(
        b, before=lambda op, key: stop.ask("test") if op == "write" and key.startswith("shards/") else None
    )
    (outcome,) = replicate(source, {"b": spied}, name="emoji", options=QUICK, stop=stop)
    assert outcome.state == "stopped"
    brought = set(spied.data_writes())
    gc(b, name="emoji", keep=1, apply=True)
    assert brought <= data_of(b).keys()


def test_it_does_not_run_beside_a_replication(versions):
    _, b, *_ = versions
    with held(b, "replicate emoji"), pytest.raises(BusyError):
        gc(b, name="emoji", keep=1, apply=True)


def test_killed_half_way_it_leaves_no_receipt_that_lies_and_goes_on(versions):
    _, b, pools, names = versions

    class Killed(Exception):
        pass

    def kill(operation: str, key: str) -> None:
        if operation == "delete" and key in pools[1]:
            raise Killed

    with pytest.raises(Killed):
        gc(Spy(b, kill), name="emoji", keep=2, apply=True)
    assert not is_here(b, names[0])
    assert not is_here(b, names[1])
    gc(b, name="emoji", keep=2, apply=True)
    assert data_of(b).keys() == {*pools[2], *pools[3], *pools[4], "index.json"}
    assert [receipt.version for receipt in receipts.read_all(b)] == [names[2], names[3]]


def test_without_receipts_nothing_is_ours(versions):
    source, b, _, names = versions
    with pytest.raises(NotFoundError, match="no receipt"):
        gc(source, name="emoji", keep=1, apply=True)
    b.delete([f"_datasync/manifests/{names[3]}.parquet"])
    before = data_of(b)
    with pytest.raises(StoreError, match="lost the manifest"):
        gc(b, name="emoji", keep=1, apply=True)
    assert data_of(b) == before
    with pytest.raises(ValueError, match="cannot keep 0"):
        gc(b, name="emoji", keep=0)


def test_a_tree_is_left_to_delete(tmp_path):
    source, b = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")
    for key in ("x", "y"):
        source.write(key, key.encode())
    replicate(source, {"b": b}, name="tree", options=QUICK)
    source.delete(["x"])
    replicate(source, {"b": b}, name="tree", options=QUICK)
    assert gc(b, name="tree", keep=1, apply=True).removed == []
    assert data_of(b).keys() == {"x", "y"}
    replicate(source, {"b": b}, name="tree", options=replace(QUICK, delete=True, max_delete=0.5))
    assert data_of(b).keys() == {"y"}  # also what an earlier run had let stay


def test_the_command_shows_first_and_removes_when_told(versions, tmp_path):
    (tmp_path / "datasync.toml").write_text('[clusters.b]\nurl = "b"\n')
    shown = datasync("gc", "emoji", "--cluster", "b", "--keep", "3", cwd=tmp_path).stdout
    assert "would remove" in shown
    assert "2 objects" in shown
    assert (
        "removed" in datasync("gc", "emoji", "--cluster", "b", "--keep", "3", "--apply", cwd=tmp_path).stdout
    )
    assert (
        "nothing to remove" in datasync("gc", "emoji", "--cluster", "b", "--keep", "3", cwd=tmp_path).stdout
    )
