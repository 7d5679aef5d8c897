"""`ShardSource`: every sample, verified, whatever the cache and the replicas do."""

from __future__ import annotations

import json
import pickle
import threading
from pathlib import Path

import pytest

from datasync.errors import CorruptError, FormatError, NotFoundError, StoreError, TransientError, UsageError
from datasync.storage.local import LocalStore
from datasync.streaming.fetch import ShardSource
from datasync.streaming.flight import Flight, Patience
from tests.streaming.cachekit import (
    FaultyStore,
    cached_files,
    datasync_threads,
    down,
    flipping,
    make_dataset,
    missing,
    read_all,
    temp_files,
    truncating,
)


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    make_dataset(tmp_path / "remote")
    return tmp_path / "remote"


def source(remote: Path | list, local: Path, **options) -> ShardSource:
    stores = remote if isinstance(remote, list) else [LocalStore(remote)]
    return ShardSource(replicas=stores, local=local, **{"download_timeout": 1.0, **options})


@pytest.mark.parametrize("compression", [None, "zstd:3", "gz:6", "bz2:1", "snappy", "br:1"])
def test_every_sample_arrives_in_order(tmp_path: Path, compression: str | None) -> None:
    make_dataset(tmp_path / "remote", compression=compression)
    stream = source(tmp_path / "remote", tmp_path / "local")
    assert read_all(stream) == list(range(300))
    assert stream.stats.total()["shards_fetched"] == len(stream.index.shards)
    assert all(path.suffix == ".mds" for path in cached_files(tmp_path / "local"))
    assert temp_files(tmp_path / "local") == []


def test_a_split_lies_in_a_folder_of_its_own_on_both_sides(tmp_path: Path) -> None:
    make_dataset(tmp_path / "remote" / "train")
    stream = source(tmp_path / "remote", tmp_path / "local", split="train")
    assert read_all(stream) == list(range(300))
    assert (tmp_path / "local" / "train" / "index.json").exists()
    assert all((tmp_path / "local" / "train") in path.parents for path in cached_files(tmp_path / "local"))


def test_a_split_cannot_leave_the_folder(tmp_path: Path) -> None:
    with pytest.raises(FormatError):
        source(tmp_path, tmp_path / "local", split="../elsewhere")


def test_keep_zip_keeps_the_compressed_file_and_uses_it_again(remote: Path, tmp_path: Path) -> None:
    stream = source(remote, tmp_path / "local", keep_zip=True)
    read_all(stream)
    stream.close()
    for path in cached_files(tmp_path / "local"):
        if path.suffix == ".mds":
            path.unlink()
    again = source([FaultyStore(remote, fault=missing)], tmp_path / "local", keep_zip=True)
    assert read_all(again) == list(range(300))
    assert again.stats.total()["shards_fetched"] == 0


def test_a_shard_that_others_evict_as_soon_as_it_is_there_is_read(remote, tmp_path, monkeypatch):
    """A limit that other jobs use up: what is brought for a reader is open before it can be evicted."""
    wait = Patience.wait

    def evicted_before_it_is_opened(self: Patience, flight: Flight) -> None:
        wait(self, flight)
        for path in cached_files(tmp_path / "local"):
            path.unlink()

    monkeypatch.setattr(Patience, "wait", evicted_before_it_is_opened)
    assert read_all(source(remote, tmp_path / "local")) == list(range(300))


def test_what_errors_on_the_way_keep_is_not_the_file(remote, tmp_path, monkeypatch):
    """A flight may be kept by frames of errors until the garbage is collected; the disk's blocks are not."""
    kept = []
    wait = Patience.wait
    monkeypatch.setattr(Patience, "wait", lambda self, flight: (kept.append(flight), wait(self, flight)))
    stream = source(remote, tmp_path / "local")
    read_all(stream)
    assert kept
    assert [flight.mapped for flight in kept] == [None] * len(kept)


def test_the_second_run_fetches_nothing_and_reads_no_file_twice(remote: Path, tmp_path: Path) -> None:
    read_all(source(remote, tmp_path / "local"))
    store = FaultyStore(remote, fault=missing)
    again = source([store], tmp_path / "local")
    assert read_all(again) == list(range(300))
    total = again.stats.total()
    assert (total["shards_fetched"], total["adopted"], total["misses"]) == (0, 0, 0)


def test_a_cache_made_by_others_is_verified_and_adopted(remote: Path, tmp_path: Path) -> None:
    """MosaicML Streaming, or a copy by hand: files without our stamps."""
    read_all(source(remote, tmp_path / "first"))
    for path in cached_files(tmp_path / "first"):
        target = tmp_path / "local" / path.relative_to(tmp_path / "first")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    again = source([FaultyStore(remote, fault=missing)], tmp_path / "local")
    assert read_all(again) == list(range(300))
    assert again.stats.total()["adopted"] == len(again.index.shards)


