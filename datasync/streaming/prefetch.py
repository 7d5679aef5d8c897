"""Fetching ahead: a plan of what will be used next, and threads that work it off in that order.

A plan is replaced, never extended: the reader says at every step what it will want, and what it no longer
wants is forgotten. A shard that does not fit in the cache now is tried again when the plan moves or room may
have come free. A shard that failed is left to the reader that will ask for it, who reports the error.

Lifecycle: threads start with the first plan that has something to fetch, are daemons, and are joined by
`close`. They hold no lock while they fetch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from datasync.streaming.attempt import Cancelled
from datasync.streaming.room import NoRoom

log = logging.getLogger("datasync.streaming")

_ROOM_SECONDS = 0.5


class Prefetcher:
    """Fetches planned shards in the background.

    Args:
        fetch (Callable): Bring one shard; raises `NoRoom` if it does not fit now.
        threads (int): How many at a time.
    """

    def __init__(self, fetch: Callable[[int], None], threads: int) -> None:
        self._fetch = fetch
        self._count = threads
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._left: list[int] = []  # not yet begun, next use last
        self._running: set[int] = set()
        self._closed = False

    def plan(self, shards: Sequence[int]) -> None:
        """Replace the plan.

        Args:
            shards (Sequence[int]): What is not in the cache yet, in the order of next use.
        """
        with self._changed:
            self._left = [shard for shard in dict.fromkeys(shards) if shard not in self._running][::-1]
            while len(self._threads) < min(self._count, len(self._left)):
                thread = threading.Thread(
                    target=self._work, name=f"datasync-prefetch-{len(self._threads)}", daemon=True
                )
                self._threads.append(thread)
                thread.start()
            self._changed.notify_all()

    @property
    def busy(self) -> bool:
        """Whether something is being fetched."""
        return bool(self._running)

    def poke(self) -> None:
        """Room may have come free."""
        with self._changed:
            self._changed.notify_all()

    def close(self, deadline: float) -> None:
        """Stop after what is running; wait for it until this monotonic time."""
        self.stop()
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    def stop(self) -> None:
        """Begin nothing more."""
        with self._changed:
            self._closed = True
            self._left = []
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._left and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                shard = self._left.pop()
                self._running.add(shard)
            full = False
            try:
                self._fetch(shard)
            except NoRoom as error:
                log.debug("prefetch waits: %s", error)
                full = True
            except Cancelled:
                pass
            except Exception as error:  # noqa: BLE001  whoever opens the shard meets it again and raises it
                log.debug("prefetch of shard %d failed: %s", shard, error)
            with self._changed:
                self._running.discard(shard)
                if full and not self._closed:
                    self._wait_for_room(shard)

    def _wait_for_room(self, shard: int) -> None:
        """Put the shard back where it was, unless the plan has changed meanwhile, and pause."""
        before = self._left
        self._changed.wait(_ROOM_SECONDS)
        if self._left is before and not self._closed:
            self._left.append(shard)
