"""An epoch as its ranks see it: global batches, cut into one piece a rank.

    numbers        0 … N-1, the global sequence global batch   B numbers from where the epoch (or the
    resumed run) begins, sorted by the place of their lane piece          one of R contiguous parts of a
    sorted batch, sizes at most one apart; equal where R divides B

The batches are the same for every R, and a rank meets the same places, so the same shards, in every batch.
With several streams the cut may move by a sample a stream, to a neighbouring place.

The tail, N mod B, is what an explicit choice makes of it (`TAILS`); every rank always has equally many steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

import numpy as np

from datasync.errors import UsageError
from datasync.streaming.batching import Batching, make_batching
from datasync.streaming.order import OrderSettings, StreamOrder
from datasync.streaming.permute import Ints

Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]

TAILS = {
    "pad": "a short last batch, in which ranks repeat samples so that all have equally many",
    "drop": "no short last batch",
    "uneven": "a short last batch, every sample once: ranks' sizes differ by one; refused if one had none",
    "mask": "as pad, with a column `mask` that is False for repeats: for exact evaluation",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochSettings:
    """What fixes the order of an epoch besides its number.

    Args:
        sizes (Sequence[Ints]): Samples of each shard of each stream.
        phases (Sequence[Sequence[int]]): Samples of each stream in each phase of the curriculum.
        order (OrderSettings): Of every stream.
        method (str): The batching method.
        global_batch (int): B.
        device_batch (int): Samples of a rank's batch; matters to ``device_per_stream`` alone.
        tail (str): One of `TAILS`.
    """

    sizes: Sequence[Ints]
    phases: Sequence[Sequence[int]]
    order: OrderSettings
    method: str = "random"
    global_batch: int
    device_batch: int
    tail: str = "pad"


class EpochOrder:
    """Every sample of one epoch.

    Args:
        settings (EpochSettings): What fixes it.
        epoch (int): Its number.
    """

    def __init__(self, settings: EpochSettings, epoch: int) -> None:
        self.settings = settings
        self.epoch = epoch
        self.batching: Batching = make_batching(
            settings.method,
            settings.phases,
            global_batch=settings.global_batch,
            device_batch=settings.device_batch,
        )
        self.samples = self.batching.samples
        self.streams = [
            StreamOrder(sizes, used, stream=i, epoch=epoch, settings=settings.order) if used else None
            for i, (sizes, used) in enumerate(zip(settings.sizes, self.batching.used, strict=True))
        ]

    def locate(self, number: Ints) -> tuple[Ints, Ints, Ints]:
        """Stream, shard in the stream and row in the shard of each number."""
        stream, item = self.batching.locate(number)
        if len(self.streams) == 1:
            assert self.streams[0] is not None
            return stream, *self.streams[0].locate(item)
        shard, row = np.empty_like(item), np.empty_like(item)
        for i, order in enumerate(self.streams):
            here = np.flatnonzero(stream == i)
            if order is not None and here.size:
                shard[here], row[here] = order.locate(item[here])
        return stream, shard, row

    def steps(self, start: int) -> int:
        """Batches from number `start` to the end of the epoch, the tail included where there is one."""
        full, rest = divmod(max(self.samples - start, 0), self.settings.global_batch)
        return full + (1 if rest and self.settings.tail != "drop" else 0)

    def full_steps(self, start: int) -> int:
        """Batches from number `start` on that have all B numbers."""
        return max(self.samples - start, 0) // self.settings.global_batch

    def pieces(self, starts: Ints, *, rank: int, ranks: int) -> Ints:
        """The numbers of a rank in full batches.

        Args:
            starts (Ints): The first number of each batch, (T,).
            rank (int): Which piece.
            ranks (int): Of how many.

        Returns:
            Ints: (T, size of the piece), in the order of the rank's batch.
        """
        batch, lanes = self.settings.global_batch, self.settings.order.lanes
        low, high = piece_bounds(batch, rank, ranks)
        if self.settings.method == "device_per_stream":
            return np.asarray(starts[:, None] + np.arange(low, high), dtype=np.int64)
        if len(self.streams) == 1 and batch % lanes == 0:
            return self._aligned(starts, np.arange(low, high))
        return self._sorted(starts, batch)[:, low:high]

    def tail(self, start: int, *, rank: int, ranks: int) -> tuple[Ints, Mask]:
        """A rank's numbers in the short last batch of a run that began at `start`, and which are no repeats.

        Both are empty where there is no short batch or it is dropped.
        """
        first = start + self.full_steps(start) * self.settings.global_batch
        rest = self.samples - first
        if rest <= 0 or self.settings.tail == "drop":
            return np.empty(0, np.int64), np.empty(0, np.bool_)
        if self.settings.method == "device_per_stream":
            numbers, size = first + np.arange(rest), self.settings.device_batch
            low, high = min(rank * size, rest), min((rank + 1) * size, rest)
        else:
            numbers, size = self._sorted(np.array([first]), rest)[0], -(-rest // ranks)
            low, high = piece_bounds(rest, rank, ranks)
        mine = numbers[low:high]
        if self.settings.tail == "uneven":
            size = len(mine)
        source = mine if len(mine) else numbers[np.arange(size) % rest]
        padded = source[np.arange(size) % len(source)]
        return padded, np.arange(size) < len(mine)

    def check_tail(self, start: int, *, ranks: int) -> None:
        """Refuse a short last batch in which a rank would have no sample, where it may not repeat one.

        Raises:
            UsageError: There is such a batch in a run that begins at `start`.
        """
        rest = max(self.samples - start, 0) % self.settings.global_batch
        least = ranks
        if self.settings.method == "device_per_stream":
            least = (ranks - 1) * self.settings.device_batch + 1
        if self.settings.tail == "uneven" and 0 < rest < least:
            raise UsageError(
                f"the last batch of the epoch has {rest} samples for {ranks} ranks, and with tail='uneven' "
                "a rank that has none would be a step short",
                mend="use tail='mask', which says what is repeated, or tail='drop'; or another epoch_size",
            )

    def ahead(self, start: int, stop: int, *, rank: int, ranks: int) -> list[tuple[int, int]]:
        """(stream, shard) that a rank needs for numbers `start` to `stop`, about in order of first use."""
        lanes = self.settings.order.lanes
        low, high = rank * lanes // ranks, -(-(rank + 1) * lanes // ranks) - 1
        if self.settings.method == "device_per_stream":
            low, high = 0, lanes - 1
        elif len(self.streams) > 1:
            low, high = max(low - 1, 0), min(high + 1, lanes - 1)
        before, behind = self.batching.taken(start), self.batching.taken(min(stop, self.samples))
        lists: list[Iterable[tuple[int, int]]] = [
            [(i, shard) for shard in order.ahead(low, high, before[i], behind[i])]
            for i, order in enumerate(self.streams)
            if order is not None
        ]
        return [entry for entry in chain.from_iterable(zip_longest(*lists)) if entry is not None]

    def _aligned(self, starts: Ints, position: Ints) -> Ints:
        """Sorted batches in closed form: one stream, and every lane equally often in every batch."""
        order = self.streams[0]
        assert order is not None
        lanes = order.lanes
        each = self.settings.global_batch // lanes
        lane_at = np.argsort(order.place_of_lane)  # the lane of each place
        lane = lane_at[position // each]
        turn = position % each
        return np.asarray(starts[:, None] + (lane - starts[:, None]) % lanes + turn * lanes, dtype=np.int64)

    def _sorted(self, starts: Ints, size: int) -> Ints:
        """Batches of `size` numbers, each sorted by place and, within a place, by number."""
        numbers = starts[:, None] + np.arange(size)
        stream, item = self.batching.locate(numbers.ravel())
        place = np.empty_like(item)
        for i, order in enumerate(self.streams):
            if order is not None:
                here = stream == i
                place[here] = order.place(item[here])
        by_place = np.argsort(place.reshape(numbers.shape), axis=1, kind="stable")
        return np.take_along_axis(numbers, by_place, axis=1)


def piece_bounds(batch: int, rank: int, ranks: int) -> tuple[int, int]:
    """Where a rank's piece of a sorted batch begins and ends."""
    return rank * batch // ranks, (rank + 1) * batch // ranks


def check_ranks(batch: int, ranks: int, *, uneven: bool) -> None:
    """Refuse a world that cannot carry the global batch.

    Raises:
        UsageError: The ranks do not divide it, and uneven pieces are not allowed; or there are more ranks.
    """
    if ranks > batch:
        raise UsageError(
            f"a global batch of {batch} samples cannot be divided among {ranks} ranks",
            mend="use a larger global batch or fewer ranks",
        )
    if batch % ranks and not uneven:
        near = [r for r in range(1, batch + 1) if batch % r == 0]
        below, above = max(r for r in near if r < ranks), min(r for r in near if r > ranks)
        raise UsageError(
            f"a global batch of {batch} samples cannot be divided equally among {ranks} ranks",
            mend=f"use {below} or {above} ranks, another global batch, or uneven=True, "
            "which gives some ranks a sample more than others",
        )
