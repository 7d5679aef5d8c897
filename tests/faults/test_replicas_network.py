"""Replicas on real servers that fail in mid-epoch: no sample is lost, repeated or out of order."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from datasync.errors import CorruptError, TransientError
from datasync.storage import open_store
from datasync.storage.local import LocalStore
from datasync.streaming import identity
from datasync.streaming import replicas as replicas_module
from datasync.streaming.fetch import ShardSource
from tests.faults import webserver
from tests.faults.webserver import WebServer
from tests.servers import S3Server
from tests.streaming.cachekit import cached_files, make_dataset, read_all, temp_files

SAMPLES = list(range(300))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_dataset(tmp_path / "remote", size_limit=8 << 10)
    return tmp_path / "remote"


@pytest.fixture
def pair(folder: Path) -> Iterator[tuple[WebServer, WebServer]]:
    with WebServer(folder) as first, WebServer(folder) as second:
        yield first, second


def stream_from(servers, local: Path, **options) -> ShardSource:
    stores = [open_store(server.url) for server in servers]
    return ShardSource(replicas=stores, local=local, **{"download_timeout": 20.0, **options})


def read_with(stream: ShardSource, events: dict[int, object]) -> list[int]:
    """Read an epoch, prefetching, and let something happen before given shards."""
    ids = []
    count = len(stream.index.shards)
    for shard in range(count):
        if shard in events:
            events[shard]()
        stream.prefetch(range(shard, min(shard + 3, count)))
        opened = stream.open(shard)
        ids += [int(opened[i]["id"]) for i in range(len(opened))]
    stream.close()
    return ids


@pytest.mark.parametrize("fault", ["unavailable", "truncate", "flip_bit", "cut"])
def test_a_replica_that_begins_to_fail_is_left_for_another(pair, tmp_path: Path, fault: str, caplog) -> None:
    first, second = pair
    stream = stream_from(pair, tmp_path / "local")
    with caplog.at_level("WARNING", logger="datasync.streaming"):
        ids = read_with(stream, {4: lambda: setattr(first, "fault", getattr(webserver, fault))})
    assert ids == SAMPLES
    total = stream.stats.total()
    assert second.requests > 0
    assert total["failovers"] + total["hedges_won"] > 0
    assert total["shards_fetched"] == len(stream.index.shards)
    assert len(caplog.records) <= 4
    assert temp_files(tmp_path / "local") == []


def test_a_replica_that_hangs_is_hedged(pair, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(replicas_module, "_HEDGE_UNKNOWN", 0.5)
    first, second = pair
    stream = stream_from(pair, tmp_path / "local")
    assert read_with(stream, {2: lambda: setattr(first, "fault", webserver.hang)}) == SAMPLES
    total = stream.stats.total()
    assert total["hedges_won"] >= 1
    assert second.requests > 0


def test_a_replica_that_is_stopped_and_started_again(folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(replicas_module, "_cool_off", lambda error: (0.1, 0.2))
    first = WebServer(folder)
    back: list[WebServer] = []

    def start_again() -> None:
        threading.Event().wait(0.3)
        back.append(WebServer(folder, first.port).__enter__())

    with WebServer(folder) as second, first:
        stream = stream_from((first, second), tmp_path / "local")
        ids = read_with(stream, {3: first.stop, 9: start_again})
        assert ids == SAMPLES
        assert second.requests > 0
        assert back[0].requests > 0
        back[0].stop()


def test_the_only_replica_may_be_away_for_a_while(folder: Path, tmp_path: Path) -> None:
    server = WebServer(folder)
    back: list[WebServer] = []
    with server:
        stream = stream_from([server], tmp_path / "local")
        timers: list[threading.Timer] = []

        def start_again() -> None:
            back.append(WebServer(folder, server.port).__enter__())

        def stop() -> None:
            server.stop()
            timers.append(
                threading.Timer(1.0, lambda: back.append(WebServer(folder, server.port).__enter__()))
            )
            timers[0].start()

        assert read_with(stream, {3: stop}) == SAMPLES
        timers[0].join()
        assert stream.stats.total()["retries"] > 0
        back[0].stop()


@pytest.mark.parametrize("when", ["from the beginning", "in mid-epoch"])
def test_a_replica_that_serves_an_old_index_and_old_shards(
    folder: Path, tmp_path: Path, when: str, monkeypatch
) -> None:
    """The names of another writer say nothing of the version: the index does, and the digests."""
    monkeypatch.setattr(identity, "_LOOK_AGAIN_SECONDS", 0.0)
    make_dataset(tmp_path / "old", size_limit=8 << 10, first=5000)
    index = json.loads((folder / "index.json").read_text())
    old = json.loads((tmp_path / "old" / "index.json").read_text())
    for new_entry, old_entry in zip(index["shards"], old["shards"], strict=False):
        name = new_entry["zip_data"]["basename"]
        (tmp_path / "old" / old_entry["zip_data"]["basename"]).rename(tmp_path / "old" / name)
    with WebServer(folder) as first, WebServer(tmp_path / "old") as outdated:
        if when == "in mid-epoch":
            outdated.folder = folder
        stream = stream_from((first, outdated), tmp_path / "local", download_timeout=0.5, download_retry=0)
        assert int(stream.open(0)[0]["id"]) == 0
        first.fault = webserver.unavailable
        if when == "in mid-epoch":
            assert int(stream.open(1)[0]["id"]) > 0
            outdated.folder = tmp_path / "old"
        # With only the outdated replica left there is an error that names it; never one of its samples.
        with pytest.raises(TransientError) as caught:
            stream.open(5)
        assert f"{outdated.url}: it holds another dataset" in str(caught.value)
        assert first.url in str(caught.value)
        assert stream.stats.total()["strangers"] >= 1
        first.fault = None
        assert read_with(stream, {}) == SAMPLES


def test_bits_flipped_by_the_only_replica_are_an_error_and_nothing_is_cached(
    folder: Path, tmp_path: Path
) -> None:
    with WebServer(folder) as server:
        stream = stream_from([server], tmp_path / "local")
        assert len(stream.index.shards) > 3
        server.fault = webserver.flip_bit
        with pytest.raises(CorruptError) as caught:
            stream.open(0)
        info = stream.index.shards[0]
        for part in (info.stored.basename, server.url, info.stored.hashes["xxh3_64"], "got"):
            assert part in str(caught.value)
        assert cached_files(tmp_path / "local") == []
        stream.close()


def upload(folder: Path, server: S3Server, url: str):
    store = open_store(url, **server.options)
    for info in sorted(LocalStore(folder).list(), key=lambda info: info.key == "index.json"):
        store.write(info.key, (folder / info.key).read_bytes())
    return store


def test_an_s3_server_killed_in_the_middle_of_an_epoch(folder: Path, tmp_path: Path, s3_a, s3_b) -> None:
    stores = [upload(folder, server, server.url()) for server in (s3_a, s3_b)]
    stream = ShardSource(replicas=stores, local=tmp_path / "local")
    try:
        assert read_with(stream, {4: s3_a.kill}) == SAMPLES
        total = stream.stats.total()
        assert total["failovers"] + total["hedges_won"] > 0
    finally:
        s3_a.start()
    again = ShardSource(replicas=stores, local=tmp_path / "other")
    assert read_with(again, {}) == SAMPLES
    assert again.stats.total()["failovers"] == 0


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_from_s3_beside_their_parent(
    folder: Path,
    tmp_path: Path,
    s3_a,
    method: str,
) -> None:
    import multiprocessing

    stream = ShardSource(replicas=[upload(folder, s3_a, s3_a.url())], local=tmp_path / "local")
    stream.open(0)
    stream.prefetch(range(len(stream.index.shards)))
    context = multiprocessing.get_context(method)
    out = context.Queue()
    workers = [context.Process(target=_report, args=(stream, out)) for _ in range(3)]
    for worker in workers:
        worker.start()
    assert read_all(stream) == SAMPLES
    assert [out.get(timeout=60) for _ in workers] == [True] * 3
    for worker in workers:
        worker.join()
    assert stream.stats.total()["shards_fetched"] == len(stream.index.shards)
    stream.close()


def _report(stream: ShardSource, out) -> None:
    try:
        out.put(read_all(stream) == SAMPLES)
    except BaseException as error:
        out.put(repr(error))
        raise
