"""MosaicML Streaming's own order, computed by MosaicML Streaming's own functions.

With `shuffle_algo` one of its names, a run begun there goes on here at the same sample, bit for bit: the
library that defines the order is asked for it (extra ``mosaicml``; imported here and nowhere else). The
price is also its: an epoch is materialised, in every worker, in time and memory that grow with the number
of samples.

The functions that we call want a dataset of theirs. `_Facade` has the attributes that they read, and borrows
their `resample_streams`.
"""

from __future__ import annotations

import logging
import types
from typing import TYPE_CHECKING, Any

import numpy as np

from datasync.errors import UsageError
from datasync.streaming.permute import Ints
from datasync.streaming.world import World

if TYPE_CHECKING:
    from datasync.streaming.dataset import StreamingDataset

log = logging.getLogger("datasync.streaming")

_MANY_NODES = ("py1s", "py2s")


def canonical_nodes(dataset: StreamingDataset, world: World) -> int:
    """Canonical nodes as that library chooses them: of a loaded state, as asked for, or by nodes."""
    if dataset.loaded_lanes:
        return dataset.loaded_lanes
    if dataset.num_canonical_nodes is not None:
        return dataset.num_canonical_nodes
    return 64 * world.nodes if dataset.shuffle_algo in _MANY_NODES else world.nodes


def worker_samples(dataset: StreamingDataset, world: World, epoch: int, offset: int) -> Ints:
    """Numbers in the dataset of a worker's samples, in order, from sample `offset` of the epoch on."""
    return rank_samples(dataset, world, epoch, offset)[world.worker]


def rank_samples(dataset: StreamingDataset, world: World, epoch: int, offset: int) -> list[Ints]:
    """The same for each worker of the rank.

    Raises:
        UsageError: MosaicML Streaming is not installed, or its functions refuse the arguments.
    """
    generate_work, their_dataset, their_world = _import()
    facade = _facade(dataset, their_dataset, world)
    place = their_world(
        world.nodes, world.ranks_per_node, world.workers, world.rank * world.workers + world.worker
    )
    # Ranks and canonical nodes repeat samples until all have equally many, so an epoch may have more than
    # its size. That library refuses to go on among the last of them.
    beyond = dataset.batching_method == "random" and offset > dataset.epoch_size
    try:
        work = generate_work(dataset.batching_method, facade, place, epoch, 0 if beyond else offset)
    except ValueError as error:
        raise UsageError(
            f"MosaicML Streaming refuses this order: {error}", mend="change the arguments that it names"
        ) from error
    mine = work[place.node, place.rank_of_node]  # (workers, batches of a worker, samples)
    if beyond:
        mine = _without(mine, offset // world.ranks)
    return [samples[samples >= 0].astype(np.int64) for samples in mine.reshape(world.workers, -1)]


def _without(work: Ints, first: int) -> Ints:
    """A rank's work less its first samples: what is left is dealt to its workers anew."""
    workers, _, batch = work.shape
    samples = work.transpose(1, 0, 2).ravel()
    samples = samples[samples >= 0][first:]
    missing = -len(samples) % (workers * batch)
    filled = np.concatenate([samples, np.full(missing, -1, samples.dtype)])
    return np.asarray(filled.reshape(-1, workers, batch).transpose(1, 0, 2), dtype=np.int64)


def rank_batch(
    dataset: StreamingDataset, world: World, *, epoch: int, step: int, start: int
) -> tuple[Ints, int]:
    """Numbers in the dataset of the samples of a rank's batch, and how many batches the rank has."""
    samples = worker_samples(dataset, world, epoch, start)
    size = (dataset.global_batch or 1) // world.ranks
    return samples[step * size : (step + 1) * size], -(-len(samples) // size)


def _facade(dataset: StreamingDataset, their_dataset: Any, world: World) -> Any:
    """What their functions read of a dataset."""
    nodes = canonical_nodes(dataset, world)
    bounds = np.cumsum(dataset.samples_per_shard)
    facade = types.SimpleNamespace(
        num_canonical_nodes=nodes,
        batch_size=(dataset.global_batch or 1) // world.ranks,
        epoch_size=dataset.epoch_size,
        partition_algo=dataset.partition_algo,
        initial_physical_nodes=dataset.loaded_nodes or None,
        shuffle=dataset.shuffle,
        shuffle_algo=dataset.shuffle_algo,
        shuffle_seed=dataset.shuffle_seed,
        shuffle_block_size=dataset.shuffle_block_size or max(4_000_000 // nodes, 1 << 18),
        sampling_method=dataset.sampling_method,
        sampling_granularity=dataset.sampling_granularity,
        epoch_seed_change=dataset.shuffle and dataset.sampling_method == "balanced",
        streams=dataset.streams,
        num_streams=dataset.num_streams,
        shard_offset_per_stream=dataset.shard_offset_per_stream,
        shards_per_stream=dataset.shards_per_stream,
        samples_per_shard=dataset.samples_per_shard,
        sample_offset_per_shard=bounds - dataset.samples_per_shard,
    )
    facade.resample_streams = types.MethodType(their_dataset.resample_streams, facade)
    return facade


def _import() -> tuple[Any, Any, Any]:
    try:
        from streaming.base.batching import generate_work
        from streaming.base.dataset import StreamingDataset as TheirDataset
        from streaming.base.world import World as TheirWorld
    except ImportError as error:
        raise UsageError(
            f"the order of MosaicML Streaming needs that library, which cannot be imported: {error}",
            mend="pip install 'datasync[mosaicml]', or use the default shuffle_algo, 'lanes'",
        ) from error
    return generate_work, TheirDataset, TheirWorld
