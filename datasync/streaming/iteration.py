"""One pass over a dataset by one worker: from its plan to samples or batches, with shards fetched ahead.

Before each chunk the sources are told which shards come next, in order of use. Workers of a rank use the same
shards; each begins its plan at another place behind those it needs at once, so that they share the fetching.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from datasync.streaming.buffers import Buffers
from datasync.streaming.gather import Gather
from datasync.streaming.orphan import end_with_parent
from datasync.streaming.plan import Chunk, Plan
from datasync.streaming.position import Generation
from datasync.streaming.reading import batches_of, read_columns, read_rows

if TYPE_CHECKING:
    from datasync.streaming.dataset import StreamingDataset

CHUNK_BYTES = 16 << 20
MAX_BATCHES = 128


class Samples:
    """An iterator over a worker's samples, or batches, of an epoch.

    Args:
        dataset (StreamingDataset): The dataset.
        epoch (int): The epoch.
        offset (int): The sample at which it is entered.
        batches (bool): Give batches instead of samples. Default: ``False``.
        packs (bool): Give (columns, sizes of the batches in them); the rank's batches are then dealt to its
            workers in packs. Default: ``False``.
        files (Collection[str]): Columns of media files that batches hold undecoded (`Shard.batch`). Default:
            none.
        skip (int): Samples (or batches) of this worker to leave out at the beginning. Default: ``0``.
        read (list[int] | None): Where to count what was given, one number. Default: nowhere.
    """

    def __init__(
        self,
        dataset: StreamingDataset,
        epoch: int,
        offset: int,
        *,
        batches: bool = False,
        packs: bool = False,
        files: Collection[str] = (),
        skip: int = 0,
        read: list[int] | None = None,
    ) -> None:
        self.epoch = epoch
        self.offset = offset
        self.given = skip
        self._read = read if read is not None else [0]
        self._dataset = dataset
        self._whole = batches
        self._files = files
        self._buffers = Buffers()
        catalog = dataset.catalog
        self._gather = Gather(catalog.sources, catalog.first_shard, catalog.samples_per_shard)
        self._plan = dataset.plan(epoch, offset)
        if offset and self._plan.over:
            # Entered behind its last batch: the next one is begun instead.
            dataset.pass_over(epoch)
            self.epoch, self.offset = epoch + 1, 0
            self._plan = dataset.plan(self.epoch, self.offset)
        self._items = self._packs() if packs else self._batches(skip) if batches else self._samples(skip)

    def close(self) -> None:
        """Give nothing more, and let go of the shards that are held for what would have come next."""
        self._items.close()

    def __iter__(self) -> Samples:
        return self

    def __next__(self) -> Any:
        item = next(self._items)
        self.given += 1
        self._read[0] = self.given
        return item

    def state_dict(self) -> dict[str, Any]:
        """Where this worker stands, for loaders that keep a state for each worker (torchdata)."""
        dataset = self._dataset
        return {
            "epoch": self.epoch,
            "offset": self.offset,
            "given": self.given,
            "dataset": dataset.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a worker of the same number, of as many, stood.

        Raises:
            UsageError: The state is from another dataset or order.
        """
        self._dataset.enter(state["dataset"], epoch=state["epoch"], offset=state["offset"])
        self.__init__(  # type: ignore[misc]  # the same iterator, at another place
            self._dataset,
            state["epoch"],
            state["offset"],
            batches=self._whole,
            skip=state["given"],
            read=self._read,
        )

    def _samples(self, skip: int) -> Generator[Any, None, None]:
        dataset, size = self._dataset, max(1, self._dataset.rank_batch_size)
        first, skip = divmod(skip, size)
        by_number = not reads_plainly(dataset)
        for chunk in self._chunks(first, 1 if by_number else _most(dataset)):
            numbers = dataset.catalog.number(chunk.stream, chunk.shard, chunk.row)
            if by_number:
                rows: Iterator[Any] = (dataset[number] for number in numbers.tolist())
            else:
                rows = read_rows(dataset.catalog.sources, chunk)
            marks = self._marks(chunk)
            for i, sample in enumerate(rows):
                if skip:
                    skip -= 1
                    continue
                if marks:
                    sample = {**sample, **{name: values[i] for name, values in marks.items()}}
                yield sample

    def _batches(self, skip: int) -> Generator[Any, None, None]:
        gather = self._gather
        try:
            for chunk in self._chunks(skip, _most(self._dataset)):
                places = gather.places(chunk)
                if places is None:
                    columns = self._columns(chunk)
                    self._count_copies()
                    yield from columns if isinstance(columns, list) else batches_of(columns, chunk.sizes)
                    continue
                marks = self._marks(chunk)
                fetching = any(source.fetching for source in self._dataset.catalog.sources)
                first = 0
                for size in chunk.sizes:
                    if fetching:
                        # Let the fetching threads have the GIL. A loop that only takes batches would keep it
                        # for 5 ms each time, and between any two pieces of a download they would wait for it.
                        time.sleep(0)
                    stop = first + size
                    batch = gather.take(places[first:stop])
                    if marks:
                        batch |= {name: values[first:stop] for name, values in marks.items()}
                    yield batch
                    first = stop
                self._count_copies()
        finally:
            gather.release()

    def _packs(self) -> Generator[tuple[Any, list[int]], None, None]:
        gather = self._gather
        for chunk in self._planned(self._plan.packs(most=_most(self._dataset))):
            places = gather.places(chunk)
            if places is None:
                columns = self._columns(chunk)
            else:
                columns = gather.take_into(places, self._buffers.take) | self._marks(chunk)
                gather.release()
            if isinstance(columns, dict):
                gather.bytes_copied += _bytes_of_arrays(columns)  # to the rank's process
            self._count_copies()
            yield columns, chunk.sizes

    def _columns(self, chunk: Chunk) -> Any:
        """The columns of a chunk; or, where streams have different ones, its batches as lists of samples."""
        dataset = self._dataset
        columns = read_columns(dataset.catalog.sources, chunk, self._files, buffers=self._buffers)
        if columns is not None:
            self._gather.bytes_copied += 2 * _bytes_of_arrays(columns)  # out of a shard, and to their places
            return columns | self._marks(chunk)
        rows = read_rows(dataset.catalog.sources, chunk)
        return [[next(rows) for _ in range(size)] for size in chunk.sizes]

    def _count_copies(self) -> None:
        self._dataset.stats.add(bytes_copied=self._gather.bytes_copied)
        self._gather.bytes_copied = 0

    def _marks(self, chunk: Chunk) -> dict[str, Any]:
        """The columns that are not stored: numbers of the samples, and which of them are no repeats."""
        marks: dict[str, Any] = {}
        if self._dataset.sample_ids:
            marks["sample_id"] = self._dataset.catalog.number(chunk.stream, chunk.shard, chunk.row)
        if self._dataset.tail == "mask":
            marks["mask"] = np.ones(len(chunk.row), np.bool_) if chunk.real is None else chunk.real
        return marks

    def _chunks(self, first: int, most: int) -> Iterator[Chunk]:
        return self._planned(self._plan.chunks(first=first, most=most))

    def _planned(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """The same, with shards fetched ahead of each; looked up anew when half of what is ahead is used."""
        ahead, planned = self._dataset.lookahead(), -1
        for chunk in chunks:
            if (chunk.first + len(chunk.sizes)) * chunk.sizes[0] > planned:
                self._fetch_ahead(self._plan, chunk, ahead)
                planned = chunk.first * chunk.sizes[0] + ahead // 2
            yield chunk

    def _fetch_ahead(self, plan: Plan, chunk: Chunk, samples: int) -> None:
        world = self._dataset.world.with_workers()
        needed = dict.fromkeys(zip(chunk.stream.tolist(), chunk.shard.tolist(), strict=True))
        ahead = plan.ahead(chunk.first, samples + len(chunk.row) * world.workers)
        later = [entry for entry in ahead if entry not in needed]
        turn = len(later) * world.worker // world.workers
        ordered = [*needed, *later[turn:], *later[:turn]]
        for i, source in enumerate(self._dataset.catalog.sources):
            source.prefetch([shard for stream, shard in ordered if stream == i])


def generation_of(dataset: StreamingDataset, *, count: bool = True) -> Generation | None:
    """Which pass of which DataLoader this worker iterates for, counted as a new one; None in no worker."""
    import torch.utils.data

    info = torch.utils.data.get_worker_info()
    if info is None:
        return None
    end_with_parent()
    dataset._passes += count
    return Generation(info.seed - info.id, dataset._passes, info.id)


def reads_plainly(dataset: StreamingDataset) -> bool:
    """Whether samples are as they are stored: no subclass has its own way to get or change them."""
    from datasync.streaming.dataset import StreamingDataset

    kind = type(dataset)
    return all(
        getattr(kind, name) is getattr(StreamingDataset, name)
        for name in ("__getitem__", "get_item", "__iter__")
    )


def iterates_itself(dataset: StreamingDataset) -> bool:
    """Whether a subclass has its own `__iter__`, which may give fewer samples than it reads."""
    from datasync.streaming.dataset import StreamingDataset

    return type(dataset).__iter__ is not StreamingDataset.__iter__


def _bytes_of_arrays(columns: Mapping[str, Any]) -> int:
    return sum(values.nbytes for values in columns.values() if isinstance(values, np.ndarray))


def _most(dataset: StreamingDataset) -> int:
    """Batches of a chunk: as many as keep it in a few megabytes; one where decoding is the work."""
    batch_bytes = dataset.catalog.sample_bytes() * dataset.rank_batch_size
    return 1 if batch_bytes == 0 else max(1, min(MAX_BATCHES, CHUNK_BYTES // batch_bytes))
