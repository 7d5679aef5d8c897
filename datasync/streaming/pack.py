"""Several batches on their way from a DataLoader worker to its rank.

To hand a tensor to another process costs the same whatever its size, so a column of fixed size travels as
one tensor for all of them, and comes out as slices of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from datasync.streaming.collate import collate_values


class Pack:
    """Several batches on their way between processes.

    Args:
        joined (dict[str, Any]): Columns of all batches together: tensors, and lists of texts or bytes.
        parted (dict[str, list[Any]]): Columns that are collated for each batch by itself.
        sizes (list[int]): Samples of each batch.
    """

    def __init__(self, joined: dict[str, Any], parted: dict[str, list[Any]], sizes: list[int]) -> None:
        self.joined, self.parted, self.sizes = joined, parted, sizes

    @classmethod
    def make(cls, made: tuple[Any, list[int]]) -> Pack:
        """From the columns of a chunk, or its batches where the columns cannot be put together."""
        columns, sizes = made
        if not isinstance(columns, dict):
            return cls({}, {"": [default_collate(batch) for batch in columns]}, sizes)
        joined, parted = {}, {}
        for name, values in columns.items():
            if isinstance(values, np.ndarray):
                joined[name] = collate_values(values)
            elif isinstance(values[0], str | bytes):
                joined[name] = values
            else:
                ends = np.cumsum(sizes).tolist()
                parted[name] = [
                    collate_values(values[end - size : end]) for end, size in zip(ends, sizes, strict=True)
                ]
        return cls(joined, parted, sizes)

    def batches(self, least: int) -> Iterator[Any]:
        """The batches that have at least so many samples, one after another."""
        first = 0
        for i, size in enumerate(self.sizes):
            if "" in self.parted:
                batch = self.parted[""][i]
            else:
                batch = {name: values[first : first + size] for name, values in self.joined.items()}
                batch |= {name: values[i] for name, values in self.parted.items()}
            first += size
            if size >= least:
                yield batch

    def pin_memory(self) -> Pack:
        """The same in page-locked memory; called by the DataLoader."""
        self.joined = {name: _pin(values) for name, values in self.joined.items()}
        self.parted = {name: [_pin(value) for value in values] for name, values in self.parted.items()}
        return self


def _pin(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.pin_memory()
    return {name: _pin(item) for name, item in value.items()} if isinstance(value, dict) else value
