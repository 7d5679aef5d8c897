"""What a source has in one process: its cache, its threads, its open shards, what it knows of the replicas.

Made when first needed and never shared: a fork or a pickle starts with nothing and makes its own.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from datasync.errors import StoreError
from datasync.streaming.attempt import Cancelled, Wanted
from datasync.streaming.cache import Cache
from datasync.streaming.flight import Flights
from datasync.streaming.identity import Identity
from datasync.streaming.only_copy import OnlyCopy
from datasync.streaming.prefetch import Prefetcher
from datasync.streaming.replicas import Replicas
from shards.mds import Shard

_OPEN_MOST, _OPEN_LEAST = 128, 4
_OPEN_IN_MEMORY = 8
_CLOSE_SECONDS = 5.0
_LOOK_AGAIN_SECONDS = 2.0  # how long a planned shard is taken to be where it was


class Process:
    """One process's part of a source.

    Args:
        replicas (Replicas): Where shards are, and how those places fare.
        identity (Identity): Which of them hold the dataset.
        cache (Cache): The cache folder.
        prefetch (Callable): Bring one shard on a background thread.
        threads (int): How many of those.
        sources (Callable): How many sources this process has; they share its file descriptors.
    """

    def __init__(
        self,
        *,
        replicas: Replicas,
        identity: Identity,
        cache: Cache,
        prefetch: Callable[[int], None],
        threads: int,
        sources: Callable[[], int],
    ) -> None:
        self.pid = os.getpid()
        self.closing = threading.Event()
        self.replicas = replicas
        self.identity = identity if len(replicas) > 1 else None
        self.cache = cache
        self.only_copy = OnlyCopy(cache.root)
        self.flights = Flights()
        self.prefetcher = Prefetcher(prefetch, threads)
        self.plan: dict[str, int] = {}
        self.wanted: dict[int, Wanted] = {}
        self._sources = sources
        self._open_most = _OPEN_MOST
        self._opened: OrderedDict[int, Shard] = OrderedDict()
        self._seen: dict[int, float] = {}  # when a shard was last found in the cache
        self._last_plan: tuple[int, ...] = ()
        self._planned = -math.inf
        self._lock = threading.Lock()

    def opened_get(self, shard: int) -> Shard | None:
        """An open shard, which is now the last to be forgotten."""
        with self._lock:
            opened = self._opened.get(shard)
            if opened is not None:
                self._opened.move_to_end(shard)
            return opened

    def opened_put(self, shard: int, opened: Shard) -> None:
        """Keep a shard open; the one that was used longest ago is forgotten for it.

        Forgotten is not closed: whoever still reads it keeps it.
        """
        most = max(_OPEN_LEAST, min(self._open_most, _descriptors() // max(self._sources(), 1)))
        with self._lock:
            self._opened[shard] = opened
            while len(self._opened) > most:
                self._opened.popitem(last=False)

    def keep_few_open(self) -> None:
        """From now on open shards cost memory of this process alone."""
        self._open_most = _OPEN_IN_MEMORY

    def release(self) -> None:
        """Forget all open shards, so that what nobody reads any more can be evicted."""
        with self._lock:
            self._opened.clear()

    def plan_changed(self, shards: Sequence[int]) -> bool:
        """Whether a plan says something new, or the last one is old enough to be looked at again."""
        plan, now = tuple(shards), time.monotonic()
        if plan == self._last_plan and now - self._planned < _LOOK_AGAIN_SECONDS:
            return False
        self._last_plan, self._planned = plan, now
        return True

    def is_here(self, shard: int, wanted: Wanted) -> bool:
        """Whether the shard is open here or trusted in the cache, now or a moment ago."""
        now = time.monotonic()
        with self._lock:
            if shard in self._opened or now - self._seen.get(shard, -math.inf) < _LOOK_AGAIN_SECONDS:
                return True
        if not self.cache.trusted(wanted.raw):
            return False
        with self._lock:
            self._seen[shard] = now
        return True

    def abandon(self) -> None:
        """Let the threads end by themselves, for a source that nobody uses any more."""
        if self.pid == os.getpid():
            self.closing.set()
            self.prefetcher.stop()

    def close(self) -> None:
        """Stop the threads, and forget the open shards."""
        self.closing.set()
        deadline = time.monotonic() + _CLOSE_SECONDS
        self.prefetcher.close(deadline)
        self.flights.close(deadline)
        self.release()


class RoomPatience:
    """Waiting for room, until it has been long enough.

    Args:
        seconds (float): How long in all.
        closing (threading.Event): Ends the wait.
    """

    def __init__(self, seconds: float, closing: threading.Event) -> None:
        self._left = seconds
        self._closing = closing
        self._pause = 0.05

    def wait(self, error: BaseException) -> None:
        """A pause because of `error`; raises it as an error that a user can read when time is up."""
        if self._left <= 0:
            raise StoreError(
                str(error), mend="free space on that disk, raise cache_limit, or choose another folder"
            ) from error
        if self._closing.wait(self._pause):
            raise Cancelled
        self._left -= self._pause
        self._pause = min(self._pause * 2, 1.0)


def _descriptors() -> int:
    """How many open shards this process can afford: a quarter of its file descriptors."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1024 if soft == resource.RLIM_INFINITY else soft // 4
