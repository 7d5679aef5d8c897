"""Memory for batches, given out again once nobody looks at the batch that was in it.

Fresh memory costs a page fault for every 4 KiB: an eighth of what decoding a JPEG costs, a quarter of what
gathering tokens costs.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import OrderedDict, deque
from typing import Any

import numpy as np

_IDLE = 3  # arrays of one size that are kept for later
_SIZES = 8  # sizes that are kept: about one a column


class Buffers:
    """Arrays over memory that is used again. Thread-safe; a copy by pickle starts with none."""

    def __init__(self) -> None:
        self._idle: OrderedDict[int, deque[memoryview]] = OrderedDict()

    def take(self, shape: tuple[int, ...], dtype: Any = np.uint8) -> np.ndarray[Any, Any]:
        """An array with any content. Its memory comes back when it and all views of it are gone."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        idle = self._idle.setdefault(size, deque(maxlen=_IDLE))
        memory = None
        with contextlib.suppress(IndexError, KeyError):  # none is idle, or another thread was quicker
            self._idle.move_to_end(size)
            while len(self._idle) > _SIZES:
                self._idle.popitem(last=False)
            memory = idle.pop()
        if memory is None:
            memory = np.empty(size, np.uint8).data
        array = np.frombuffer(memory, np.uint8)
        weakref.finalize(array, idle.append, memory).atexit = False
        made: np.ndarray[Any, Any] = array.view(dtype).reshape(shape)
        return made

    def __reduce__(self) -> tuple[type[Buffers], tuple[()]]:
        return Buffers, ()


class _Shared(np.ndarray[Any, Any]):
    """An array over the memory of a tensor, which it remembers."""

    tensor: Any = None


def shared_array(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """A uint8 array in memory that another process can be handed without a copy, as PyTorch collates in."""
    import torch

    make: Any = torch.UntypedStorage._new_shared  # what torch's own `default_collate` calls, without a type
    storage = make(math.prod(shape), device="cpu")
    tensor = torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)
    array: _Shared = tensor.numpy().view(_Shared)
    array.tensor = tensor
    return array


def tensor_of(array: np.ndarray[Any, Any]) -> Any:
    """The tensor over an array's memory."""
    import torch

    return (
        array.tensor if isinstance(array, _Shared) and array.tensor is not None else torch.from_numpy(array)
    )
