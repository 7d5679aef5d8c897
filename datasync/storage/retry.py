"""The store's own patience: a few quick attempts at one request, and a pause shared by all threads.

A request is tried again after a reset, a timeout, a 5xx or a request to slow down, with a growing pause and
jitter, `ATTEMPTS` times within seconds; who runs for hours adds a deadline of its own around that.

How long a silent place may keep a request is the caller's to say: `patient(seconds, stop)` holds for all that
this thread does at any store meanwhile, and `inheriting` takes it along to another thread. All attempts at
one thing share that time, and once `stop` is set nothing is waited for longer than `LAST_SECONDS`.

When an endpoint asks to slow down (503 SlowDown, 429), every thread of the process waits, not only the one
that was told: `Gate` holds all requests to that endpoint for a pause that doubles while the answer stays the
same and shrinks with every request that passes.
"""

from __future__ import annotations

import contextlib
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

ATTEMPTS = 5
LAST_SECONDS = 3.0

_FIRST_SECONDS = 0.1
_MOST_SECONDS = 5.0
_GATE_FIRST, _GATE_MOST = 0.05, 5.0
_LEAST_SECONDS = 0.25


def pause_before(attempt: int, *, draw: Callable[[], float] = random.random) -> float:
    """Seconds to wait before attempt number `attempt` (the first repeat is 1): half fixed, half drawn."""
    most: float = min(_FIRST_SECONDS * 3 ** (attempt - 1), _MOST_SECONDS)
    return most * (0.5 + 0.5 * draw())


@dataclass(slots=True)
class Patience:
    """How long one thing is tried at a place from which nothing comes.

    Args:
        seconds (float): Of silence and failures together; what moves ends them. Default: without limit.
        stop (threading.Event | None): Set when nothing is to be tried again. Default: ``None``.
    """

    seconds: float = math.inf
    stop: threading.Event | None = None
    _since: float | None = None

    @property
    def stopped(self) -> bool:
        """Whether the work is to end."""
        return self.stop is not None and self.stop.is_set()

    def left(self) -> float:
        """The longest wait that is still allowed, in seconds; never quite nothing."""
        left = self.seconds if self._since is None else self.seconds - (time.monotonic() - self._since)
        return max(min(left, LAST_SECONDS) if self.stopped else left, _LEAST_SECONDS)

    def failed(self, *, waited: float = 0.0) -> None:
        """A try has failed now, after so many seconds in which nothing came."""
        if self._since is None:
            self._since = time.monotonic() - waited

    def moved(self) -> None:
        """Something has come: the time counts anew from the next failure."""
        self._since = None

    def allows(self, pause: float) -> bool:
        """Whether there may be another try after a pause."""
        since = time.monotonic() if self._since is None else self._since
        return not self.stopped and time.monotonic() - since + pause <= self.seconds

    def sleep(self, seconds: float) -> None:
        """Wait; less, when the work is to end."""
        if self.stop is None:
            time.sleep(seconds)
        else:
            self.stop.wait(seconds)


class _Local(threading.local):
    seconds = math.inf
    stop: threading.Event | None = None
    running: Patience | None = None


_local = _Local()


def patience() -> Patience:
    """This thread's patience: that of the thing under way, else a new one."""
    return _local.running or Patience(_local.seconds, _local.stop)


@contextlib.contextmanager
def patient(seconds: float | None = None, stop: threading.Event | None = None) -> Iterator[None]:
    """Set how long this thread bears silence in the block; None leaves what is set already."""
    before = _local.seconds, _local.stop
    _local.seconds = _local.seconds if seconds is None else seconds
    _local.stop = _local.stop if stop is None else stop
    try:
        yield
    finally:
        _local.seconds, _local.stop = before


@contextlib.contextmanager
def one_thing(seconds: float | None, stop: threading.Event | None, *, default: float) -> Iterator[Patience]:
    """All tries within the block are at one thing and share one patience, also with a block around it.

    Args:
        seconds (float | None): The most; None is what `patient` has set.
        stop (threading.Event | None): None is what `patient` has set.
        default (float): The most where neither says.
    """
    if _local.running is not None:
        yield _local.running
        return
    most = min(math.inf if seconds is None else seconds, _local.seconds)
    _local.running = Patience(default if most == math.inf else most, stop or _local.stop)
    try:
        yield _local.running
    finally:
        _local.running = None


def inheriting(work: Callable[P, R]) -> Callable[P, R]:
    """`work`, for another thread, with the patience that this thread has now."""
    seconds, stop = _local.seconds, _local.stop

    def patiently(*args: P.args, **kwargs: P.kwargs) -> R:
        with patient(seconds, stop):
            return work(*args, **kwargs)

    return patiently


class Gate:
    """The pause of one endpoint.

    Args:
        clock (Callable[[], float]): Monotonic seconds.
        sleep (Callable[[float], None]): How to wait.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = lambda seconds: patience().sleep(seconds),
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._pause = 0.0
        self._until = 0.0

    def wait(self) -> None:
        """Wait until the endpoint may be asked again; threads leave one after the other, not all at once."""
        if not self._pause:
            return
        with self._lock:
            left = self._until - self._clock()
            pause = self._pause
        if left > 0:
            self._sleep(left + random.random() * pause / 2)

    def slow_down(self) -> None:
        """The endpoint has asked for less."""
        with self._lock:
            now = self._clock()
            if now < self._until:
                return  # an answer to a request of before the pause
            self._pause = min(max(self._pause * 2, _GATE_FIRST), _GATE_MOST)
            self._until = now + self._pause

    def passed(self) -> None:
        """A request went well."""
        if self._pause:
            with self._lock:
                self._pause = self._pause * 0.7 if self._pause > _GATE_FIRST / 4 else 0.0
