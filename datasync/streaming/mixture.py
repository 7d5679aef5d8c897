"""Which stream each number comes from, exactly and without drawing lots.

A mixture is a count for each stream: how many of its samples an epoch has. The stream of number `n` is
computed from `n` alone:

    split(n) = floor((n * a + r) / (a + b))   of the first n numbers so many go left, for weights a : b

Number `n` goes left if `split(n + 1) > split(n)` and is then number `split(n)` there, else number `n -
split(n)` on the right. A binary tree of such splits, cut where the weights are closest to even, serves any
number of streams. The counts come out exactly over the epoch, and in every window of it each stream is
within one sample for each level of the tree of its exact share.

A curriculum changes the weights at given numbers: the mixture then has several phases, each with its own
counts, and a stream goes on in a phase where it stopped in the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from datasync.errors import UsageError
from datasync.streaming.permute import Ints

_MAX_SAMPLES = 1 << 54


class Mixture:
    """The streams of the numbers of an epoch.

    Args:
        phases (Sequence[Sequence[int]]): How many samples each stream gives in each phase, (phases, streams).

    Raises:
        UsageError: A count is negative, or there is nothing.
    """

    def __init__(self, phases: Sequence[Sequence[int]]) -> None:
        _check(phases)
        self.counts = [sum(counts) for counts in zip(*phases, strict=True)]
        self.samples = sum(self.counts)
        self._phases = [_Phase.build(counts) for counts in phases if sum(counts)]
        sizes = np.array([phase.samples for phase in self._phases], dtype=np.int64)
        self._starts = np.cumsum(sizes) - sizes
        counts = np.array([phase.counts for phase in self._phases], dtype=np.int64)
        self._before = np.cumsum(counts, axis=0) - counts

    def locate(self, number: Ints) -> tuple[Ints, Ints]:
        """The stream of each number, and how many numbers before it are of the same stream.

        Args:
            number (Ints): From 0 to below `samples`.
        """
        if len(self.counts) == 1:
            return np.zeros(len(number), dtype=np.int64), number
        if len(self._phases) == 1:
            return self._phases[0].locate(number)
        stream, item = np.empty_like(number), np.empty_like(number)
        phase = np.searchsorted(self._starts, number, side="right") - 1
        for p in np.unique(phase).tolist():
            here = np.flatnonzero(phase == p)
            found, count = self._phases[p].locate(number[here] - self._starts[p])
            stream[here] = found
            item[here] = count + self._before[p, found]
        return stream, item

    def taken(self, number: int) -> list[int]:
        """How many of the first `number` numbers are of each stream."""
        total = [0] * len(self.counts)
        for start, phase in zip(self._starts.tolist(), self._phases, strict=True):
            inside = min(max(number - start, 0), phase.samples)
            total = [a + b for a, b in zip(total, phase.taken(inside), strict=True)]
        return total


@dataclass(frozen=True, slots=True)
class _Node:
    """One split of the tree."""

    left: int  # a node, or ~stream
    right: int
    weight: int  # of the left
    total: int


@dataclass(frozen=True, slots=True)
class _Phase:
    """A stretch of the epoch with constant weights."""

    counts: Sequence[int]
    samples: int
    nodes: list[_Node]
    root: int

    @classmethod
    def build(cls, counts: Sequence[int]) -> _Phase:
        nodes: list[_Node] = []
        root = _grow(nodes, [i for i, count in enumerate(counts) if count], counts)
        return cls(counts=counts, samples=sum(counts), nodes=nodes, root=root)

    def locate(self, number: Ints) -> tuple[Ints, Ints]:
        """See `Mixture.locate`."""
        stream, item = np.empty_like(number), number.copy()
        todo = [(self.root, np.arange(len(number)))]
        while todo:
            code, here = todo.pop()
            if code < 0:
                stream[here] = ~code
            elif here.size:
                node = self.nodes[code]
                n = item[here]
                before = _split(n, node)
                left = _split(n + 1, node) > before
                item[here] = np.where(left, before, n - before)
                todo += [(node.left, here[left]), (node.right, here[~left])]
        return stream, item

    def taken(self, number: int) -> list[int]:
        """See `Mixture.taken`."""
        out = [0] * len(self.counts)
        todo = [(self.root, number)]
        while todo:
            code, n = todo.pop()
            if code < 0:
                out[~code] = n
            else:
                node = self.nodes[code]
                left = int(_split(np.array([n]), node)[0])
                todo += [(node.left, left), (node.right, n - left)]
        return out


def _split(number: Ints, node: _Node) -> Ints:
    """How many of the first `number` items go left; half a step ahead, so that both sides come early."""
    return scaled_floor(number, node.weight, node.total // 2, node.total)


def scaled_floor(number: Ints, weight: int, offset: int, total: int) -> Ints:
    """floor((number * weight + offset) / total), exact where the product exceeds 64 bits.

    Args:
        number (Ints): 0 <= number <= total < 2**54.
        weight (int): 0 <= weight <= total.
        offset (int): 0 <= offset < total.
        total (int): At least 1.
    """
    # In floating point the quotient is off by a few units at most. Its remainder, computed modulo 2**64, is
    # then small enough to be the true one, and says by how much.
    guess = (number * (weight / total)).astype(np.int64)
    rest = number * np.int64(weight) - guess * np.int64(total) + np.int64(offset)
    return np.asarray(guess + rest // np.int64(total), dtype=np.int64)


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers that sum to `total`, closest to the proportions of `weights` (largest remainders).

    Raises:
        UsageError: No weight is positive, or one is negative.
    """
    if not len(weights) or min(weights) < 0 or not 0 < sum(weights) < float("inf"):
        raise UsageError(
            f"weights {list(weights)} cannot be a mixture", mend="give each stream a weight of at least 0"
        )
    whole = [int(weight) << 60 if isinstance(weight, int) else int(weight * 2**60) for weight in weights]
    scale = sum(whole)
    counts = [total * weight // scale for weight in whole]
    by_rest = sorted(range(len(whole)), key=lambda i: (-(total * whole[i] % scale), i))
    for i in by_rest[: total - sum(counts)]:
        counts[i] += 1
    return counts


def _check(phases: Sequence[Sequence[int]]) -> None:
    if not phases or not all(len(counts) == len(phases[0]) for counts in phases):
        raise UsageError("every phase of a mixture needs a count for each stream", mend="give them all")
    if any(count < 0 for counts in phases for count in counts):
        raise UsageError("a stream cannot give fewer than 0 samples", mend="give counts of at least 0")
    total = sum(sum(counts) for counts in phases)
    if not 0 < total < _MAX_SAMPLES:
        raise UsageError(
            f"an epoch of {total} samples cannot be mixed", mend="let the streams give between 1 and 2**54"
        )


def _grow(nodes: list[_Node], streams: Sequence[int], counts: Sequence[int]) -> int:
    """Add the tree over these streams to `nodes`; returns its root, or ~stream for a single one."""
    if len(streams) == 1:
        return ~streams[0]
    total = sum(counts[i] for i in streams)
    best, cut, weight, running = total, 1, 0, 0
    for position, i in enumerate(streams[:-1], start=1):
        running += counts[i]
        if abs(total - 2 * running) < best:
            best, cut, weight = abs(total - 2 * running), position, running
    left = _grow(nodes, streams[:cut], counts)
    right = _grow(nodes, streams[cut:], counts)
    nodes.append(_Node(left=left, right=right, weight=weight, total=total))
    return len(nodes) - 1
