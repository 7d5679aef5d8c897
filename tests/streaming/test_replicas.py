"""Health of replicas: who is asked, who is left alone and for how long; hedged reads."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from datasync.errors import CorruptError, DeniedError, NotFoundError, ThrottledError, TransientError
from datasync.storage.local import LocalStore
from datasync.streaming import identity
from datasync.streaming import replicas as module
from datasync.streaming.fetch import ShardSource
from datasync.streaming.replicas import Replicas, SlowReplica
from datasync.streaming.stats import Stats
from tests.streaming.cachekit import FaultyStore, down, make_dataset, read_all, slow, temp_files


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def three(tmp_path: Path, clock: Clock) -> Replicas:
    return Replicas([LocalStore(tmp_path / name) for name in "abc"], Stats(), clock=clock)


def numbers(replicas: Replicas) -> list[int]:
    tried: list[int] = []
    while (replica := replicas.pick(tried)) is not None:
        tried.append(replica.number)
    return tried


def test_healthy_replicas_are_asked_in_the_order_of_preference(three: Replicas) -> None:
    assert numbers(three) == [0, 1, 2]


def test_a_failed_one_is_asked_last_until_its_cool_off_is_over(three: Replicas, clock: Clock) -> None:
    three.bad(three.all[0], TransientError("reset"))
    assert numbers(three) == [1, 2, 0]
    clock.now += 5.1
    assert numbers(three)[0] == 0


def test_after_the_cool_off_one_reader_tries_and_the_others_wait_for_its_news(
    three: Replicas, clock: Clock
) -> None:
    three.bad(three.all[0], TransientError("reset"))
    clock.now += 5.1
    first, second = three.pick(), three.pick()
    assert first is not None
    assert second is not None
    assert (first.number, second.number) == (0, 1)
    three.good(first, bytes=1, seconds=0.1)
    third = three.pick()
    assert third is not None
    assert third.number == 0


def test_a_cool_off_doubles_up_to_its_most(three: Replicas, clock: Clock) -> None:
    lengths = []
    for _ in range(10):
        three.bad(three.all[0], TransientError("reset"))
        start = clock.now
        while numbers(three)[0] != 0:
            clock.now += 1
        lengths.append(clock.now - start)
    assert lengths == sorted(lengths)
    assert 4 <= lengths[0] <= 6
    assert 299 <= lengths[-1] <= 301


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (ThrottledError("slow down"), 2),
        (TransientError("reset"), 5),
        (SlowReplica(), 30),
        (DeniedError("403"), 300),
    ],
)
def test_each_kind_of_failure_has_its_cool_off(
    three: Replicas, clock: Clock, error: Exception, seconds: float
) -> None:
    three.bad(three.all[0], error)
    clock.now += seconds - 0.1
    assert numbers(three)[0] == 1
    clock.now += 0.2
    assert numbers(three)[0] == 0


@pytest.mark.parametrize("error", [NotFoundError("no object"), CorruptError("digest")])
def test_one_bad_object_does_not_speak_against_a_replica_but_three_do(
    three: Replicas, error: Exception
) -> None:
    for _ in range(2):
        three.bad(three.all[0], error)
        assert numbers(three)[0] == 0
    three.bad(three.all[0], error)
    assert numbers(three)[0] == 1


def test_throttling_is_counted_every_time_and_logged_once(three: Replicas, caplog) -> None:
    with caplog.at_level("WARNING"):
        for _ in range(1000):
            three.bad(three.all[0], ThrottledError("slow down"))
    assert three.stats.total()["throttled"] == 1000
    assert len(caplog.records) == 1


def test_a_read_is_slow_past_the_95th_percentile_of_its_size(three: Replicas) -> None:
    assert three.hedge_after(1 << 20) == module._HEDGE_UNKNOWN
    for i in range(100):
        three.good(three.all[0], bytes=1 << 20, seconds=1.0 if i < 95 else 2.0)
    assert 1.4 < three.hedge_after(1 << 20) < 3.1
    assert three.hedge_after(4 << 20) > 3 * three.hedge_after(1 << 20)
    assert three.hedge_after(1) == three.hedge_after(1 << 20)


def test_a_slow_read_is_hedged_and_the_slow_replica_left_alone(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "_HEDGE_UNKNOWN", 0.2)
    make_dataset(tmp_path / "remote")
    lame = FaultyStore(tmp_path / "remote", "faulty://lame", slow(3.0))
    stream = ShardSource(replicas=[lame, LocalStore(tmp_path / "remote")], local=tmp_path / "local")
    started = time.monotonic()
    assert read_all(stream) == list(range(300))
    assert time.monotonic() - started < 2.5
    total = stream.stats.total()
    assert (total["hedges"], total["hedges_won"]) == (1, 1)
    assert total["shards_fetched"] == len(stream.index.shards)
    assert stream.health()["faulty://lame"].startswith("SlowReplica")
    stream.close()


def test_both_halves_of_a_hedge_may_finish(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "_HEDGE_UNKNOWN", 0.05)
    monkeypatch.setattr(module, "_HEDGE_LEAST", 0.05)
    make_dataset(tmp_path / "remote")
    pair = [FaultyStore(tmp_path / "remote", f"faulty://{name}", slow(0.07)) for name in "ab"]
    stream = ShardSource(replicas=pair, local=tmp_path / "local")
    assert read_all(stream) == list(range(300))
    assert stream.stats.total()["shards_fetched"] == len(stream.index.shards)
    stream.close()
    deadline = time.monotonic() + 3
    while temp_files(tmp_path / "local") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert temp_files(tmp_path / "local") == []


def test_a_hedge_that_fails_leaves_the_slow_read_to_finish(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "_HEDGE_UNKNOWN", 0.05)
    make_dataset(tmp_path / "remote", samples=20)
    lame = FaultyStore(tmp_path / "remote", "faulty://lame", slow(0.4))
    broken = FaultyStore(tmp_path / "remote", "faulty://broken", down)
    stream = ShardSource(replicas=[lame, broken], local=tmp_path / "local")
    assert read_all(stream) == list(range(20))
    stream.close()


def test_a_replica_that_dies_in_mid_epoch_and_returns_is_used_again(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "_PROBE_SECONDS", 0.05)
    monkeypatch.setattr(module, "_cool_off", lambda error: (0.1, 0.2))
    index = make_dataset(tmp_path / "remote")
    main = FaultyStore(tmp_path / "remote", "faulty://main")
    spare = FaultyStore(tmp_path / "remote", "faulty://spare")
    stream = ShardSource(replicas=[main, spare], local=tmp_path / "local")
    ids = []
    for shard in range(len(index.shards)):
        if shard == 3:
            main.fault = down
        if shard == 6:
            main.fault = lambda key: None
            time.sleep(0.25)
        opened = stream.open(shard)
        ids += [int(opened[i]["id"]) for i in range(len(opened))]
    assert ids == list(range(300))
    assert len([key for key in spare.reads if key != "index.json"]) == 3
    assert len(main.reads) == len(index.shards) - 3 + 1
    stream.close()


def test_a_replica_with_an_old_version_serves_what_both_have(tmp_path: Path) -> None:
    make_dataset(tmp_path / "old", samples=100)
    make_dataset(tmp_path / "new", samples=300)
    new = FaultyStore(tmp_path / "new", "faulty://new")
    stream = ShardSource(
        replicas=[new, LocalStore(tmp_path / "old")],
        local=tmp_path / "local",
        download_timeout=0.2,
        download_retry=0,
    )
    count = len(stream.index.shards)
    new.fault = down
    assert int(stream.open(0)[0]["id"]) == 0
    with pytest.raises(TransientError) as caught:
        stream.open(count - 1)
    assert "faulty://new" in str(caught.value)
    assert str(tmp_path / "old") in str(caught.value)
    new.fault = lambda key: None
    assert read_all(stream) == list(range(300))


@pytest.mark.parametrize("digests", [True, False])
def test_a_replica_that_is_another_dataset_is_passed_over_by_name(tmp_path: Path, caplog, digests) -> None:
    """Also where names and sizes are the same and nothing but the other index tells."""
    index = make_dataset(tmp_path / "remote", compression=None)
    make_dataset(tmp_path / "other", compression=None, first=1000)
    other_index = json.loads((tmp_path / "other/index.json").read_text())
    for info, entry in zip(index.shards, other_index["shards"], strict=False):
        name = info.stored.basename  # as another writer would call both
        (tmp_path / "other" / entry["raw_data"]["basename"]).rename(tmp_path / "other" / name)
        entry["raw_data"]["basename"] = name
    (tmp_path / "other/index.json").write_text(json.dumps(other_index))
    if not digests:
        for folder in ("remote", "other"):
            entries = json.loads((tmp_path / folder / "index.json").read_text())
            for entry in entries["shards"]:
                entry["raw_data"]["hashes"] = {}
            (tmp_path / folder / "index.json").write_text(json.dumps(entries))
    main, other, spare = (
        FaultyStore(tmp_path / folder, f"faulty://{name}")
        for folder, name in (("remote", "main"), ("other", "other"), ("remote", "spare"))
    )
    stream = ShardSource(replicas=[main, other, spare], local=tmp_path / "local")
    assert int(stream.open(0)[0]["id"]) == 0
    main.fault = down
    with caplog.at_level("WARNING", logger="datasync.streaming"):
        assert read_all(stream) == list(range(300))
    assert other.reads == ["index.json"]
    assert stream.stats.total()["strangers"] == 1
    assert len([r for r in caplog.records if "faulty://other" in r.getMessage()]) == 1
    assert "another dataset: version" in caplog.text
    stream.close()


def test_a_replica_that_is_published_anew_in_mid_epoch_is_read_for_what_both_have(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(identity, "_LOOK_AGAIN_SECONDS", 0.0)
    make_dataset(tmp_path / "old", samples=100)
    make_dataset(tmp_path / "new", samples=300)
    main, spare = (FaultyStore(tmp_path / "new", f"faulty://{name}") for name in ("main", "spare"))
    stream = ShardSource(replicas=[main, spare], local=tmp_path / "local", threads=1)
    last = len(stream.index.shards) - 1
    name = stream.index.shards[last].stored.basename
    main.fault = down
    assert int(stream.open(1)[0]["id"]) > 0
    spare._store = LocalStore(tmp_path / "old")
    main.fault = lambda key: None if key == name else down(key)
    assert int(stream.open(last)[0]["id"]) > 100  # the spare lacks it
    assert int(stream.open(0)[0]["id"]) == 0  # the spare has it still
    main.fault = lambda key: None
    assert read_all(stream) == list(range(300))
    stream.close()


def test_readers_in_many_threads_get_every_sample(tmp_path: Path) -> None:
    make_dataset(tmp_path / "remote")
    flaky = FaultyStore(tmp_path / "remote", "faulty://flaky")
    calls = [0]

    def sometimes(key: str) -> None:
        calls[0] += 1
        if calls[0] % 3 == 0:
            raise TransientError(f"reset: {key}")

    flaky.fault = sometimes
    stream = ShardSource(replicas=[flaky, LocalStore(tmp_path / "remote")], local=tmp_path / "local")
    _ = stream.index
    results: list[list[int]] = []
    threads = [threading.Thread(target=lambda: results.append(read_all(stream))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [list(range(300))] * 8
    assert stream.stats.total()["shards_fetched"] == len(stream.index.shards)
    stream.close()


def test_every_replica_that_failed_is_named_also_where_two_have_one_url(tmp_path: Path) -> None:
    """Buckets of one name at two endpoints."""

    def refusing(port: int):
        def fault(key: str) -> None:
            raise TransientError(f"nothing listens at {port}", mend="start it")

        return fault

    stores = [FaultyStore(tmp_path / "none", "s3://bucket/x", refusing(port)) for port in (8001, 8002)]
    source = ShardSource(replicas=stores, local=tmp_path / "local", download_retry=0, download_timeout=0.2)
    with pytest.raises(TransientError, match=r"(?s)nothing listens at 8001.*nothing listens at 8002"):
        _ = source.index


def test_a_replica_whose_index_hangs_does_not_hold_up_the_others(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "_cool_off", lambda error: (0.0, 0.0))
    make_dataset(tmp_path / "remote")
    main, hanging = (FaultyStore(tmp_path / "remote", f"faulty://{name}") for name in ("main", "hanging"))
    stream = ShardSource(replicas=[main, hanging], local=tmp_path / "local")
    last = len(stream.index.shards) - 1
    released = threading.Event()
    begun = threading.Event()

    def hang(key: str) -> None:
        begun.set()
        released.wait(20)

    hanging.fault = hang
    name = stream.index.shards[last].stored.basename
    main.fault = lambda key: down(key) if key == name else None
    waiting = threading.Thread(target=stream.open, args=(last,), daemon=True)
    waiting.start()
    assert begun.wait(10)
    main.fault = lambda key: None
    started = time.monotonic()
    assert int(stream.open(0)[0]["id"]) == 0
    assert time.monotonic() - started < 5
    released.set()
    waiting.join(20)
    assert not waiting.is_alive()
    stream.close()
