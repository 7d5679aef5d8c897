"""A dataset in a local folder, as a map-style PyTorch dataset."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from datasync.streaming.array import Array
from datasync.streaming.fetch import ShardSource


class LocalDataset(Array, Dataset[dict[str, Any]]):
    """Random access to a dataset that is in `local`; nothing is downloaded.

    Args:
        local (str): The folder of the dataset.
        split (str | None): The folder of the split below it. Default: ``None``.
        allow_unsafe_types (bool): Read columns whose decoding may run code. Default: ``False``.
    """

    def __init__(
        self, local: str | os.PathLike[str], split: str | None = None, *, allow_unsafe_types: bool = False
    ) -> None:
        self.local = os.path.expanduser(local)
        self.split = split or ""
        self._source = ShardSource(
            replicas=[], local=Path(self.local), split=split or None, allow_unsafe_types=allow_unsafe_types
        )
        sizes = self._source.index.sizes
        self._bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        self.num_samples = int(self._bounds[-1])

    def __repr__(self) -> str:
        folder = os.path.join(self.local, self.split) if self.split else self.local
        return f"<LocalDataset {folder}: {self.num_samples:,} samples in {len(self._bounds) - 1:,} shards>"

    def __len__(self) -> int:
        return self.num_samples

    @property
    def size(self) -> int:
        """Samples of the dataset."""
        return self.num_samples

    def get_item(self, sample_id: int) -> dict[str, Any]:
        """The sample of this number: column -> value."""
        shard = int(np.searchsorted(self._bounds, sample_id, side="right")) - 1
        return self._source.open(shard)[sample_id - int(self._bounds[shard])]
