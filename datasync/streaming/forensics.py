"""Which samples a batch of a run was made of, long after it: order is a function, so it is computed again.

For loss spikes: the answer is the same on a laptop as on the cluster that trained, and needs no data but the
index until a sample is to be shown.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from datasync.errors import UsageError
from datasync.streaming.arguments import OUR_ALGORITHM
from datasync.streaming.epoch import EpochOrder
from datasync.streaming.permute import Ints
from datasync.streaming.world import World

if TYPE_CHECKING:
    from datasync.streaming.dataset import StreamingDataset


def batch_samples(
    dataset: StreamingDataset,
    *,
    epoch: int,
    step: int,
    rank: int | None = None,
    ranks: int = 1,
    ranks_per_node: int | None = None,
    start: int = 0,
) -> Ints:
    """Numbers in the dataset of the samples of a batch, in the order of the batch.

    Args:
        dataset (StreamingDataset): Built as for the run, with the run's global batch size.
        epoch (int): The epoch.
        step (int): The batch, counted from `start`.
        rank (int | None): Whose piece. Default: ``None``, every rank's, one after another.
        ranks (int): Of how many.
        ranks_per_node (int | None): How many of them were on a node; only MosaicML's order depends on it.
            Default: all.
        start (int): The sample at which the run entered the epoch. Default: ``0``.

    Raises:
        UsageError: There is no such batch or rank.
    """
    if rank is not None and not 0 <= rank < ranks:
        raise UsageError(f"there is no rank {rank} among {ranks}", mend=f"ranks go from 0 to {ranks - 1}")
    which = range(ranks) if rank is None else [rank]
    if dataset.shuffle_algo != OUR_ALGORITHM:
        return _their_samples(dataset, epoch, step, which, ranks, ranks_per_node or ranks, start)
    settings = dataset.epoch_order(epoch).settings
    order = EpochOrder(replace(settings, device_batch=max(1, settings.global_batch // ranks)), epoch)
    _check_step(step, order.steps(start), epoch, start)
    if step < order.full_steps(start):
        begin = np.array([start + step * settings.global_batch])
        pieces = [order.pieces(begin, rank=r, ranks=ranks)[0] for r in which]
    else:
        pieces = [order.tail(start, rank=r, ranks=ranks)[0] for r in which]
    return dataset.catalog.number(*order.locate(np.concatenate(pieces)))


def _their_samples(
    dataset: StreamingDataset,
    epoch: int,
    step: int,
    which: Iterable[int],
    ranks: int,
    ranks_per_node: int,
    start: int,
) -> Ints:
    """The same in MosaicML's order."""
    from datasync.streaming.mosaic import rank_batch

    pieces = []
    for rank in which:
        world = World(rank=rank, ranks=ranks, ranks_per_node=ranks_per_node)
        piece, steps = rank_batch(dataset, world, epoch=epoch, step=step, start=start)
        _check_step(step, steps, epoch, start)
        pieces.append(piece)
    return np.concatenate(pieces)


def _check_step(step: int, steps: int, epoch: int, start: int) -> None:
    if not 0 <= step < steps:
        raise UsageError(
            f"epoch {epoch} has {steps} batches from sample {start} on, there is no batch {step}",
            mend="give a smaller step, or another epoch",
        )


def batch_places(dataset: StreamingDataset, samples: Ints) -> list[dict[str, Any]]:
    """For each sample number: the number and where the sample lies."""
    return [{"sample_id": sample, **dataset.where(sample)} for sample in samples.tolist()]
