"""The cache folder: limits, what is evicted, what is never removed, disks that are full."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from datasync.errors import StoreError, UsageError
from datasync.storage.local import LocalStore
from datasync.streaming import room as room_module
from datasync.streaming.cache import Cache
from datasync.streaming.fetch import ShardSource
from datasync.streaming.filelock import file_lock
from datasync.streaming.room import Need, NoRoom, quarantine_name, quarantined
from datasync.streaming.stamps import FOLDER, Item, Stamps, encoded
from datasync.streaming.stats import Stats
from shards.digests import digest_bytes
from tests.streaming.cachekit import FaultyStore, cached_files, make_dataset, missing, read_all, temp_files


def item(name: str, data: bytes) -> Item:
    return Item(name=name, bytes=len(data), hashes=digest_bytes(data, ["xxh3_64"]), check=("xxh3_64",))


def put(cache: Cache, name: str, data: bytes, need: Need | None = None) -> Item:
    wanted = item(name, data)
    with cache.reserve(len(data), need or Need()) as temp:
        os.write(temp.fd, data)
        cache.place(temp, wanted, wanted.hashes)
    return wanted


def held_names(cache: Cache) -> set[str]:
    return {path.name for path in cache.root.iterdir() if path.is_file()}


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", limit=300, evict=True, stats=Stats())


def test_the_limit_holds_and_the_oldest_use_goes_first(cache: Cache) -> None:
    for name in "abc":
        put(cache, name, name.encode() * 100)
        time.sleep(0.01)
    cache.stamps.touch("a")
    put(cache, "d", b"d" * 100)
    assert held_names(cache) == {"a", "c", "d"}
    assert cache.room.used_bytes() == 300


def test_what_the_plan_needs_soonest_goes_last(cache: Cache) -> None:
    for name in "abc":
        put(cache, name, name.encode() * 100)
    plan = {"a": 0, "new": 1, "b": 2, "c": 3}
    put(cache, "new", b"n" * 100, Need(urgent=False, plan=plan, place=1))
    assert held_names(cache) == {"a", "b", "new"}


def test_a_prefetch_never_evicts_what_is_needed_before_it(cache: Cache) -> None:
    for name in "abc":
        put(cache, name, name.encode() * 100)
    plan = {"a": 0, "b": 1, "c": 2, "new": 3}
    with pytest.raises(NoRoom), cache.reserve(100, Need(urgent=False, plan=plan, place=3)):
        pass
    assert held_names(cache) == {"a", "b", "c"}


def test_an_open_file_is_passed_over_by_a_prefetch(cache: Cache) -> None:
    items = [put(cache, name, name.encode() * 100) for name in "abc"]
    held = [cache.open(one) for one in items[:2]]
    put(cache, "d", b"d" * 100, Need(urgent=False))
    assert held_names(cache) == {"a", "b", "d"}
    assert all(held)


def test_a_reader_that_stands_still_may_evict_an_open_file_which_stays_readable(cache: Cache) -> None:
    items = [put(cache, name, name.encode() * 100) for name in "abc"]
    maps = [cache.open(one) for one in items]
    put(cache, "d", b"d" * 100, Need(urgent=True))
    assert len(held_names(cache)) == 3
    assert "d" in held_names(cache)
    assert [m[:1] for m in maps if m is not None] == [b"a", b"b", b"c"]


def test_reserved_bytes_count_before_they_are_written(cache: Cache) -> None:
    with cache.reserve(200, Need()):
        assert cache.room.used_bytes() == 200
        with pytest.raises(NoRoom), cache.reserve(200, Need()):
            pass
    assert cache.room.used_bytes() == 0
    assert temp_files(cache.root) == []


def test_files_that_datasync_did_not_place_are_neither_counted_nor_removed(cache: Cache) -> None:
    cache.root.mkdir()
    (cache.root / "mine").write_bytes(b"x" * 1000)
    adopted = item("mine", b"x" * 1000)
    assert cache.adopt(adopted)
    assert cache.trusted(adopted)
    for name in "abcde":
        put(cache, name, name.encode() * 100)
    assert (cache.root / "mine").read_bytes() == b"x" * 1000
    assert cache.room.used_bytes() == 300


def test_a_file_of_a_dead_process_is_swept_and_one_of_a_living_process_is_not(cache: Cache) -> None:
    folder = cache.root / FOLDER / "tmp"
    folder.mkdir(parents=True)
    (folder / "dead.100").write_bytes(b"half")
    with cache.reserve(100, Need()) as alive:
        assert not (folder / "dead.100").exists()
        with Cache(cache.root, limit=300, evict=True, stats=Stats()).reserve(100, Need()):
            assert os.path.exists(alive.path)


def test_folders_can_share_one_limit(tmp_path: Path) -> None:
    roots = [tmp_path / "one", tmp_path / "two"]
    one, two = (Cache(root, limit=300, evict=True, stats=Stats(), roots=roots) for root in roots)
    put(one, "a", b"a" * 100)
    time.sleep(0.01)
    put(two, "b", b"b" * 100)
    put(one, "c", b"c" * 100)
    put(two, "d", b"d" * 100)
    assert held_names(one) == {"c"}
    assert held_names(two) == {"b", "d"}
    assert one.room.used_bytes() == two.room.used_bytes() == 300


def test_the_folder_says_whose_it_is(cache: Cache) -> None:
    put(cache, "a", b"a")
    assert "datasync" in json.loads((cache.root / FOLDER / "owner.json").read_text())["created_by"]


@pytest.mark.parametrize("name", ["plain", "a/b/c", "sp ace", "per%cent", "é", "x" * 250, "~tilde", "=equal"])
def test_any_name_has_a_stamp(tmp_path: Path, name: str) -> None:
    cache = Cache(tmp_path, limit=None, evict=True, stats=Stats())
    wanted = put(cache, name, b"data")
    assert cache.trusted(wanted)
    assert [found for found, _ in Stamps(tmp_path).placed()] == [name]
    assert "/" not in encoded(name)


def test_a_damaged_stamp_only_costs_a_second_look(cache: Cache) -> None:
    wanted = put(cache, "a", b"a" * 100)
    (cache.root / FOLDER / "placed" / "a").write_text("{")
    assert not cache.trusted(wanted)
    assert cache.adopt(wanted)
    assert cache.trusted(wanted)
    assert cache.room.used_bytes() == 100  # still ours


def test_the_open_file_is_judged_and_not_its_name(cache: Cache) -> None:
    wanted = put(cache, "a", b"a" * 100)
    assert cache.trusted(wanted)
    (cache.root / "other").write_bytes(b"x" * 100)
    os.rename(cache.root / "other", cache.root / "a")
    assert cache.open(wanted) is None


def test_a_file_announced_and_never_placed_is_no_file(cache: Cache) -> None:
    cache.stamps.announce(item("a", b"a"))
    assert cache.room.used_bytes() == 0
    assert not cache.trusted(item("a", b"a"))


def test_a_file_placed_by_a_process_killed_before_its_stamp_is_verified_and_is_ours(cache: Cache) -> None:
    cache.stamps.announce(item("a", b"a" * 100))
    (cache.root / "a").write_bytes(b"a" * 100)
    assert cache.room.used_bytes() == 100
    assert cache.adopt(item("a", b"a" * 100))
    put(cache, "b", b"b" * 300)
    assert held_names(cache) == {"b"}


def test_a_users_file_in_quarantine_is_never_taken_for_one_of_ours(cache: Cache) -> None:
    folder = cache.root / FOLDER / "quarantine"
    folder.mkdir(parents=True)
    (folder / quarantine_name("a.placed.mds", placed=False)).write_bytes(b"x" * 1000)
    (folder / quarantine_name("b.mds", placed=True)).write_bytes(b"y" * 100)
    assert [victim.bytes for victim in quarantined(cache.root)] == [100]
    put(cache, "c", b"c" * 300)
    assert [path.stat().st_size for path in folder.iterdir()] == [1000]


class Disk:
    """What `statvfs` says of a folder, as if it were a disk by itself."""

    def __init__(self, folder: Path, bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.bytes, self.others = folder, bytes, 0
        monkeypatch.setattr(room_module.os, "statvfs", self.statvfs)

    def free(self) -> int:
        ours = [path for path in self.folder.rglob("*") if path.is_file() and FOLDER not in path.parts]
        return self.bytes - self.others - sum(path.stat().st_size for path in ours)

    def statvfs(self, path: str) -> os.statvfs_result:
        return os.statvfs_result((1, 1, self.bytes, self.free(), self.free(), 1, 1, 1, 0, 255))


def test_a_full_disk_evicts_and_then_is_an_error(tmp_path: Path, monkeypatch) -> None:
    make_dataset(tmp_path / "remote")
    index = make_dataset(tmp_path / "more", first=1000)
    disk = Disk(tmp_path / "local", 10**6, monkeypatch)
    read_all(ShardSource(replicas=[LocalStore(tmp_path / "remote")], local=tmp_path / "local"))
    before = disk.free()
    disk.others = before
    stream = ShardSource(
        replicas=[LocalStore(tmp_path / "more")], local=tmp_path / "local", download_timeout=0.3
    )
    assert len(stream.open(0)) == index.shards[0].samples
    assert stream.stats.total()["evicted"] > 0
    stream.close()
    # What could not make room is not removed for it.
    kept = {path.name for path in cached_files(tmp_path / "local")}
    disk.others = 10**9
    stream = ShardSource(
        replicas=[LocalStore(tmp_path / "more")], local=tmp_path / "local", download_timeout=0.3
    )
    with pytest.raises(StoreError, match=r"no room .* no limit, [1-9].* free") as caught:
        stream.open(1)
    assert str(tmp_path / "local") in str(caught.value)
    assert "mend: free space" in str(caught.value)
    assert {path.name for path in cached_files(tmp_path / "local")} == kept
    assert temp_files(tmp_path / "local") == []
    disk.others = 0
    assert read_all(stream) == list(range(1000, 1300))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(1, 200), max_size=6),
    wanted=st.integers(1, 300),
    free=st.integers(0, 400),
    urgent=st.booleans(),
)
def test_on_a_full_disk_no_more_goes_than_helps_and_a_reader_has_what_is_left(
    tmp_path_factory, monkeypatch, sizes, wanted, free, urgent
) -> None:
    """A twentieth of 2,000 bytes is for others, unless only that is left for a reader."""
    cache = Cache(tmp_path_factory.mktemp("disk"), limit=None, evict=True, stats=Stats())
    disk = Disk(cache.root, 2000, monkeypatch)
    for i, size in enumerate(sizes):
        put(cache, str(i), b"x" * size)
    disk.others = disk.free() - free
    possible = free + sum(sizes) - wanted >= (0 if urgent else 100)
    if not possible:
        with pytest.raises(NoRoom), cache.reserve(wanted, Need(urgent=urgent)):
            pass
        assert disk.free() == free
        return
    with cache.reserve(wanted, Need(urgent=urgent)):
        pass
    left = 100 if free + sum(sizes) - wanted >= 100 else 0
    assert disk.free() >= wanted + left
    went = [size for i, size in enumerate(sizes) if not (cache.root / str(i)).exists()]
    assert not went or disk.free() - went[-1] < wanted + left


def test_a_write_that_finds_the_disk_full_is_tried_again(tmp_path: Path, monkeypatch) -> None:
    from datasync.streaming import attempt

    make_dataset(tmp_path / "remote")
    failures = [3]
    real = os.write

    class Os:
        @staticmethod
        def write(fd: int, data) -> int:
            if failures[0]:
                failures[0] -= 1
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(fd, data)

    monkeypatch.setattr(attempt, "os", Os)
    stream = ShardSource(
        replicas=[LocalStore(tmp_path / "remote")], local=tmp_path / "local", download_timeout=5.0
    )
    assert read_all(stream) == list(range(300))
    assert failures[0] == 0
    assert temp_files(tmp_path / "local") == []


def test_an_epoch_through_a_cache_of_three_shards(tmp_path: Path) -> None:
    index = make_dataset(tmp_path / "remote", size_limit=8 << 10)
    limit = 3 * max(info.raw.bytes for info in index.shards)
    stream = ShardSource(
        replicas=[LocalStore(tmp_path / "remote")], local=tmp_path / "local", cache_limit=limit
    )
    count = len(index.shards)
    assert count > 6
    ids = []
    for shard in range(count):
        stream.prefetch(range(shard, min(shard + 6, count)))
        opened = stream.open(shard)
        ids += [int(opened[i]["id"]) for i in range(len(opened))]
        assert sum(path.stat().st_size for path in cached_files(tmp_path / "local")) <= limit
    assert ids == list(range(300))
    assert stream.stats.total()["evicted"] >= count - 3
    stream.close()


def test_a_cache_too_small_for_one_shard_is_refused(tmp_path: Path) -> None:
    make_dataset(tmp_path / "remote")
    stream = ShardSource(
        replicas=[LocalStore(tmp_path / "remote")], local=tmp_path / "local", cache_limit=1000
    )
    with pytest.raises(UsageError, match="cache_limit is 1,000 bytes"):
        stream.open(0)


def test_more_open_shards_than_the_cache_holds_is_no_deadlock(tmp_path: Path) -> None:
    index = make_dataset(tmp_path / "remote", size_limit=8 << 10)
    limit = 2 * max(info.raw.bytes for info in index.shards)
    stream = ShardSource(
        replicas=[LocalStore(tmp_path / "remote")],
        local=tmp_path / "local",
        cache_limit=limit,
        download_timeout=5.0,
    )
    opened = [stream.open(i) for i in range(8)]
    assert [int(shard[0]["id"]) for shard in opened] == sorted(int(shard[0]["id"]) for shard in opened)
    assert sum(path.stat().st_size for path in cached_files(tmp_path / "local")) <= limit


def test_another_version_under_the_same_names_is_replaced_and_not_called_damage(tmp_path: Path) -> None:
    """Names of other writers say nothing of the content: shard.00000.mds is in every dataset."""
    for folder, first in (("one", 0), ("two", 1000)):
        index = make_dataset(tmp_path / folder, samples=40, compression=None, first=first)
        document = json.loads((tmp_path / folder / "index.json").read_text())
        for i, (entry, info) in enumerate(zip(document["shards"], index.shards, strict=True)):
            entry["raw_data"]["basename"] = f"shard.{i:05d}.mds"
            os.rename(tmp_path / folder / info.raw.basename, tmp_path / folder / f"shard.{i:05d}.mds")
        (tmp_path / folder / "index.json").write_text(json.dumps(document))
    for folder, first in (("one", 0), ("two", 1000), ("one", 0)):
        stream = ShardSource(replicas=[LocalStore(tmp_path / folder)], local=tmp_path / "local")
        assert read_all(stream) == list(range(first, first + 40))
        assert stream.stats.total()["quarantined"] == 0


def test_a_dataset_published_again_is_noticed(tmp_path: Path) -> None:
    make_dataset(tmp_path / "remote", samples=20)
    assert len(read_all(ShardSource(replicas=[LocalStore(tmp_path / "remote")], local=tmp_path / "c"))) == 20
    make_dataset(tmp_path / "remote", samples=60)
    assert len(read_all(ShardSource(replicas=[LocalStore(tmp_path / "remote")], local=tmp_path / "c"))) == 60


def test_the_index_is_not_fetched_again_while_it_is_the_same(tmp_path: Path) -> None:
    make_dataset(tmp_path / "remote", samples=20)
    read_all(ShardSource(replicas=[FaultyStore(tmp_path / "remote")], local=tmp_path / "local"))
    store = FaultyStore(tmp_path / "remote", fault=missing)
    assert len(read_all(ShardSource(replicas=[store], local=tmp_path / "local"))) == 20
    assert store.reads == []


def test_with_every_replica_down_the_cache_serves(tmp_path: Path) -> None:
    from tests.streaming.cachekit import down

    make_dataset(tmp_path / "remote", samples=20)
    read_all(ShardSource(replicas=[FaultyStore(tmp_path / "remote")], local=tmp_path / "local"))
    store = FaultyStore(tmp_path / "remote", fault=down)
    assert len(read_all(ShardSource(replicas=[store], local=tmp_path / "local"))) == 20


def test_a_lock_file_whose_holder_removed_it_is_made_again(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    with file_lock(path, remove=True) as mine:
        assert mine
        with file_lock(path, wait=lambda seconds: seconds < 0.05) as second:
            assert not second
    assert not os.path.exists(path)
    with file_lock(path, remove=True) as mine:
        assert mine


def test_a_lock_is_given_back_by_a_child_that_was_forked_and_a_parent_that_went_on(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    with contextlib.ExitStack() as stack:
        assert stack.enter_context(file_lock(path))
        child = os.fork()
        if not child:
            time.sleep(30)
            os._exit(0)
    with file_lock(path, wait=lambda seconds: seconds < 1.0) as mine:
        assert mine
    os.kill(child, 9)
    os.waitpid(child, 0)
