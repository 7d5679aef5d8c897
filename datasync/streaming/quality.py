"""How good a shuffle is, measured on the sequence of samples it gives.

All measures compare with a uniformly random permutation, for which they are 1.00; less mixing is more.

    same shard     how often two samples of a batch are from one shard
    neighbours     how often samples that are stored within 10 places of each other share a batch
    again          how often two samples share a batch in two epochs

The price of a shuffle is how many shards have to be held at a time: `held`, the most that are between their
first and their last use.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from datasync.streaming.permute import Ints

_NEAR = 10


@dataclass(frozen=True, slots=True)
class Quality:
    """The measures of a shuffle.

    Args:
        same_shard (float): See the module.
        neighbours (float): See the module.
        again (float): See the module.
        held (int): See the module.
    """

    same_shard: float
    neighbours: float
    again: float
    held: int


def measure(epochs: list[Ints], sizes: Ints, batch: int) -> Quality:
    """Measure a shuffle.

    Args:
        epochs (list[Ints]): The numbers of the dataset's samples in the order of two epochs, each once.
        sizes (Ints): Samples of each shard.
        batch (int): Samples of a batch.
    """
    shard_of = np.repeat(np.arange(len(sizes)), sizes)
    first = epochs[0]
    return Quality(
        same_shard=_same_shard(shard_of[first], sizes, batch),
        neighbours=_neighbours(first, batch),
        again=_again(epochs[0], epochs[1], batch),
        held=shards_held(shard_of[first], len(sizes)),
    )


def shards_held(shards: Ints, count: int) -> int:
    """The most shards that are between their first and last use at any time of a sequence."""
    places = np.arange(len(shards))
    begin, end = np.full(count, len(shards)), np.zeros(count, dtype=np.int64)
    np.minimum.at(begin, shards, places)
    np.maximum.at(end, shards, places)
    used = begin < len(shards)
    change = np.bincount(begin[used], minlength=len(shards) + 1)[: len(shards) + 1]
    change = change - np.bincount(end[used] + 1, minlength=len(shards) + 1)[: len(shards) + 1]
    return int(np.cumsum(change).max())


def _same_shard(shards: Ints, sizes: Ints, batch: int) -> float:
    rows = _batches(shards, batch)
    ordered = np.sort(rows, axis=1)
    pairs = 0
    for lag in range(1, batch):
        same = int((ordered[:, lag:] == ordered[:, :-lag]).sum())
        if not same:
            break
        pairs += same
    total = int(sizes.sum())
    chance = float((sizes * (sizes - 1)).sum()) / (total * (total - 1))
    return pairs / (len(rows) * batch * (batch - 1) / 2) / chance


def _neighbours(samples: Ints, batch: int) -> float:
    of_sample = np.empty(len(samples), dtype=np.int64)
    of_sample[samples] = np.arange(len(samples)) // batch
    together = sum(int((of_sample[lag:] == of_sample[:-lag]).sum()) for lag in range(1, _NEAR + 1))
    pairs = sum(len(samples) - lag for lag in range(1, _NEAR + 1))
    return together / pairs / ((batch - 1) / (len(samples) - 1))


def _again(first: Ints, second: Ints, batch: int) -> float:
    of_sample = np.empty(len(first), dtype=np.int64)
    of_sample[second] = np.arange(len(second)) // batch
    ordered = np.sort(_batches(of_sample[first], batch), axis=1)
    pairs = sum(int((ordered[:, lag:] == ordered[:, :-lag]).sum()) for lag in range(1, batch))
    chance = (batch - 1) / (len(first) - 1)
    return pairs / (len(ordered) * batch * (batch - 1) / 2) / chance


def _batches(values: Ints, batch: int) -> Ints:
    full = len(values) // batch * batch
    return values[:full].reshape(-1, batch)
