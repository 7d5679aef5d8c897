"""Concurrency that finds its size, and operations that are tried again for the right reasons only."""

from __future__ import annotations

import threading

import pytest

from datasync.errors import CorruptError, DeniedError, NotFoundError, ThrottledError, TransientError
from datasync.replicate.limits import Concurrency, concurrency_of
from datasync.replicate.retry import Stopped, retrying
from datasync.storage.local import LocalStore


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def saturate(limiter: Concurrency, clock: Clock, *, rate, windows: int) -> list[int]:
    """Drive a limiter whose endpoint moves `rate(limit)` bytes a second; returns its limits over time."""
    seen = []
    for _ in range(windows):
        limiter._saturated = True
        clock.now += 1.0
        with limiter.slot(int(rate(limiter.limit))):
            pass
        seen.append(limiter.limit)
    return seen


def test_it_grows_while_more_at_once_moves_more_and_stays_near_where_it_stops():
    clock = Clock()
    limiter = Concurrency(start=4, most=64, clock=clock)
    seen = saturate(limiter, clock, rate=lambda n: min(n, 20) * 10_000_000, windows=60)
    assert max(seen) >= 20
    assert 18 <= seen[-1] <= 32


def test_it_does_not_grow_where_that_does_not_help():
    clock = Clock()
    limiter = Concurrency(start=8, most=64, clock=clock)
    seen = saturate(limiter, clock, rate=lambda n: 50_000_000, windows=40)
    assert max(seen) <= 12


def test_a_request_to_slow_down_halves_it_and_a_burst_of_them_counts_once():
    clock = Clock()
    limiter = Concurrency(start=32, clock=clock)
    for _ in range(10):
        with pytest.raises(ThrottledError), limiter.slot():
            raise ThrottledError("slow down")
    assert limiter.limit == 16
    clock.now += 2
    with pytest.raises(TransientError), limiter.slot():
        raise TransientError("timeout")
    assert limiter.limit == 12


def test_it_never_falls_below_one_and_other_errors_do_not_count():
    clock = Clock()
    limiter = Concurrency(start=2, clock=clock)
    with pytest.raises(NotFoundError), limiter.slot():
        raise NotFoundError("no")
    assert limiter.limit == 2
    for _ in range(5):
        clock.now += 2
        with pytest.raises(ThrottledError), limiter.slot():
            raise ThrottledError("slow down")
    assert limiter.limit == 1


def test_no_more_than_the_limit_run_at_once():
    limiter = Concurrency(start=3, most=3)
    running, most, lock = [0], [0], threading.Lock()

    def work() -> None:
        with limiter.slot(1):
            with lock:
                running[0] += 1
                most[0] = max(most[0], running[0])
            threading.Event().wait(0.01)
            with lock:
                running[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] == 3


def test_a_place_that_hangs_leaves_the_others_at_its_endpoint_one_operation():
    limiter = Concurrency(start=2)
    hangs, done = threading.Event(), []

    def hang() -> None:
        with limiter.slot(1, "b"):
            hangs.wait(30)

    def work() -> None:
        with limiter.slot(1, "c"):
            done.append(1)

    hanging = [threading.Thread(target=hang) for _ in range(6)]
    for thread in hanging:
        thread.start()
    while limiter._running["b"] < 2:
        threading.Event().wait(0.001)
    working = [threading.Thread(target=work) for _ in range(8)]
    for thread in working:
        thread.start()
    for thread in working:
        thread.join(10)
    assert len(done) == 8
    assert limiter._running["b"] == 2
    hangs.set()
    for thread in hanging:
        thread.join(10)
    assert limiter._running.total() == 0
    assert not limiter._waiting


def test_places_share_an_endpoint_evenly():
    limiter, order = Concurrency(start=1), []
    gate = threading.Event()

    def first() -> None:
        with limiter.slot(1, "a"):
            gate.wait(30)

    def work(place: str) -> None:
        with limiter.slot(1, place):
            order.append(place)

    threads = [threading.Thread(target=first)]
    threads[0].start()
    while not limiter._running["a"]:
        threading.Event().wait(0.001)
    for number in range(10):
        threads.append(threading.Thread(target=work, args=("a",)))
        threads[-1].start()
        while len(limiter._waiting.get("a", ())) <= number:
            threading.Event().wait(0.001)
    work("b")
    assert order == ["b"]
    gate.set()
    for thread in threads:
        thread.join(10)
    assert order == ["b", *["a"] * 10]


def test_one_limiter_serves_an_endpoint(tmp_path, s3_a, s3_b):
    assert concurrency_of(s3_a.store("x")) is concurrency_of(s3_a.store("y"))
    assert concurrency_of(s3_a.store("x")) is not concurrency_of(s3_b.store("x"))
    # One folder may be a mount that hangs.
    assert concurrency_of(LocalStore(tmp_path / "a")) is concurrency_of(LocalStore(tmp_path / "a"))
    assert concurrency_of(LocalStore(tmp_path / "a")) is not concurrency_of(LocalStore(tmp_path / "b"))


def test_what_is_transient_is_tried_again():
    failures = [TransientError("reset"), ThrottledError("slow down"), TransientError("timeout")]

    def operation() -> str:
        if failures:
            raise failures.pop()
        return "done"

    assert retrying(operation) == "done"


@pytest.mark.parametrize("error", [NotFoundError("no"), DeniedError("no"), CorruptError("no")])
def test_what_will_not_change_is_not_tried_again(error):
    calls = []

    def operation() -> None:
        calls.append(1)
        raise error

    with pytest.raises(type(error)):
        retrying(operation)
    assert len(calls) == 1


def test_it_ends_after_its_time_or_when_told():
    def operation() -> None:
        raise TransientError("down")

    with pytest.raises(TransientError):
        retrying(operation, seconds=0.5)
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    with pytest.raises(Stopped):
        retrying(operation, seconds=60, stop=stop)
