"""Memory for objects on their way, used again and again.

Fresh memory costs more than reading into it: the kernel clears every page first. So a buffer goes back to
its pool when the last lane has written what is in it, and the next object of about that size takes it. How
much is out at once is bounded by the lanes' windows.
"""

from __future__ import annotations

import contextlib
import mmap
import threading

_SMALL_BYTES = 256 << 10
_IDLE_BYTES = 160 << 20


class Loan:
    """Memory that is on loan until all of its users have released it.

    Args:
        view (memoryview): The memory, of the length that was asked for.
    """

    __slots__ = ("_memory", "_pool", "_users", "view")

    def __init__(self, pool: Buffers, memory: mmap.mmap | None, view: memoryview) -> None:
        self.view = view
        self._pool, self._memory, self._users = pool, memory, 1

    def share(self, users: int) -> None:
        """Have `users` more who will each release it."""
        with self._pool.lock:
            self._users += users

    def release(self) -> None:
        """One user needs it no longer."""
        with self._pool.lock:
            self._users -= 1
            if not self._users and self._memory is not None:
                self._pool.take_back(self._memory)


class Buffers:
    """A pool of buffers, each a power of two large; pages that are never touched cost nothing."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._idle: dict[int, list[mmap.mmap]] = {}
        self._idle_bytes = 0

    def take(self, length: int) -> Loan:
        """Memory of `length` bytes, with anything in it."""
        if length <= _SMALL_BYTES:
            return Loan(self, None, memoryview(bytearray(length)))
        size = 1 << (length - 1).bit_length()
        with self.lock:
            idle = self._idle.get(size)
            memory = idle.pop() if idle else None
            self._idle_bytes -= size if memory is not None else 0
        if memory is None:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            # One fault for every 2 MiB instead of 512; a kernel without large pages says no, which is fine.
            with contextlib.suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
        return Loan(self, memory, memoryview(memory)[:length])

    def take_back(self, memory: mmap.mmap) -> None:
        """Keep a buffer for the next object, if there is not enough already. Under `lock`."""
        if self._idle_bytes + len(memory) <= _IDLE_BYTES:
            self._idle_bytes += len(memory)
            self._idle.setdefault(len(memory), []).append(memory)
