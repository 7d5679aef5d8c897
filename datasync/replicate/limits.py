"""How many operations an endpoint takes at once.

`Concurrency` climbs while more operations at once move more, steps back when they do not, and falls at once
when the endpoint asks for less (503, 429) or times out. There is one for each endpoint in a process, shared
by every worker, so that a hundred workers do not each learn it anew. Several places at one endpoint share it
evenly, and each always has one operation, so that one that hangs does not keep the others. Byte rates are the
store's own business (`storage.paced`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

from datasync.errors import ThrottledError, TransientError
from datasync.storage.base import Store

START, MOST = 8, 64
_WINDOW_SECONDS = 1.0


class Concurrency:
    """A semaphore that finds its own size.

    Every window it compares what was moved with the best so far. More by a twentieth: a step up by a quarter.
    Not more after a step up: back, and rest for ten windows before the next try.

    Args:
        start (int): Operations at once in the beginning. Default: ``8``.
        most (int): Never more than this. Default: ``64``.
        clock (Callable[[], float]): Monotonic seconds.
    """

    def __init__(
        self, *, start: int = START, most: int = MOST, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit = min(start, most)
        self.most = most
        self._clock = clock
        self._lock = threading.Lock()
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[threading.Lock]] = {}
        self._saturated = False
        self._began = clock()
        self._moved = 0.0
        self._best = 0.0
        self._climbed_from: int | None = None
        self._rest = 0
        self._calm_until = 0.0

    @contextlib.contextmanager
    def slot(self, bytes: int = 0, place: str = "") -> Iterator[None]:
        """Hold one slot for one operation that moves `bytes` at a `place` of this endpoint.

        A `ThrottledError` or `TransientError` that leaves the block shrinks the limit.
        """
        self._enter(place)
        try:
            yield
        except ThrottledError:
            self.back_off(0.5)
            raise
        except TransientError:
            self.back_off(0.8)
            raise
        else:
            self._count(bytes)
        finally:
            with self._lock:
                self._running[place] -= 1
                self._let_in()

    def _enter(self, place: str) -> None:
        with self._lock:
            if place not in self._waiting and self._has_room(place):
                self._running[place] += 1
                return
            self._saturated = True
            turn = threading.Lock()
            turn.acquire()
            self._waiting.setdefault(place, deque()).append(turn)
        turn.acquire()  # until it is let in

    def _has_room(self, place: str) -> bool:
        return not self._running[place] or self._running.total() < self.limit

    def _let_in(self) -> None:
        """Let in those who wait, from where the fewest are running; under the lock."""
        while self._waiting:
            place = min(self._waiting, key=self._running.__getitem__)
            if not self._has_room(place):
                return
            turns = self._waiting[place]
            turns.popleft().release()
            self._running[place] += 1
            if not turns:
                del self._waiting[place]

    def back_off(self, factor: float) -> None:
        """Shrink; errors of one burst count once."""
        with self._lock:
            if self._clock() < self._calm_until:
                return
            self._calm_until = self._clock() + _WINDOW_SECONDS
            self.limit = max(1, int(self.limit * factor))
            self._best, self._climbed_from, self._rest = 0.0, None, 5
            self._restart()

    def _count(self, bytes: int) -> None:
        with self._lock:
            # A request costs something even when it moves little: small objects climb by count.
            self._moved += bytes + 65_536
            elapsed = self._clock() - self._began
            if elapsed >= _WINDOW_SECONDS:
                if self._saturated:
                    self._adapt(self._moved / elapsed)
                self._restart()

    def _restart(self) -> None:
        self._began, self._moved, self._saturated = self._clock(), 0.0, False

    def _adapt(self, rate: float) -> None:
        better = rate > self._best * 1.05
        if self._climbed_from is not None and not better:
            self.limit, self._climbed_from, self._rest = self._climbed_from, None, 10
            return
        self._best = max(self._best, rate)
        if self._rest > 0:
            self._rest -= 1
            return
        step = min(self.most, self.limit + max(1, self.limit // 4))
        self._climbed_from = self.limit if step > self.limit else None
        self.limit = step
        self._let_in()


_by_endpoint: dict[str, Concurrency] = {}
_by_endpoint_lock = threading.Lock()


def concurrency_of(store: Store) -> Concurrency:
    """The one limiter of a store's endpoint in this process; a folder's own, as folders may be mounts."""
    endpoint = endpoint_of(store)
    with _by_endpoint_lock:
        return _by_endpoint.setdefault(store.url if endpoint == "file://" else endpoint, Concurrency())


def endpoint_of(store: Store) -> str:
    """What limits a store: its server, or for folders the host."""
    endpoint = getattr(getattr(store, "store", store), "endpoint", None)
    if isinstance(endpoint, str) and endpoint:
        return endpoint
    parts = urlsplit(store.url)
    return f"{parts.scheme}://{parts.netloc}" if "://" in store.url else "file://"


def identity(store: Store) -> tuple[str, str]:
    """What tells two places apart: buckets of one name may be at two servers."""
    return endpoint_of(store), store.url
