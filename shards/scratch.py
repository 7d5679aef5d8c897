"""Large buffers that are used again.

A fresh buffer of the size of a shard costs more in page faults than the copy into it. So the last few stay
here, and one is handed out again when nothing refers to it any more: neither its user nor a view of it.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np

Bytes1D = np.ndarray[Any, np.dtype[np.uint8]]

_KEEP = 2
_SMALLEST = 1 << 20
_LARGEST = 1 << 27
_ROUND = 1 << 20
# What `sys.getrefcount` says of a buffer that only this module refers to: the list, the loop and the call.
_UNUSED = 3

_lock = threading.Lock()
_buffers: list[Bytes1D] = []


def take(size: int) -> memoryview:
    """`size` writable bytes of any content; they are the caller's as long as a view of them lives."""
    if not _SMALLEST <= size <= _LARGEST:
        return np.empty(size, np.uint8).data
    with _lock:
        for buffer in _buffers:
            if len(buffer) >= size and sys.getrefcount(buffer) == _UNUSED:
                return buffer[:size].data
        buffer = np.empty(-(-size // _ROUND) * _ROUND, np.uint8)
        if len(_buffers) == _KEEP:
            _buffers.pop(0)
        _buffers.append(buffer)
        return buffer[:size].data
