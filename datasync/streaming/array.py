"""Indexing like an array: by a number from either end, a slice, a list or an array of numbers."""

from __future__ import annotations

from typing import Any

import numpy as np


class Array:
    """Adds `__getitem__` to a class that has `size` and `get_item(number)`."""

    @property
    def size(self) -> int:
        """How many items there are."""
        raise NotImplementedError

    def get_item(self, sample_id: int) -> Any:
        """The item at a number from 0 to below `size`."""
        raise NotImplementedError

    def __getitem__(self, at: Any) -> Any:
        """One item for a number; a list of items, nested like `at`, for anything else.

        Raises:
            IndexError: A number is outside.
            TypeError: `at` is nothing that names items.
        """
        if isinstance(at, int | np.integer):
            number = int(at) + self.size if at < 0 else int(at)
            if not 0 <= number < self.size:
                raise IndexError(f"there are {self.size} samples, none at {int(at)}")
            return self.get_item(number)
        if isinstance(at, slice):
            return [self.get_item(number) for number in range(*at.indices(self.size))]
        if isinstance(at, list | tuple | range | np.ndarray):
            return [self[item] for item in at]
        raise TypeError(f"samples are named by numbers, slices and lists of them, not by {type(at).__name__}")
