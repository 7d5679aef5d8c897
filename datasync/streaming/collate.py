"""Values to batches: what PyTorch's `default_collate` makes of samples, made of whole columns if possible.

Values that PyTorch does not collate, such as images, stay a list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

# What `default_collate` knows what to do with.
_COLLATES = (torch.Tensor, np.ndarray, np.generic, int, float, str, bytes, Mapping, Sequence)


def collate_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Columns as `default_collate` would make them of samples, without taking them apart."""
    return {name: collate_values(values) for name, values in columns.items()}


def collate_samples(samples: Sequence[Any]) -> Any:
    """Samples as `default_collate` would make a batch of them, and columns it has no way to stay a list."""
    if not isinstance(samples[0], Mapping):
        return default_collate(list(samples))
    return {name: collate_values([sample[name] for sample in samples]) for name in samples[0]}


def collate_values(values: Any) -> Any:
    """The values of one column, an array or a list, as a batch has them."""
    if isinstance(values, np.ndarray) and values.dtype.kind in "biufc":
        return torch.from_numpy(values)
    values = list(values)
    return default_collate(values) if isinstance(values[0], _COLLATES) else values


def batch_length(batch: Any, *, unknown: int) -> int:
    """Samples of a batch, whatever collated it; `unknown` where that cannot be seen."""
    if isinstance(batch, dict | Mapping):  # dict first: it is nearly always one, and the quicker question
        batch = next(iter(batch.values()), None)
    elif isinstance(batch, list | tuple) and batch and isinstance(batch[0], torch.Tensor | np.ndarray | list):
        batch = batch[0]  # columns without names
    if isinstance(batch, torch.Tensor | np.ndarray):
        return batch.shape[0] if batch.ndim else unknown
    return len(batch) if isinstance(batch, list | tuple) else unknown