def test_a_damaged_cached_file_is_quarantined_and_fetched_again(remote: Path, tmp_path: Path) -> None:
    read_all(source(remote, tmp_path / "local"))
    victim = cached_files(tmp_path / "local")[2]
    data = bytearray(victim.read_bytes())
    data[-3] ^= 0x40
    victim.write_bytes(data)
    again = source(remote, tmp_path / "local")
    assert read_all(again) == list(range(300))
    total = again.stats.total()
    assert (total["quarantined"], total["shards_fetched"]) == (1, 1)
    assert [p.read_bytes() for p in (tmp_path / "local/.datasync-cache/quarantine").iterdir()] == [
        bytes(data)
    ]


def test_damage_that_keeps_size_and_mtime_is_noticed(remote: Path, tmp_path: Path) -> None:
    import os

    read_all(source(remote, tmp_path / "local"))
    victim = cached_files(tmp_path / "local")[0]
    before = victim.stat()
    with open(victim, "r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"\xff")
    os.utime(victim, ns=(before.st_atime_ns, before.st_mtime_ns))
    again = source(remote, tmp_path / "local")
    assert read_all(again) == list(range(300))
    assert again.stats.total()["quarantined"] == 1


def test_a_source_that_opens_a_file_again_finds_the_damage(remote: Path, tmp_path: Path) -> None:
    stream = source(remote, tmp_path / "local")
    read_all(stream)
    stream.close()
    for path in cached_files(tmp_path / "local"):
        path.write_bytes(b"\0" * path.stat().st_size)
    assert read_all(stream) == list(range(300))
    assert stream.stats.total()["quarantined"] == len(stream.index.shards)
    # No more than a few damaged files are kept.
    assert len(list((tmp_path / "local/.datasync-cache/quarantine").iterdir())) <= 4


def test_after_a_reboot_digests_are_checked_again(remote: Path, tmp_path: Path, monkeypatch) -> None:
    from datasync.streaming import stamps

    read_all(source(remote, tmp_path / "local"))
    monkeypatch.setattr(stamps, "boot_id", lambda: "another boot")
    again = source([FaultyStore(remote, fault=missing)], tmp_path / "local")
    assert read_all(again) == list(range(300))
    assert again.stats.total()["adopted"] == len(again.index.shards)
    third = source([FaultyStore(remote, fault=missing)], tmp_path / "local")
    assert read_all(third) == list(range(300))
    assert third.stats.total()["adopted"] == 0


@pytest.mark.parametrize("fault", [flipping, truncating, down, missing])
def test_a_bad_replica_costs_no_sample(remote: Path, tmp_path: Path, fault) -> None:
    stream = source([FaultyStore(remote, "faulty://a", fault), LocalStore(remote)], tmp_path / "local")
    assert read_all(stream) == list(range(300))
    assert stream.stats.total()["failovers"] > 0
    assert stream.health()["faulty://a"] != "healthy"
    assert temp_files(tmp_path / "local") == []


def test_corrupt_everywhere_names_shard_replicas_and_digests(remote: Path, tmp_path: Path) -> None:
    stores = [FaultyStore(remote, f"faulty://{name}", flipping) for name in "ab"]
    stream = source(stores, tmp_path / "local", validate_hash="sha256", download_retry=0)
    info = stream.index.shards[0]
    with pytest.raises(CorruptError) as caught:
        stream.open(0)
    text = str(caught.value)
    for part in (
        info.stored.basename,
        "faulty://a",
        "faulty://b",
        info.stored.hashes["sha256"],
        "got",
        "mend",
    ):
        assert part in text
    # Each replica was asked twice, and nothing bad has a name.
    assert [store.reads.count(info.stored.basename) for store in stores] == [2, 2]
    assert cached_files(tmp_path / "local") == []
    assert stream.stats.total()["corrupt"] == 4


def test_missing_everywhere_and_denied_everywhere_keep_their_class(remote: Path, tmp_path: Path) -> None:
    stream = source([FaultyStore(remote, "faulty://a", missing)], tmp_path / "local")
    with pytest.raises(NotFoundError, match="faulty://a"):
        stream.open(0)


def test_a_store_that_stays_down_is_retried_for_the_timeout_and_then_an_error(
    remote: Path, tmp_path: Path
) -> None:
    store = FaultyStore(remote, "faulty://a")
    stream = source([store], tmp_path / "local", download_retry=1, download_timeout=0.3)
    assert len(stream.index.shards) > 3
    store.fault = down
    with pytest.raises(TransientError, match="connection refused"):
        stream.open(0)
    assert stream.stats.total()["retries"] >= 1


def test_a_store_that_comes_back_within_the_timeout_is_no_error(remote: Path, tmp_path: Path) -> None:
    store = FaultyStore(remote, "faulty://a")
    stream = source([store], tmp_path / "local", download_retry=0, download_timeout=20.0)
    assert len(stream.index.shards) > 3
    store.fault = down
    timer = threading.Timer(0.5, lambda: setattr(store, "fault", lambda key: None))
    timer.start()
    assert read_all(stream) == list(range(300))
    timer.join()


def test_validate_hash_must_be_among_the_digests(remote: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="md5"):
        source(remote, tmp_path / "local", validate_hash="md5").open(0)
    with pytest.raises(UsageError, match="no_such"):
        source(remote, tmp_path / "local", validate_hash="no_such")
    assert read_all(source(remote, tmp_path / "local", validate_hash="sha256")) == list(range(300))


def test_an_index_without_digests_is_checked_by_size_and_shape(tmp_path: Path) -> None:
    make_dataset(tmp_path / "remote", compression=None)
    path = tmp_path / "remote" / "index.json"
    document = json.loads(path.read_text())
    for entry in document["shards"]:
        entry["hashes"] = []
        entry["raw_data"]["hashes"] = {}
    path.write_text(json.dumps(document))
    stream = source(tmp_path / "remote", tmp_path / "local")
    assert read_all(stream) == list(range(300))
    # A truncated object is refused even so, and a cached file is compared with what was downloaded.
    bad = source([FaultyStore(tmp_path / "remote", fault=truncating)], tmp_path / "other")
    with pytest.raises(CorruptError, match="truncated"):
        bad.open(0)
    victim = cached_files(tmp_path / "local")[0]
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    again = source(tmp_path / "remote", tmp_path / "local")
    assert read_all(again) == list(range(300))
    assert again.stats.total()["quarantined"] == 1


def test_a_decompression_bomb_is_stopped_at_the_size_of_the_index(tmp_path: Path) -> None:
    import zstandard

    from shards.digests import digest_bytes

    make_dataset(tmp_path / "remote", samples=20)
    path = tmp_path / "remote" / "index.json"
    document = json.loads(path.read_text())
    entry = document["shards"][0]
    bomb = zstandard.ZstdCompressor().compress(b"\0" * (256 << 20))
    (tmp_path / "remote" / entry["zip_data"]["basename"]).write_bytes(bomb)
    entry["zip_data"] |= {"bytes": len(bomb), "hashes": digest_bytes(bomb, ["xxh3_64"])}
    path.write_text(json.dumps(document))
    with pytest.raises(CorruptError, match="decompressed"):
        source(tmp_path / "remote", tmp_path / "local").open(0)


def test_without_a_remote_the_folder_is_the_dataset_and_nothing_in_it_is_touched(tmp_path: Path) -> None:
    make_dataset(tmp_path / "data", compression=None)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*")}
    stream = source([], tmp_path / "data", cache_limit=1)
    assert read_all(stream) == list(range(300))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*")} == before


def test_a_remote_that_is_the_cache_folder_counts_as_none(tmp_path: Path) -> None:
    make_dataset(tmp_path / "data", compression=None)
    stream = source(tmp_path / "data", tmp_path / "data", cache_limit=1)
    assert read_all(stream) == list(range(300))
    assert stream.replicas == []


def test_without_a_remote_compressed_shards_are_decompressed_and_kept(tmp_path: Path) -> None:
    make_dataset(tmp_path / "data")
    stored = cached_files(tmp_path / "data")
    stream = source([], tmp_path / "data", cache_limit=1)
    assert read_all(stream) == list(range(300))
    assert all(path.exists() for path in stored)


def test_without_a_remote_a_damaged_file_is_an_error_and_stays(tmp_path: Path) -> None:
    index = make_dataset(tmp_path / "data", compression=None)
    victim = tmp_path / "data" / index.shards[1].raw.basename
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    stream = source([], tmp_path / "data")
    stream.open(0)
    with pytest.raises(CorruptError, match=victim.name):
        stream.open(1)
    assert victim.read_bytes() == data
    victim.unlink()
    with pytest.raises(NotFoundError, match=victim.name):
        stream.open(1)


def test_prefetch_brings_what_is_planned_and_open_waits_for_nothing(remote: Path, tmp_path: Path) -> None:
    before = threading.enumerate()
    stream = source(remote, tmp_path / "local")
    count = len(stream.index.shards)
    stream.prefetch(range(count))
    stream.prefetch([])  # what runs goes on, what does not is forgotten
    stream.prefetch(range(count))
    deadline = threading.Event()
    for _ in range(200):
        if len(cached_files(tmp_path / "local")) == count:
            break
        deadline.wait(0.05)
    assert read_all(stream) == list(range(300))
    total = stream.stats.total()
    assert (total["misses"], total["shards_fetched"]) == (0, count)
    stream.close()
    assert datasync_threads(before) == []


def test_prefetch_and_open_together_fetch_each_shard_once(remote: Path, tmp_path: Path) -> None:
    store = FaultyStore(remote)
    stream = source([store], tmp_path / "local")
    stream.prefetch(range(len(stream.index.shards)))
    assert read_all(stream) == list(range(300))
    shards = [key for key in store.reads if key != "index.json"]
    assert len(shards) == len(set(shards)) == len(stream.index.shards)


def test_an_error_in_prefetch_is_left_to_open(remote: Path, tmp_path: Path) -> None:
    store = FaultyStore(remote, fault=missing)
    stream = source([store], tmp_path / "local")
    stream.prefetch([0, 1])
    with pytest.raises(NotFoundError):
        stream.open(1)
    store.fault = lambda key: None
    assert len(stream.open(1)) > 0


def test_a_source_pickles_and_is_used_again_after_close(remote: Path, tmp_path: Path) -> None:
    stream = source(remote, tmp_path / "local")
    first = read_all(stream)
    copy = pickle.loads(pickle.dumps(stream))
    assert read_all(copy) == first
    stream.close()
    stream.close()
    assert read_all(stream) == first


def test_the_same_open_shard_is_given_out_again(remote: Path, tmp_path: Path) -> None:
    stream = source(remote, tmp_path / "local")
    assert stream.open(0) is stream.open(0)
    assert stream.stats.total()["hits"] == 1


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    for options in ({"cache_limit": 0}, {"download_retry": -1}, {"download_timeout": 0.0}):
        with pytest.raises(UsageError):
            source(tmp_path, tmp_path / "local", **options)


def test_no_dataset_is_an_error_naming_the_place(tmp_path: Path) -> None:
    (tmp_path / "remote").mkdir()
    with pytest.raises(NotFoundError, match=r"index\.json"):
        _ = source(tmp_path / "remote", tmp_path / "local").index
    with pytest.raises(NotFoundError, match=r"index\.json"):
        _ = source([], tmp_path / "local").index


def test_mosaicml_reads_the_cache(remote: Path, tmp_path: Path) -> None:
    streaming = pytest.importorskip("streaming")
    stream = source(remote, tmp_path / "local")
    read_all(stream)
    dataset = streaming.LocalDataset(str(tmp_path / "local"))
    assert [int(dataset[i]["id"]) for i in range(len(dataset))] == list(range(300))


def test_a_stall_names_the_shard_and_the_replica(remote: Path, tmp_path: Path, caplog) -> None:
    import time

    store = FaultyStore(remote, "faulty://slow")
    stream = source([store], tmp_path / "local", download_timeout=10.0)
    stream.stall_seconds = 0.1
    assert len(stream.index.shards) > 1
    store.fault = lambda key: time.sleep(0.5)
    with caplog.at_level("WARNING"):
        stream.open(1)
    stalls = [record.getMessage() for record in caplog.records if "waiting for" in record.getMessage()]
    assert stalls
    assert stream.index.shards[1].stored.basename in stalls[0]
    assert "faulty://slow" in stalls[0]
    assert stream.stats.total()["stalls"] == 1


def test_a_silent_store_is_left_for_another_one(remote: Path, tmp_path: Path) -> None:
    import time

    silent = FaultyStore(remote, "faulty://silent")
    stream = source([silent, LocalStore(remote)], tmp_path / "local", download_timeout=0.4)
    assert len(stream.index.shards) > 1
    silent.fault = lambda key: time.sleep(3)
    started = time.monotonic()
    assert len(stream.open(0)) > 0
    assert time.monotonic() - started < 2.5


def test_a_silent_only_store_ends_in_an_error(remote: Path, tmp_path: Path) -> None:
    import time

    silent = FaultyStore(remote, "faulty://silent")
    stream = source([silent], tmp_path / "local", download_timeout=0.3, download_retry=0)
    assert len(stream.index.shards) > 1
    silent.fault = lambda key: time.sleep(2)
    with pytest.raises(StoreError, match="nothing for"):
        stream.open(0)
