"""Which samples of a stream an epoch uses, when it uses more or fewer than there are.

A stream of `n` samples that gives `choose` an epoch is used whole `choose // n` times and in part once. Each
whole use of a shard is a unit, and so is its part; order permutes units and knows nothing of repeats.

The part is spread over the shards in proportion to their sizes, `granularity` samples of a shard at a time.
With the method ``balanced`` it is another part each epoch, with ``fixed`` always the same one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from datasync.errors import UsageError
from datasync.streaming.mixture import scaled_floor
from datasync.streaming.permute import Ints, permute

MAX_UNITS = 1 << 20
"""Most uses of shards in an epoch that uses a stream more than once; planning takes about 200 bytes each."""


@dataclass(frozen=True, slots=True)
class Units:
    """The pieces of shards that an epoch uses, one entry a unit; memory grows with shards times repeats.

    Args:
        shard (Ints): Which shard.
        size (Ints): How many of its samples.
        partial (NDArray[bool]): Whether they are a part of the shard's samples.
    """

    shard: Ints
    size: Ints
    partial: np.ndarray[tuple[int], np.dtype[np.bool_]]


def stream_units(sizes: Ints, choose: int, *, granularity: int, key: int) -> Units:
    """The units of a stream.

    Args:
        sizes (Ints): Samples of each shard, not all 0.
        choose (int): Samples to use.
        granularity (int): Samples to take from a shard at a time, in the part; at least 1.
        key (int): Names the part: of seed and epoch for ``balanced``, of the seed alone for ``fixed``.

    Raises:
        UsageError: It is used too often in one epoch.
    """
    shards = np.arange(len(sizes), dtype=np.int64)
    repeats, rest = divmod(choose, int(sizes.sum()))
    if repeats > 1 and repeats * len(shards) > MAX_UNITS:
        samples = int(sizes.sum())
        raise UsageError(
            f"an epoch of {choose:,} samples goes {repeats:,} times over a stream of {samples:,} samples in "
            f"{len(shards):,} shards, which is too much to plan at once",
            mend=f"use at most {MAX_UNITS // len(shards) * samples:,}; the next epoch follows by itself",
        )
    part = shard_parts(sizes, rest, granularity=granularity, key=key)
    used = np.flatnonzero(part)
    return Units(
        shard=np.concatenate([np.tile(shards, repeats), used]),
        size=np.concatenate([np.tile(sizes, repeats), part[used]]),
        partial=np.arange(len(shards) * repeats + len(used)) >= len(shards) * repeats,
    )


def shard_parts(sizes: Ints, total: int, *, granularity: int, key: int) -> Ints:
    """How many samples of each shard are in a part of `total` samples; each at most its size.

    The shards stand in a row, permuted by `key` and cut into granules. Every so many granules one is taken,
    so that all stretches of the row give their share.
    """
    if total == 0:
        return np.zeros_like(sizes)
    order = permute(np.arange(len(sizes)), len(sizes), np.uint64(key))
    granules = -(-sizes[order] // granularity)
    ends = np.cumsum(granules)
    count = int(ends[-1])
    wanted = min(-(-total // granularity), count)
    taken = np.diff(scaled_floor(ends, wanted, key % count, count), prepend=0)
    part = np.minimum(taken * granularity, sizes[order])
    part = _take_back(part, int(part.sum()) - total)
    part = _top_up(part, sizes[order], total - int(part.sum()))
    out = np.empty_like(sizes)
    out[order] = part
    return out


def _take_back(part: Ints, excess: int) -> Ints:
    """Less by `excess` in total: the last granules were larger than what was left to take."""
    return part if excess <= 0 else part - _first(part, excess)


def _top_up(part: Ints, sizes: Ints, missing: int) -> Ints:
    """More by `missing` in total: the last granule of a shard may be short."""
    return part if missing <= 0 else part + _first(sizes - part, missing)


def _first(room: Ints, amount: int) -> Ints:
    """`amount` as the first entries of `room` can hold it."""
    before = np.cumsum(room) - room
    return np.clip(amount - before, 0, room)
