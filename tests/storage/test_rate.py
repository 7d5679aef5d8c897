"""Byte rates by time of day, and threads that keep to them."""

from __future__ import annotations

import threading
import time
from datetime import datetime, timedelta

from datasync.storage.rate import Hours, Pace, Timetable

_DAY = Timetable(
    default=100.0, hours=(Hours(start=480, end=1200, rate=10.0), Hours(start=1380, end=60, rate=None))
)


def _at(hour: int, minute: int = 0) -> float | None:
    return _DAY.rate(datetime(2030, 1, 1, hour, minute))


def test_the_rate_follows_the_hours() -> None:
    assert [_at(7, 59), _at(8), _at(19, 59), _at(20)] == [100.0, 10.0, 10.0, 100.0]


def test_hours_may_pass_midnight() -> None:
    assert [_at(22, 59), _at(23), _at(0, 30), _at(1)] == [100.0, None, None, 100.0]


def test_overlapping_hours_are_found() -> None:
    assert _DAY.overlap() is None
    assert Timetable(hours=(Hours(start=0, end=60, rate=1), Hours(start=1380, end=30, rate=2))).overlap()


class _Clock:
    """A clock that moves only when somebody sleeps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> datetime:
        return datetime(2030, 1, 1, 7, 0) + timedelta(seconds=self.seconds)

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


def test_a_pace_is_kept_and_changes_with_the_hour() -> None:
    clock = _Clock()
    pace = Pace(_DAY, now=clock.now, clock=lambda: clock.seconds, sleep=clock.sleep)
    for _ in range(100):
        pace.take(100)
    assert 98 <= clock.seconds <= 100
    clock.seconds = 3600.0
    for _ in range(10):
        pace.take(100)
    assert 98 <= clock.seconds - 3600 <= 100


def test_threads_share_one_pace() -> None:
    pace = Pace(Timetable(default=1_000_000.0))
    started = time.monotonic()
    threads = [threading.Thread(target=lambda: [pace.take(50_000) for _ in range(4)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0.5 <= time.monotonic() - started < 2
