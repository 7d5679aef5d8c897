"""Shards on their way to the sink while the next ones are made.

    makes     task 7: shard a, shard b   task 8: shard c …
    stores               a ───────── b, record of 7 ─── c …

Compressing needs the processor, storing waits for a disk or a network; one thread beside the one that makes
shards keeps both busy. A shard is given to it when the one before is stored, so at most one is on its way.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

T = TypeVar("T")


class Storing:
    """The thread that stores, for one task after the other."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._last: Future[Any] | None = None

    def submit(self, step: Callable[[], T]) -> Future[T]:
        """Do `step` when all steps before it are done."""
        future = self._last = self._pool.submit(step)
        return future

    def settle(self) -> None:
        """Wait until every step is done, whatever came of it."""
        if self._last is not None:
            wait([self._last])


class Behind:
    """What one task stores.

    Args:
        storing (Storing): The thread.
    """

    def __init__(self, storing: Storing) -> None:
        self._storing = storing
        self._last: Future[Any] | None = None

    def put(self, step: Callable[[], Any]) -> None:
        """Do `step` behind this call; wait for the one before it and raise what that raised."""
        self._storing.settle()
        if self._last is not None:
            self._last.result()
        self._last = self._storing.submit(step)

    def finish(self, step: Callable[[], T]) -> Future[T]:
        """Do the last step of the task, unless one before it failed: then the future has that error."""
        last = self._last

        def end() -> T:
            if last is not None:
                last.result()
            return step()

        return self._storing.submit(end)
