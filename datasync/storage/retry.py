"""The store's own patience: a few quick attempts at one request, and a pause shared by all threads.

A request is tried again after a reset, a timeout, a 5xx or a request to slow down, with a growing pause and
jitter, `ATTEMPTS` times within seconds; who runs for hours adds a deadline of its own around that.

When an endpoint asks to slow down (503 SlowDown, 429), every thread of the process waits, not only the one
that was told: `Gate` holds all requests to that endpoint for a pause that doubles while the answer stays the
same and shrinks with every request that passes.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

ATTEMPTS = 5

_FIRST_SECONDS = 0.1
_MOST_SECONDS = 5.0
_GATE_FIRST, _GATE_MOST = 0.05, 5.0


def pause_before(attempt: int, *, draw: Callable[[], float] = random.random) -> float:
    """Seconds to wait before attempt number `attempt` (the first repeat is 1): half fixed, half drawn."""
    most: float = min(_FIRST_SECONDS * 3 ** (attempt - 1), _MOST_SECONDS)
    return most * (0.5 + 0.5 * draw())


class Gate:
    """The pause of one endpoint.

    Args:
        clock (Callable[[], float]): Monotonic seconds.
        sleep (Callable[[float], None]): How to wait.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
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
