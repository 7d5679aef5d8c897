"""How many bytes a second a cluster may move, by time of day.

`Timetable` is the pure part: limits and hours in, a rate out. `Pace` makes threads keep to it: each asks for
its bytes before it moves them and sleeps until they are due. One `Pace` is shared by all that a process does
at one cluster.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from datasync.storage.retry import patience

_BURST_SECONDS = 0.25
_LOOK_AGAIN_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hours:
    """A limit for a part of the day, which may pass midnight.

    Args:
        start (int): First minute of the day, local time.
        end (int): Minute of the day at which it ends.
        rate (float | None): Bytes a second; None is no limit.
    """

    start: int
    end: int
    rate: float | None

    def holds(self, minute: int) -> bool:
        """Whether `minute` of the day is within."""
        if self.start < self.end:
            return self.start <= minute < self.end
        return minute >= self.start or minute < self.end


@dataclass(frozen=True, slots=True, kw_only=True)
class Timetable:
    """Limits by time of day.

    Args:
        default (float | None): Bytes a second outside `hours`; None is no limit.
        hours (tuple[Hours, ...]): The exceptions; they do not overlap.
    """

    default: float | None = None
    hours: tuple[Hours, ...] = ()

    def rate(self, now: datetime) -> float | None:
        """Bytes a second at `now` in local time; None is no limit."""
        minute = now.hour * 60 + now.minute
        for entry in self.hours:
            if entry.holds(minute):
                return entry.rate
        return self.default

    def overlap(self) -> tuple[Hours, Hours] | None:
        """Two entries that claim the same minute, if there are such."""
        for number, one in enumerate(self.hours):
            for other in self.hours[number + 1 :]:
                if one.holds(other.start) or other.holds(one.start):
                    return one, other
        return None


class Pace:
    """Threads that share a byte rate.

    Args:
        timetable (Timetable): The limits.
        now (Callable[[], datetime]): The wall clock. Default: `datetime.now`.
        clock (Callable[[], float]): A clock in seconds that only goes forward. Default: `time.monotonic`.
        sleep (Callable[[float], None]): How to wait. Default: until the work is to end, at most.
    """

    def __init__(
        self,
        timetable: Timetable,
        *,
        now: Callable[[], datetime] = datetime.now,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = lambda seconds: patience().sleep(seconds),
    ) -> None:
        self._timetable = timetable
        self._now = now
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._due = 0.0
        self._rate: float | None = None
        self._looked = float("-inf")

    def take(self, count: int) -> None:
        """Wait until `count` more bytes may move."""
        with self._lock:
            now = self._clock()
            if now - self._looked > _LOOK_AGAIN_SECONDS:
                self._rate, self._looked = self._timetable.rate(self._now()), now
            if not self._rate or count <= 0:
                return
            # Time left unused is not saved up beyond a short burst.
            self._due = max(self._due, now - _BURST_SECONDS) + count / self._rate
            wait = self._due - now
        if wait > 0:
            self._sleep(wait)
