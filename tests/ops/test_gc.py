"""Old versions go only when told, only ours, and never what anything newer needs."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from datasync.errors import BusyError, NotFoundError, StoreError
from datasync.ops import published, receipts
from datasync.ops.gc import gc
from datasync.ops.status import is_here
from datasync.replicate import Stop, replicate
from datasync.replicate.lease import Lease, held
from datasync.storage import open_store
from datasync.storage.local import LocalStore
from shards.index import Index
from shards.journal import Journal, let_removal_end
from tests.replicate.kit import QUICK, Spy, data_of, datasync, make_shards, publish_dataset, start


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
    assert is_here(b, "emoji", names[3])[0]
    assert is_here(b, "emoji", names[2])[0]
    assert not is_here(b, "emoji", names[0])[0]
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
    assert not is_here(b, "emoji", names[0])[0]
    assert not is_here(b, "emoji", names[1])[0]
    gc(b, name="emoji", keep=2, apply=True)
    assert data_of(b).keys() == {*pools[2], *pools[3], *pools[4], "index.json"}
    assert [receipt.version for receipt in receipts.read_all(b)] == [names[2], names[3]]


def test_without_receipts_nothing_is_ours(versions):
    source, b, _, names = versions
    with pytest.raises(NotFoundError, match="neither a receipt nor a finished job"):
        gc(source, name="emoji", keep=1, apply=True)
    b.delete([f"_datasync/manifests/{names[3]}.parquet"])
    before = data_of(b)
    with pytest.raises(StoreError, match="lost the manifest"):
        gc(b, name="emoji", keep=1, apply=True)
    assert data_of(b) == before
    with pytest.raises(ValueError, match="cannot keep 0"):
        gc(b, name="emoji", keep=0)


def test_what_killed_runs_left_of_a_moment_goes_when_it_is_old(versions):
    _, b, *_ = versions
    for key in ("_datasync/probe-0123/plain", "_datasync/clock/old", "_datasync/clock/new"):
        b.write(key, b"x")
    for key in ("probe-0123/plain", "clock/old"):
        os.utime(Path(b.root) / "_datasync" / key, (time.time() - 90_000,) * 2)
    gc(b, name="emoji", keep=4)
    assert len(list(b.list("_datasync/clock/"))) == 2
    gc(b, name="emoji", keep=4, apply=True)
    assert [info.key for info in b.list("_datasync/clock/")] == ["_datasync/clock/new"]
    assert not list(b.list("_datasync/probe-"))


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


# Where `datasync shard` wrote


def corpus(folder, name: str, rows: range) -> None:
    (folder / name).write_text("".join(f'{{"text": "row {row} of {name[0]}"}}\n' for row in rows))


@pytest.fixture
def home(tmp_path, s3_a):
    """Three versions of a dataset, sharded to a cluster on a real server, one after the other."""
    (tmp_path / "datasync.toml").write_text(
        f'[clusters.a]\nurl = "{s3_a.url()}"\nendpoint = "{s3_a.endpoint}"\nregion = "us-east-1"\n'
        'access_key = "env:AWS_ACCESS_KEY_ID"\nsecret_key = "env:AWS_SECRET_ACCESS_KEY"\n'
        '[clusters.b]\nurl = "b"\n[datasets.rows]\nhome = "a"\n'
    )

    def run(*arguments, check=0):
        return datasync(*arguments, cwd=tmp_path, env=s3_a.environment, check=check)

    for name in ("x.jsonl", "y.jsonl", "z.jsonl"):
        corpus(tmp_path, name, range(300))
        run("shard", name, "a:rows", "--overwrite", "--size-limit", "4kb", "-q")
    url = (tmp_path / "datasync.toml").read_text().split('"')[1]
    return run, open_store(f"{url}/rows", **s3_a.options), tmp_path


def test_old_versions_at_the_home_go_and_everything_goes_on(home):
    run, store, _ = home
    before = data_of(store)
    index = Index.parse(store.read("index.json"), where="home")
    wanted = {shard.stored.basename for shard in index.shards}
    shown = run("gc", "rows", "--cluster", "a", "--keep", "1").stdout
    assert "would remove" in shown
    assert data_of(store) == before
    run("gc", "rows", "--cluster", "a", "--keep", "2", "--apply")
    assert wanted < data_of(store).keys() < before.keys()
    run("gc", "rows", "--cluster", "a", "--keep", "1", "--apply")
    assert data_of(store).keys() == {*wanted, "index.json"}
    assert "nothing to remove" in run("gc", "rows", "--cluster", "a", "--keep", "1").stdout
    assert "published" in run("replicate", "rows", "--to", "b").stdout
    assert "all good" in run("verify", "rows", "--cluster", "a", "-q").stdout
    # A version that was removed can be sharded again, and one that is there is not touched by it.
    run("shard", "x.jsonl", "a:rows", "--overwrite", "--size-limit", "4kb", "-q")
    assert "all good" in run("verify", "rows", "--cluster", "a", "-q").stdout


def test_a_home_that_is_being_written_is_left_alone(home):
    run, store, folder = home
    corpus(folder, "w.jsonl", range(300))
    run("shard", "w.jsonl", "a:rows", "--overwrite", "--size-limit", "4kb", "--task", "0/2", "-q")
    before = data_of(store)
    refused = run("gc", "rows", "--cluster", "a", "--keep", "1", "--apply", check=1)
    assert "not published" in refused.stderr
    assert data_of(store) == before


def test_a_job_that_begins_while_old_versions_go_waits_and_loses_nothing(home, s3_a):
    """x.jsonl was the oldest version: its shards are removed and made again at the same time."""
    run, store, folder = home
    environment = s3_a.environment
    shard = ("shard", "x.jsonl", "a:rows", "--overwrite", "--size-limit", "4kb", "-q")
    started = []

    def begin(operation: str, key: str) -> None:
        if operation == "delete" and key.startswith("shards/") and not started:
            started.append(start(*shard, cwd=folder, env=environment))
            until = time.monotonic() + 60
            while not published.unfinished(store) and time.monotonic() < until:
                time.sleep(0.05)
            time.sleep(0.5)  # had it not waited, it would have written by now
            assert data_of(store).keys() == before.keys()

    before = data_of(store)
    assert gc(Spy(store, begin), name="rows", keep=1, apply=True).objects
    _, err = started[0].communicate(timeout=60)
    assert started[0].returncode == 0, err
    assert "that is waited for" in err
    assert "all good" in run("verify", "rows", "--cluster", "a", "-q").stdout


def test_a_job_that_began_after_the_look_ends_the_removal(home):
    _, store, _ = home
    before = data_of(store)

    def begin(operation: str, key: str) -> None:
        if operation == "read" and key.startswith("_datasync/manifests/"):
            Journal(store, "other").begin({"job": "other"})

    with pytest.raises(StoreError, match="has begun to write there"):
        gc(Spy(store, begin), name="rows", keep=1, apply=True)
    assert data_of(store) == before


def test_a_gc_that_was_killed_is_not_waited_for_longer_than_its_lease(tmp_path):
    store = LocalStore(tmp_path)
    lease = Lease(store, "gc rows", ttl=1.5)
    lease.acquire()
    lease._stop.set()  # as a kill would
    began = time.monotonic()
    let_removal_end(store)
    assert 1 < time.monotonic() - began < 10
    lease.release()
    began = time.monotonic()
    let_removal_end(store)
    with held(store, "replicate rows"):
        let_removal_end(store)
    assert time.monotonic() - began < 1


def test_what_others_published_at_the_home_is_not_ours(home):
    _, store, _ = home
    by_hand = make_shards(2, seed="by hand")
    old = store.read("index.json")
    theirs = publish_dataset(store, by_hand)  # a manifest without a job here
    store.write("index.json", old)
    gc(store, name="rows", keep=1, apply=True)
    assert by_hand.keys() <= data_of(store).keys()
    assert theirs in {
        info.key.split("/")[-1].removesuffix(".parquet") for info in store.list("_datasync/man")
    }


def test_killed_half_way_at_the_home_it_goes_on(home):
    run, store, _ = home
    wanted = {shard.stored.basename for shard in Index.parse(store.read("index.json"), where="home").shards}

    class Killed(Exception):
        pass

    def kill(operation, key):
        if operation == "delete" and key.startswith("_datasync/manifests/"):
            raise Killed

    with pytest.raises(Killed):
        gc(Spy(store, kill), name="rows", keep=1, apply=True)
    assert "all good" in run("verify", "rows", "--cluster", "a", "-q").stdout
    gc(store, name="rows", keep=1, apply=True)
    assert data_of(store).keys() == {*wanted, "index.json"}
    assert len(list(store.list("_datasync/manifests/"))) == 1
