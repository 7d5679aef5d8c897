"""Counters that processes share, and their export."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from datasync.streaming.stats import FIELDS, Stats, StatsCollector, write_prometheus


def _count(stats: Stats) -> None:
    stats.add(hits=2, wait_seconds=0.25)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_what_a_child_counts_is_seen_by_its_parent(method: str) -> None:
    stats = Stats()
    stats.add(hits=1)
    child = multiprocessing.get_context(method).Process(target=_count, args=(stats,))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert stats.total()["hits"] == 3
    assert {name: counts["hits"] for name, counts in stats.workers().items()} == {"main": 1, "worker 0": 2}


def test_a_copy_that_goes_elsewhere_starts_from_zero() -> None:
    stats = Stats()
    stats.add(hits=5)
    copy = pickle.loads(pickle.dumps(stats))
    copy.add(hits=1)
    assert (stats.total()["hits"], copy.total()["hits"]) == (5, 1)


def test_threads_lose_no_count() -> None:
    stats = Stats()
    threads = [threading.Thread(target=lambda: [stats.add(hits=1) for _ in range(2000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stats.total()["hits"] == 8000


def test_an_unknown_counter_is_refused() -> None:
    with pytest.raises(KeyError):
        Stats().add(no_such=1)


def test_an_event_is_logged_once(caplog) -> None:
    stats = Stats()
    with caplog.at_level("WARNING"):
        for _ in range(100):
            stats.log_once("event", "it happened to %s", "a")
    assert [record.getMessage() for record in caplog.records] == ["it happened to a"]


def test_prometheus_sees_every_counter_of_every_process(tmp_path: Path) -> None:
    stats = Stats()
    stats.add(hits=3, wait_seconds=1.5)
    registry = CollectorRegistry()
    registry.register(StatsCollector(stats, dataset="emoji"))
    text = generate_latest(registry).decode()
    assert 'datasync_stream_hits_total{dataset="emoji",worker="main"} 3.0' in text
    assert 'datasync_stream_wait_seconds_total{dataset="emoji",worker="main"} 1.5' in text
    assert all(f"datasync_stream_{name}_total" in text for name in FIELDS)
    write_prometheus(tmp_path / "stream.prom", stats, dataset="emoji")
    assert "datasync_stream_hits_total" in (tmp_path / "stream.prom").read_text()


def test_nothing_is_left_in_shared_memory() -> None:
    before = set(os.listdir("/dev/shm"))
    stats = Stats()
    assert set(os.listdir("/dev/shm")) <= before
    del stats
