"""How a global batch is composed of streams: the four batching methods, each computed from the number alone.

    random             numbers go to streams as the mixture says, whatever batch they fall into (`Mixture`)
    stratified         every global batch has the same number of samples of each stream
    per_stream         every global batch is of one stream; the batches are mixed
    device_per_stream  every rank's batch is of one stream; the ranks' batches are mixed

All but the first depend on the batch size. What does not fill a batch of its stream is left out of the epoch,
as in MosaicML Streaming; the method is refused where a stream would never appear.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from datasync.errors import UsageError
from datasync.streaming.mixture import Mixture, apportion
from datasync.streaming.permute import Ints

METHODS = ("random", "stratified", "per_stream", "device_per_stream")


class Batching(Protocol):
    """Numbers to the items of streams."""

    @property
    def samples(self) -> int:
        """How many numbers there are."""

    @property
    def used(self) -> list[int]:
        """Items of each stream that an epoch may use: what its order is made over."""

    def locate(self, number: Ints) -> tuple[Ints, Ints]:
        """The stream of each number, and which of the stream's items it is."""

    def taken(self, number: int) -> list[int]:
        """How many items of each stream the first `number` numbers have."""


class RandomBatching:
    """Numbers mixed one by one."""

    def __init__(self, phases: Sequence[Sequence[int]]) -> None:
        self._mixture = Mixture(phases)
        self.samples = self._mixture.samples
        self.used = self._mixture.counts

    def locate(self, number: Ints) -> tuple[Ints, Ints]:
        """See `Batching`."""
        return self._mixture.locate(number)

    def taken(self, number: int) -> list[int]:
        """See `Batching`."""
        return self._mixture.taken(number)


class StratifiedBatching:
    """The same composition in every global batch.

    Raises:
        UsageError: A stream's share of a batch is less than one sample, or a stream cannot fill one batch.
    """

    def __init__(self, counts: Sequence[int], batch: int) -> None:
        self._batch = batch
        self._parts = apportion(batch, counts)
        for stream, part in enumerate(self._parts):
            if part == 0:
                raise UsageError(
                    f"stream {stream} has less than one sample in a global batch of {batch}, "
                    "so the batching method 'stratified' would leave it out",
                    mend="use a larger batch or a larger proportion of this stream",
                )
        batches = min(count // part for count, part in zip(counts, self._parts, strict=True))
        self.samples = batches * batch
        self.used = list(counts)
        self._stream, self._item = Mixture([self._parts]).locate(np.arange(batch))
        self._part_of = np.array(self._parts, dtype=np.int64)

    def locate(self, number: Ints) -> tuple[Ints, Ints]:
        """See `Batching`."""
        batch, slot = np.divmod(number, self._batch)
        stream = self._stream[slot]
        return stream, batch * self._part_of[stream] + self._item[slot]

    def taken(self, number: int) -> list[int]:
        """See `Batching`."""
        batch, slot = divmod(number, self._batch)
        return [batch * part + int((self._stream[:slot] == i).sum()) for i, part in enumerate(self._parts)]


class PerStreamBatching:
    """Batches of one stream each, mixed; global batches or, with `batch` that of a rank, device batches.

    Raises:
        UsageError: A stream cannot fill one batch.
    """

    def __init__(self, counts: Sequence[int], batch: int, *, method: str) -> None:
        batches = [count // batch for count in counts]
        for stream, count in enumerate(batches):
            if count == 0:
                raise UsageError(
                    f"stream {stream} has {counts[stream]} samples an epoch, too few for a batch "
                    f"of {batch}, so the batching method {method!r} would leave it out",
                    mend="use a smaller batch or more samples of this stream",
                )
        self._batch = batch
        self._mixture = Mixture([batches])
        self.samples = self._mixture.samples * batch
        self.used = list(counts)

    def locate(self, number: Ints) -> tuple[Ints, Ints]:
        """See `Batching`."""
        batch, slot = np.divmod(number, self._batch)
        stream, item = self._mixture.locate(batch)
        return stream, item * self._batch + slot

    def taken(self, number: int) -> list[int]:
        """See `Batching`."""
        batch, slot = divmod(number, self._batch)
        taken = [count * self._batch for count in self._mixture.taken(batch)]
        if slot:
            taken[int(self._mixture.locate(np.array([batch]))[0][0])] += slot
        return taken


def make_batching(
    method: str, phases: Sequence[Sequence[int]], *, global_batch: int, device_batch: int
) -> Batching:
    """The batching of an epoch.

    Args:
        method (str): One of `METHODS`.
        phases (Sequence[Sequence[int]]): Samples of each stream in each phase; several only for ``random``.
        global_batch (int): Samples of all ranks' batches.
        device_batch (int): Samples of one rank's batch.
    """
    if method == "random":
        return RandomBatching(phases)
    if len(phases) != 1:
        raise UsageError(
            f"a curriculum cannot be used with the batching method {method!r}", mend="use 'random'"
        )
    if method == "stratified":
        return StratifiedBatching(phases[0], global_batch)
    batch = global_batch if method == "per_stream" else device_batch
    return PerStreamBatching(phases[0], batch, method=method)
