"""`StreamingDataLoader`: a DataLoader that knows how much was consumed, and that moves whole batches.

A PyTorch DataLoader takes samples one by one and collates them in Python. Where nobody asked for anything
special, this one lets the dataset build whole batches instead: a column whose values have a fixed size is
one gather. What comes out is the same; values that PyTorch refuses to collate, such as images, stay a list.
With a `Decoder` as `collate_fn` batches are taken as they lie in the shards and decoded at once; without
workers, the next ones while the loop works on one. With any other `collate_fn`, a sampler, or a dataset that
overrides how samples are got, it is the plain DataLoader.

Workers send several batches at a time, in packs that begin with one batch and grow to a few megabytes: to
hand a tensor to another process costs the same whatever its size.

The position counts what came out of the loader, never what workers have prepared. `filter` leaves samples out
of their batches, so batches get smaller and the position stays exact. Where the dataset has an `__iter__` of
its own, which may leave samples out or make one of several, it counts what that has read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate

from datasync.errors import UsageError
from datasync.streaming.collate import batch_length, collate_columns, collate_samples
from datasync.streaming.dataset import StreamingDataset
from datasync.streaming.decode import Decoder, pin
from datasync.streaming.iteration import iterates_itself, reads_plainly
from datasync.streaming.orphan import hold_socket_folder, make_socket_folder
from datasync.streaming.pack import Pack
from datasync.streaming.reading import rows_of

_SOCKET_BYTES = 108  # of a socket's name with its end: `sun_path` of Linux
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
        filter (Callable | None): Whether to keep a sample; asked before anything is decoded. A batch has
            those of its samples that were kept, and is an empty list where none was. Default: all of them.
        *args, **kwargs: As for `torch.utils.data.DataLoader`.

    Raises:
        UsageError: The batch size is not that of the dataset, so that the order would not hold.
    """

    def __init__(
        self, dataset: Any, *args: Any, filter: Callable[[Any], bool] | None = None, **kwargs: Any
    ) -> None:
        if isinstance(dataset, StreamingDataset):
            args, kwargs = _with_batch_size(dataset, args, kwargs)
        self._inner: DataLoader[Any] | None = None
        super().__init__(dataset, *args, **kwargs)
        own = isinstance(dataset, StreamingDataset) and not reads_plainly(dataset)
        if (own or filter is not None) and self.collate_fn is default_collate:
            self.collate_fn = collate_samples
        self.filter = filter
        if filter is not None:
            if self.batch_size is None:
                raise UsageError(
                    "`filter` leaves samples out of batches, and there are none", mend="set batch_size"
                )
            if not (isinstance(self.collate_fn, Decoder) and not own):
                self.collate_fn = _Kept(filter, self.collate_fn)
        self._yielded = [0, 0]  # samples and batches, by the newest iterator
        self._serial = -1
        self._ended = False  # the newest iterator, by itself
        self._read: dict[int, int] = {}  # samples read by each worker of a dataset with its own `__iter__`
        # What Accelerate looks for: it is not to divide among ranks what is divided already, and to keep the
        # loader's state with its own.
        self._is_accelerate_prepared = self.use_stateful_dataloader = True

    def __repr__(self) -> str:
        size = "samples" if self.batch_size is None else f"batches of {self.batch_size:,}"
        given = f"{self.num_batches_yielded:,} given in this pass"
        return f"<{type(self).__name__} {size} by {self.num_workers} workers, {given}, of {self.dataset!r}>"

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch declares a private class
        """The rank's batches of the next epoch, from a loaded position on."""
        if isinstance(self.dataset, StreamingDataset):
            self.dataset.meet_world()
            self._say_drop_last(self.dataset)
        self._serial = -1
        self._ended = False
        self._read = {}
        # An iterator that was left for another one counts for itself alone.
        yielded = self._yielded = [0, 0]
        unknown = self.batch_size or 1
        for batch in self._batches():
            if not yielded[1] and self._yielded is yielded and isinstance(self.dataset, StreamingDataset):
                self._serial = self.dataset.position_serial
            yielded[0] += batch_length(batch, unknown=unknown)
            yielded[1] += 1
            yield batch
        if self._yielded is yielded and isinstance(self.dataset, StreamingDataset):
            self._ended = True
            if not yielded[1]:
                self._serial = self.dataset.position_serial

    @property
    def num_samples_yielded(self) -> int:
        """Samples that this rank was given in the pass in progress."""
        return self._yielded[0]

    @property
    def num_batches_yielded(self) -> int:
        """Batches that this rank was given in the pass in progress."""
        return self._yielded[1]

    def state_dict(self) -> dict[str, Any] | None:
        """The dataset's state behind the batches that were given out; None for another kind of dataset."""
        dataset = self.dataset
        if not isinstance(dataset, StreamingDataset):
            return None
        self._say_drop_last(dataset)
        if self._ended and self._serial == dataset.position_serial:
            return dataset.state_behind_epoch()
        return dataset.state_dict(self._consumed(dataset), False)

    def load_state_dict(self, obj: dict[str, Any], **options: Any) -> None:
        """Go on where `obj` says with the next iteration; see `StreamingDataset.load_state_dict`."""
        if isinstance(self.dataset, StreamingDataset):
            self._say_drop_last(self.dataset)
            self.dataset.load_state_dict(obj, **options)

    def set_epoch(self, epoch: int) -> None:
        """See `StreamingDataset.set_epoch`."""
        if isinstance(self.dataset, StreamingDataset):
            self.dataset.set_epoch(epoch)

    def _say_drop_last(self, dataset: StreamingDataset) -> None:
        """Let the dataset know where its epochs end here.

        Raises:
            UsageError: Some ranks would leave out a short last batch, and others have a full one.
        """
        dataset.drop_last = self.drop_last
        if not self.drop_last or dataset.ranks == 1 or dataset.tail == "drop":
            return
        if dataset.tail == "uneven" or (dataset.global_batch or 0) % dataset.ranks:
            raise UsageError(
                "drop_last leaves out a rank's last batch if it is short, and the parts of the ranks differ "
                "in size, so some ranks would have a batch more than others",
                mend="say tail='drop' to the dataset instead, which leaves it out on all of them",
            )

    def _consumed(self, dataset: StreamingDataset) -> int:
        """Samples that all ranks have consumed in this pass."""
        if self._serial != dataset.position_serial:
            return 0  # nothing came out since the position was set, or another pass has begun
        if self.batch_size is None or dataset.global_batch is None:
            return self.num_samples_yielded * dataset.ranks
        if self._read:
            if dataset.ranks > 1:
                dataset.stats.log_once(
                    "own __iter__",
                    "ranks whose dataset has an __iter__ of its own read at paces of their own, and the "
                    "state is that of this one: others may repeat or miss batches when it is loaded. "
                    "StreamingDataLoader(filter=…) is exact",
                )
            return self._batches_read(dataset.rank_batch_size) * dataset.global_batch
        return self.num_batches_yielded * dataset.global_batch

    def _batches_read(self, size: int) -> int:
        """The dataset's batches, dealt to its workers in turn, that they have read without a gap."""
        workers = max(1, self.num_workers)
        return min(self._read.get(worker, 0) // size * workers + worker for worker in range(workers))

    def _batches(self) -> Iterator[Any]:
        """The batches: whole ones, where that gives the same as this DataLoader, else its own."""
        dataset = self.dataset
        decoder = self.collate_fn if isinstance(self.collate_fn, Decoder) else None
        plain = (
            isinstance(dataset, StreamingDataset)
            and reads_plainly(dataset)
            and self.batch_size is not None
            and (decoder is not None or self.collate_fn is default_collate)
        )
        if isinstance(dataset, StreamingDataset) and iterates_itself(dataset) and self.batch_size is not None:
            counted = self._inner_loader(
                _Itself(dataset),
                batch_size=self.batch_size,
                drop_last=self.drop_last,
                collate_fn=_Counted(dataset, self.collate_fn),
            )
            for worker, read, batch in _given(iter(counted)):
                self._read[worker] = read
                yield batch
            return
        if not plain:
            yield from _given(super().__iter__())
            return
        assert isinstance(dataset, StreamingDataset)
        least = self.batch_size if self.drop_last and self.batch_size else 0
        if self.num_workers == 0 and decoder is not None:
            batches = decoder.batches(_rows(dataset, decoder, least, self.filter))
            yield from map(pin, batches) if self.pin_memory else batches
        elif self.num_workers == 0 and not self.pin_memory:
            with contextlib.closing(dataset.samples(batches=True)) as samples:
                yield from map(_collated, _long_enough(samples, least))
        elif decoder is not None:
            yield from _given(iter(self._inner_loader(_Decoded(dataset, decoder, least, self.filter))))
        else:
            for pack in _given(iter(self._inner_loader(_Packs(dataset)))):
                yield from pack.batches(least)

    def _inner_loader(self, batches: IterableDataset[Any], **shape: Any) -> DataLoader[Any]:
        """The DataLoader that runs the workers; kept, since they may be persistent."""
        if self._inner is None:
            if self.num_workers:
                _check_socket_folder()
            options = {name: getattr(self, name) for name in _INNER if hasattr(self, name)}
            shape = shape or {"batch_size": None, "collate_fn": _same}
            self._inner = DataLoader(batches, **shape, **options)
        return self._inner


def _check_socket_folder() -> None:
    """Make the folder of the workers' sockets.

    Raises:
        UsageError: A socket's name would be too long there; PyTorch would wait for ever.
    """
    folder = make_socket_folder()
    longest = len(os.fsencode(os.path.join(folder, "listener-12345678")))
    if longest >= _SOCKET_BYTES:
        raise UsageError(
            f"{folder} is too long a path for the sockets of DataLoader workers: {longest} bytes,"
            f" of which a socket's name may have {_SOCKET_BYTES - 1}",
            mend="set TMPDIR to a shorter path, for example /tmp",
        )
    hold_socket_folder(folder)


def _given(batches: Iterator[Any]) -> Iterator[Any]:
    """What a DataLoader's iterator gives. When the loop ends, by an error or a break, so do its workers.

    Left to the garbage collector, they would hold it up for seconds at some later time.
    """
    end_workers = getattr(batches, "_shutdown_workers", None)
    try:
        yield from batches
    finally:
        if end_workers is not None and not batches._persistent_workers:  # type: ignore[attr-defined]
            end_workers()


def _long_enough(batches: Iterable[Any], least: int) -> Iterable[Any]:
    """The batches (of columns, or lists of samples) that have at least so many samples."""
    if not least:
        return batches
    return (batch for batch in batches if batch_length(batch, unknown=least) >= least)


def _rows(
    dataset: StreamingDataset, decoder: Decoder, least: int, keep: Callable[[Any], bool] | None
) -> Iterator[list[dict[str, Any]]]:
    """A worker's batches as samples whose media files are views of the shards."""
    batches = _long_enough(dataset.samples(batches=True, files=decoder.columns), least)
    rows = (rows_of(batch) if isinstance(batch, dict) else batch for batch in batches)
    return rows if keep is None else ([sample for sample in batch if keep(sample)] for batch in rows)


class _Decoded(IterableDataset[Any]):
    """The dataset's batches, decoded, for workers."""

    def __init__(
        self,
        dataset: StreamingDataset,
        decoder: Decoder,
        least: int,
        keep: Callable[[Any], bool] | None,
    ) -> None:
        self.dataset, self.decoder, self.least, self.keep = dataset, decoder, least, keep

    def __iter__(self) -> Iterator[Any]:
        # Not a generator: a worker has to join its epoch before anything is asked of it.
        return map(self.decoder, _rows(self.dataset, self.decoder, self.least, self.keep))


class _Kept:
    """Collates the samples of a batch that are kept."""

    def __init__(self, keep: Callable[[Any], bool], collate: Callable[[Any], Any]) -> None:
        self.keep, self.collate = keep, collate

    def __call__(self, samples: Any) -> Any:
        kept = [sample for sample in samples if self.keep(sample)]
        return self.collate(kept) if kept else []


class _Itself(IterableDataset[Any]):
    """The dataset as its own `__iter__` gives it."""

    def __init__(self, dataset: StreamingDataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)


class _Counted:
    """Collates, and says how many samples which worker has read for it."""

    def __init__(self, dataset: StreamingDataset, collate: Callable[[Any], Any]) -> None:
        self.dataset, self.collate = dataset, collate

    def __call__(self, samples: Any) -> tuple[int, int, Any]:
        return self.dataset.world.with_workers().worker, self.dataset.samples_read, self.collate(samples)


class _Packs(IterableDataset[Any]):
    """The dataset's batches in packs, for workers."""

    def __init__(self, dataset: StreamingDataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Pack]:
        # Not a generator: see above.
        return map(Pack.make, self.dataset.samples(packs=True))


def _collated(batch: Any) -> Any:
    """A batch of columns, or of samples, as tensors."""
    return collate_columns(batch) if isinstance(batch, dict) else default_collate(batch)


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
