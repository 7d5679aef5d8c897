"""`StreamingDataLoader`: a DataLoader that knows how much was consumed, and that moves whole batches.

A PyTorch DataLoader takes samples one by one and collates them in Python. Where nobody asked for anything
special, this one lets the dataset build whole batches instead: a column whose values have a fixed size is
one gather. What comes out is the same; values that PyTorch refuses to collate, such as images, stay a list.
With a `collate_fn`, a sampler, or a dataset that overrides how samples are got, it is the plain DataLoader.

Workers send several batches at a time, in packs that begin with one batch and grow to a few megabytes: to
hand a tensor to another process costs the same whatever its size.

The position counts what came out of the loader, never what workers have prepared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from datasync.errors import UsageError
from datasync.streaming.dataset import StreamingDataset
from datasync.streaming.iteration import reads_plainly

# What `default_collate` knows what to do with.
_COLLATES = (torch.Tensor, np.ndarray, np.generic, int, float, str, bytes, Mapping, Sequence)
_INNER = (
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
)


class StreamingDataLoader(DataLoader[Any]):
    """A DataLoader with `state_dict` and `load_state_dict`, for a `StreamingDataset`.

    Args:
        dataset: The dataset.
        batch_size (int | None): Samples of a rank's batch. Default: the dataset's.
        *args, **kwargs: As for `torch.utils.data.DataLoader`.

    Raises:
        UsageError: The batch size is not that of the dataset, so that the order would not hold.
    """

    def __init__(self, dataset: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(dataset, StreamingDataset):
            args, kwargs = _with_batch_size(dataset, args, kwargs)
        self._inner: DataLoader[Any] | None = None
        super().__init__(dataset, *args, **kwargs)
        self.num_samples_yielded = 0
        self.num_batches_yielded = 0
        self._serial = -1
        # Accelerate is not to divide among ranks what is divided already; it looks for this.
        self._is_accelerate_prepared = True

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch declares a private class
        """The rank's batches of the next epoch, from a loaded position on."""
        self.num_samples_yielded = self.num_batches_yielded = 0
        self._serial = -1
        for batch in self._batches():
            if self._serial < 0 and isinstance(self.dataset, StreamingDataset):
                self._serial = self.dataset.position_serial
            self.num_samples_yielded += batch_length(batch)
            self.num_batches_yielded += 1
            yield batch

    def state_dict(self) -> dict[str, Any] | None:
        """The dataset's state behind the batches that were given out; None for another kind of dataset."""
        dataset = self.dataset
        if not isinstance(dataset, StreamingDataset):
            return None
        return dataset.state_dict(self._consumed(dataset), False)

    def load_state_dict(self, obj: dict[str, Any], **options: Any) -> None:
        """Go on where `obj` says with the next iteration; see `StreamingDataset.load_state_dict`."""
        if isinstance(self.dataset, StreamingDataset):
            self.dataset.load_state_dict(obj, **options)

    def _consumed(self, dataset: StreamingDataset) -> int:
        """Samples that all ranks have consumed in this pass."""
        if self._serial != dataset.position_serial:
            return 0  # nothing came out since the position was set, or another pass has begun
        if self.batch_size is None or dataset.global_batch is None:
            return self.num_samples_yielded * dataset.ranks
        return self.num_batches_yielded * dataset.global_batch

    def _batches(self) -> Iterator[Any]:
        """The batches: whole ones, where that gives the same as this DataLoader, else its own."""
        dataset = self.dataset
        plain = (
            isinstance(dataset, StreamingDataset)
            and reads_plainly(dataset)
            and self.batch_size is not None
            and self.collate_fn is default_collate
        )
        if not plain:
            yield from super().__iter__()
            return
        assert isinstance(dataset, StreamingDataset)
        least = self.batch_size if self.drop_last and self.batch_size else 0
        if self.num_workers == 0 and not self.pin_memory:
            batches = map(_collated, dataset.samples(batches=True))
            yield from (batch for batch in batches if batch_length(batch) >= least)
            return
        if self._inner is None:
            options = {name: getattr(self, name) for name in _INNER if hasattr(self, name)}
            self._inner = DataLoader(_Packs(dataset), batch_size=None, collate_fn=_same, **options)
        for pack in self._inner:
            yield from (batch for batch in pack.batches() if batch_length(batch) >= least)


class _Packs(IterableDataset[Any]):
    """The dataset's batches in packs, for workers."""

    def __init__(self, dataset: StreamingDataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Pack]:
        # Not a generator: a worker has to join its epoch before anything is asked of it.
        return map(Pack.make, self.dataset.samples(packs=True))


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
                joined[name] = _collate(values)
            elif isinstance(values[0], str | bytes):
                joined[name] = values
            else:
                ends = np.cumsum(sizes).tolist()
                parted[name] = [
                    _collate(values[end - size : end]) for end, size in zip(ends, sizes, strict=True)
                ]
        return cls(joined, parted, sizes)

    def batches(self) -> Iterator[Any]:
        """The batches, one after another."""
        first = 0
        for i, size in enumerate(self.sizes):
            if "" in self.parted:
                yield self.parted[""][i]
                continue
            batch = {name: values[first : first + size] for name, values in self.joined.items()}
            yield {**batch, **{name: values[i] for name, values in self.parted.items()}}
            first += size

    def pin_memory(self) -> Pack:
        """The same in page-locked memory; called by the DataLoader."""
        self.joined = {name: _pin(values) for name, values in self.joined.items()}
        self.parted = {name: [_pin(value) for value in values] for name, values in self.parted.items()}
        return self


def _pin(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.pin_memory()
    return {name: _pin(item) for name, item in value.items()} if isinstance(value, dict) else value


def _collated(batch: Any) -> Any:
    """A batch of columns, or of samples, as tensors."""
    return collate_columns(batch) if isinstance(batch, dict) else default_collate(batch)


def collate_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Columns as `default_collate` would make them of samples, without taking them apart."""
    return {name: _collate(values) for name, values in columns.items()}


def _collate(values: Any) -> Any:
    if isinstance(values, np.ndarray) and values.dtype.kind in "biufc":
        return torch.from_numpy(values)
    values = list(values)
    return default_collate(values) if isinstance(values[0], _COLLATES) else values


def batch_length(batch: Any) -> int:
    """Samples of a batch, whatever collated it."""
    if isinstance(batch, Mapping):
        for value in batch.values():
            return value.shape[0] if isinstance(value, torch.Tensor) else len(value)
        raise ValueError("a batch has no column, so its samples cannot be counted")
    return len(batch) if isinstance(batch, torch.Tensor) else len(batch[0])


def _same(batch: Any) -> Any:
    return batch


def _with_batch_size(
    dataset: StreamingDataset, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with the batch size that dataset and loader agree on."""
    given = args[0] if args else kwargs.get("batch_size", ...)
    if given is None or kwargs.get("batch_sampler") is not None:
        return args, kwargs
    if dataset.global_batch is None and given is not ...:
        dataset.batch_size = given
    if dataset.global_batch is None:
        return args, kwargs
    own = dataset.rank_batch_size
    if given not in (..., own):
        raise UsageError(
            f"the DataLoader's batch_size is {given}, the dataset's is {own}",
            mend="give the same to both: the order of batches depends on it",
        )
    return args[1:], {**kwargs, "batch_size": own}
