"""A DataLoader worker ends when the process that started it has ended, however that was.

PyTorch looks at the parent's process id for this, which a fork server hides: workers that it has started
outlive a killed trainer, and keep each other's fork server. What tells in every case is the sentinel, a pipe
that the parent alone holds open.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.connection import wait

_watched: set[int] = set()


def end_with_parent() -> None:
    """In a worker: end this process, at once, when its parent has ended. May be called again and again."""
    parent = multiprocessing.parent_process()
    if parent is None or os.getpid() in _watched:
        return
    _watched.add(os.getpid())
    threading.Thread(
        target=_watch, args=(parent.sentinel,), name="datasync-parent-watch", daemon=True
    ).start()


def _watch(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
