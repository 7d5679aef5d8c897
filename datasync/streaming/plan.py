"""What one DataLoader worker reads in one epoch: its batches, located, a chunk of them at a time.

Batch `j` of a run (counted from the sample where the run entered the epoch) is built by worker `j mod K`; a
DataLoader takes batches from its workers in turn, so the rank gets them in order. The short last batch, if
there is one, is simply the last. A chunk is some of these batches, located in one vectorised call; chunks
grow from one batch to `most`, so that the first batch comes soon.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from datasync.streaming.epoch import EpochOrder, Mask
from datasync.streaming.permute import Ints
from datasync.streaming.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some batches of a worker, one after another.

    Args:
        stream (Ints): Of each sample, (n,).
        shard (Ints): In the stream, (n,).
        row (Ints): In the shard, (n,).
        sizes (list[int]): Samples of each batch; they sum to n.
        real (Mask | None): False where a sample repeats another to fill the batch; None if there are none.
        first (int): Number of the first of these batches in this run.
    """

    stream: Ints
    shard: Ints
    row: Ints
    sizes: list[int]
    real: Mask | None
    first: int


class Plan(Protocol):
    """The batches of a worker."""

    @property
    def over(self) -> bool:
        """Whether no worker of the rank has a batch."""

    @property
    def steps(self) -> int:
        """How many batches the worker builds."""

    def chunks(self, *, first: int, most: int) -> Iterator[Chunk]:
        """Its batches from number `first` on, at most `most` in a chunk."""

    def packs(self, *, most: int) -> Iterator[Chunk]:
        """All batches of the rank, dealt to its workers in packs that grow from one batch to `most`."""

    def ahead(self, first: int, samples: int) -> list[tuple[int, int]]:
        """(stream, shard) needed from batch `first` of the run on for this many samples of the rank."""


class LanePlan:
    """Batches in our own order.

    Args:
        order (EpochOrder): The epoch.
        start (int): The sample where this run entered it.
        world (World): The place among ranks (groups of replicated ranks count as one) and workers.
        following (EpochOrder): The next epoch, whose first shards are fetched before this one ends.
        over (bool): Whether nothing is left of the epoch.
    """

    def __init__(
        self, order: EpochOrder, start: int, world: World, following: EpochOrder, *, over: bool
    ) -> None:
        self.over = over
        self._order, self._start, self._world, self._following = order, start, world, following
        self._full = order.full_steps(start)
        self._all = order.steps(start)
        self.steps = max(0, -(-(self._all - world.worker) // world.workers))

    def chunks(self, *, first: int, most: int) -> Iterator[Chunk]:
        """See `Plan`."""
        step, count = first, 1
        while step < self.steps:
            steps = np.arange(step, min(step + count, self.steps), dtype=np.int64)
            yield from self._chunks(steps * self._world.workers + self._world.worker)
            step, count = step + count, min(2 * count, most)

    def packs(self, *, most: int) -> Iterator[Chunk]:
        """See `Plan`. In each round every worker has a pack, one behind the other."""
        round_begin, count = 0, 1
        while True:
            begin = round_begin + self._world.worker * count
            if begin >= self._all:
                return
            chunks = list(self._chunks(np.arange(begin, min(begin + count, self._all), dtype=np.int64)))
            yield chunks[0] if len(chunks) == 1 else joined(chunks)
            round_begin, count = round_begin + count * self._world.workers, min(2 * count, most)

    def ahead(self, first: int, samples: int) -> list[tuple[int, int]]:
        """See `Plan`."""
        world, batch = self._world, self._order.settings.global_batch
        begin = self._start + min(first, self._full) * batch
        stop = begin + max(batch, samples * world.ranks)
        needed = self._order.ahead(begin, stop, rank=world.rank, ranks=world.ranks)
        beyond = stop - self._order.samples
        if beyond > 0:
            known = set(needed)
            more = self._following.ahead(0, beyond, rank=world.rank, ranks=world.ranks)
            needed += [entry for entry in more if entry not in known]
        return needed

    def _chunks(self, batches: Ints) -> Iterator[Chunk]:
        """A chunk of the full ones of these batches, and one of the short last batch if it is among them."""
        full = batches[batches < self._full]
        world = self._world
        if len(full):
            starts = self._start + full * self._order.settings.global_batch
            numbers = self._order.pieces(starts, rank=world.rank, ranks=world.ranks)
            yield self._located(numbers.ravel(), [numbers.shape[1]] * len(full), None, int(full[0]))
        if len(full) < len(batches):
            numbers, real = self._order.tail(self._start, rank=world.rank, ranks=world.ranks)
            yield self._located(numbers, [len(numbers)], real, self._full)

    def _located(self, numbers: Ints, sizes: list[int], real: Mask | None, first: int) -> Chunk:
        stream, shard, row = self._order.locate(numbers)
        return Chunk(stream=stream, shard=shard, row=row, sizes=sizes, real=real, first=first)


class ListPlan:
    """Batches from a list of the dataset's samples, made elsewhere.

    Args:
        samples (Ints): Numbers of the worker's samples in the dataset, in order.
        bounds (Ints): The first sample of each shard of the dataset, and their total.
        first_shard (Ints): The first of these shards of each stream.
        batch (int): Samples of a batch.
        over (bool): Whether no worker of the rank has a batch.
    """

    def __init__(self, samples: Ints, *, bounds: Ints, first_shard: Ints, batch: int, over: bool) -> None:
        self.over = over
        self._samples, self._bounds, self._first, self._batch = samples, bounds, first_shard, batch
        self.steps = -(-len(samples) // batch)

    def chunks(self, *, first: int, most: int) -> Iterator[Chunk]:
        """See `Plan`."""
        step, count = first, 1
        while step < self.steps:
            samples = self._samples[step * self._batch : (step + count) * self._batch]
            stream, shard, row = split_ids(samples, bounds=self._bounds, first_shard=self._first)
            full, rest = divmod(len(samples), self._batch)
            sizes = [self._batch] * full + ([rest] if rest else [])
            yield Chunk(stream=stream, shard=shard, row=row, sizes=sizes, real=None, first=step)
            step, count = step + count, min(2 * count, most)

    def packs(self, *, most: int) -> Iterator[Chunk]:
        """See `Plan`. Which worker has which batch is fixed by the list: a batch is a pack."""
        return self.chunks(first=0, most=1)

    def ahead(self, first: int, samples: int) -> list[tuple[int, int]]:
        """See `Plan`; batches are those of the worker."""
        begin = first * self._batch
        window = self._samples[begin : begin + max(samples, self._batch)]
        stream, shard, _ = split_ids(window, bounds=self._bounds, first_shard=self._first)
        return list(dict.fromkeys(zip(stream.tolist(), shard.tolist(), strict=True)))


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """Chunks that follow each other as one."""
    marks = [np.ones(len(c.row), np.bool_) if c.real is None else c.real for c in chunks]
    return Chunk(
        stream=np.concatenate([c.stream for c in chunks]),
        shard=np.concatenate([c.shard for c in chunks]),
        row=np.concatenate([c.row for c in chunks]),
        sizes=[size for c in chunks for size in c.sizes],
        real=np.concatenate(marks),
        first=chunks[0].first,
    )


def split_ids(samples: Ints, *, bounds: Ints, first_shard: Ints) -> tuple[Ints, Ints, Ints]:
    """Stream, shard in the stream and row in the shard of samples numbered over the whole dataset."""
    shard = np.searchsorted(bounds, samples, side="right") - 1
    stream = np.searchsorted(first_shard, shard, side="right") - 1
    return stream, shard - first_shard[stream], samples - bounds[shard]
