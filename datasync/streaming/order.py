"""Order: the samples of an epoch as a function of their number (invariant 4).

One stream gives its items in an order that is computed:

    units      every use of a shard in this epoch (`sampling.py`), permuted by (seed, epoch), laid end to end
    spans      the N positions are cut into L spans, sizes at most one apart; lane l walks span place(l)
    blocks     a lane walks its span block by block; inside a block, positions are permuted
    item j     lane j mod L, depth j div L  ->  position  ->  unit and row

A block is a run of whole units inside a span: as many as make L blocks hold at least 64, so that the window
of the shuffle, and the number of shards held at a time, are the same for every L. A shard that a span's
edge cuts has its rows permuted first, so that both lanes get a random part of it.

Without shuffling there is one lane (unless a number is asked for) and the order is the dataset's own.

Memory is a few numbers a unit, never one a sample. Everything takes thousands of items in one call.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import gcd

import numpy as np

from datasync.streaming.permute import Ints, hash_key, permute, spread_keys
from datasync.streaming.sampling import stream_units

SHARDS_HELD = 64
MAX_DEFAULT_LANES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderSettings:
    """What fixes the order of every stream, besides its shards.

    Args:
        seed (int): The run's shuffle seed.
        shuffle (bool): Permute, or keep the dataset's order.
        lanes (int): Canonical lanes, L.
        block_size (int | None): Least samples of a block. Default: ``None``, by the number of shards held.
        sampling_method (str): ``balanced`` or ``fixed``. Default: ``balanced``.
        granularity (int): Samples of a shard taken at a time in a partial use. Default: ``1``.
    """

    seed: int
    shuffle: bool
    lanes: int
    block_size: int | None = None
    sampling_method: str = "balanced"
    granularity: int = 1


def default_lanes(global_batch: int) -> int:
    """The largest divisor of the global batch size that is not above 64."""
    return max(d for d in range(1, min(global_batch, MAX_DEFAULT_LANES) + 1) if global_batch % d == 0)


def lane_places(lanes: int) -> Ints:
    """Which span each lane walks: consecutive lanes far apart.

    Ranks own neighbouring spans. A stream that gives a batch fewer items than there are lanes still gives
    every rank its share, since any run of consecutive items is spread over all spans (golden-ratio steps).
    """
    step = max(1, round(lanes * 0.6180339887498949))
    while gcd(step, lanes) != 1:
        step += 1
    return np.arange(lanes, dtype=np.int64) * step % lanes


class StreamOrder:
    """The items of one stream in one epoch.

    Args:
        sizes (Ints): Samples of each shard.
        choose (int): Items the stream gives in this epoch.
        stream (int): The stream's number; streams over the same shards have different orders.
        epoch (int): The epoch.
        settings (OrderSettings): The rest.
    """

    def __init__(self, sizes: Ints, choose: int, *, stream: int, epoch: int, settings: OrderSettings) -> None:
        self.samples = choose
        self.lanes = settings.lanes
        self._settings = settings
        self._sizes = sizes
        epoch_key = hash_key(settings.seed, "stream", stream, "epoch", epoch)
        balanced = settings.sampling_method == "balanced"
        self._part_key = hash_key("part", epoch_key if balanced else hash_key(settings.seed, stream))
        self._row_key = hash_key("row", epoch_key)
        self._block_key = hash_key("block", epoch_key)

        units = stream_units(sizes, choose, granularity=settings.granularity, key=self._part_key)
        if settings.shuffle:
            key = np.uint64(hash_key("unit", epoch_key))
            permuted = permute(np.arange(len(units.shard)), len(units.shard), key)
            self._shard, size = units.shard[permuted], units.size[permuted]
            self._partial = units.partial[permuted]
        else:
            self._shard, size, self._partial = units.shard, units.size, units.partial
        self._bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(size)])  # of units; the last is N

        place = lane_places(self.lanes)
        span = np.full(self.lanes, choose // self.lanes)
        span[place[: choose % self.lanes]] += 1
        self._span = span  # samples of each place
        self._start = np.cumsum(span) - span  # first position of each place
        self.place_of_lane = place
        if settings.shuffle:
            self._edges = self._block_edges()
            self._cut = self._units_cut()

    def locate(self, item: Ints) -> tuple[Ints, Ints]:
        """Shard and row of each item, both (n,)."""
        return self._at(self._start[self.place_of_lane[item % self.lanes]] + item // self.lanes)

    def place(self, item: Ints) -> Ints:
        """The place (the rank of its span among all) of each item: what batches are sorted by."""
        return np.asarray(self.place_of_lane[item % self.lanes], dtype=np.int64)

    def ahead(self, first_place: int, last_place: int, start: int, stop: int) -> list[int]:
        """Shards that items `start` to `stop` need from some of the places, about in order of first use.

        Args:
            first_place (int): The first place.
            last_place (int): The last place, included.
            start (int): First item.
            stop (int): Item behind the last one.
        """
        found: list[tuple[int, int]] = []
        for place in range(first_place, last_place + 1):
            span = int(self._span[place])
            low = min(start // self.lanes, span)
            high = min(-(-stop // self.lanes), span)
            if low < high:
                found += self._shards_between(int(self._start[place]), low, high)
        found.sort(key=lambda entry: entry[0])
        return list(dict.fromkeys(shard for _, shard in found))

    def _shards_between(self, origin: int, low: int, high: int) -> list[tuple[int, int]]:
        """(depth of first use, shard) of the blocks that depths `low` to `high` of a span touch."""
        first, last = origin + low, origin + high
        if self._settings.shuffle:
            block = int(np.searchsorted(self._edges, first, side="right")) - 1
            behind = int(np.searchsorted(self._edges, last, side="left"))
            edges = self._edges[block : behind + 1].tolist()
        else:
            edges = [first, last]
        found = []
        for begin, end in pairwise(edges):
            unit = int(np.searchsorted(self._bounds, begin, side="right")) - 1
            stop = int(np.searchsorted(self._bounds, end, side="left"))
            used = [u for u in range(unit, stop) if self._bounds[u + 1] > self._bounds[u]]
            if self._settings.shuffle:
                found += [(max(begin - origin, low), int(self._shard[u])) for u in used]
            else:
                found += [(max(int(self._bounds[u]) - origin, low), int(self._shard[u])) for u in used]
        return found

    def _at(self, position: Ints) -> tuple[Ints, Ints]:
        """Shard and row of each position of the spans."""
        if self._settings.shuffle:
            block = np.searchsorted(self._edges, position, side="right") - 1
            begin = self._edges[block]
            size = self._edges[block + 1] - begin
            position = begin + permute(position - begin, size, spread_keys(self._block_key, block))
        unit = np.searchsorted(self._bounds, position, side="right") - 1
        offset = position - self._bounds[unit]
        shard = self._shard[unit]
        return shard, self._rows(unit, shard, offset)

    def _rows(self, unit: Ints, shard: Ints, offset: Ints) -> Ints:
        """Row in the shard of each place in a unit."""
        partial = self._partial[unit]
        if not self._settings.shuffle:
            if not partial.any():
                return offset
            # Evenly spaced rows, in order, from a start that differs from part to part.
            size, taken = self._sizes[shard], self._bounds[unit + 1] - self._bounds[unit]
            phase = (spread_keys(self._part_key, shard) % size.astype(np.uint64)).astype(np.int64)
            return np.asarray(np.where(partial, (offset * size + phase) // taken, offset), dtype=np.int64)
        here = np.flatnonzero(partial | self._cut[unit])
        if here.size:
            keys = np.where(
                partial[here],
                spread_keys(self._part_key, shard[here]),
                spread_keys(self._row_key, unit[here]),
            )
            offset[here] = permute(offset[here], self._sizes[shard[here]], keys)
        return offset

    def _block_edges(self) -> Ints:
        """Where blocks begin, every so many units from the beginning of a span; N at the end."""
        ends = self._bounds[1:-1]
        starts = self._start[self._span > 0]
        place = np.searchsorted(starts, ends, side="right") - 1
        first = np.searchsorted(ends, starts, side="right")  # the first unit to end inside each span
        number = np.arange(len(ends)) - first[place] + 1 if len(ends) else np.zeros(0, np.int64)
        inside = ends[number % self._units_a_block() == 0] if len(ends) else ends
        edges = np.concatenate([starts, inside, self._bounds[-1:]])
        return np.asarray(np.unique(edges), dtype=np.int64)

    def _units_a_block(self) -> int:
        if self._settings.block_size is None:
            return -(-SHARDS_HELD // self.lanes)
        mean = max(1.0, self.samples / max(1, len(self._shard)))
        return max(1, -int(-self._settings.block_size // mean))

    def _units_cut(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which units lie in more than one block."""
        cut = np.zeros(len(self._shard), dtype=np.bool_)
        inner = self._edges[1:-1]
        unit = np.searchsorted(self._bounds, inner, side="right") - 1
        cut[unit] = self._bounds[unit] < inner
        return cut
