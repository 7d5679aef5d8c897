"""Who this process is among nodes, ranks and DataLoader workers.

Read from the variables that torchrun and every other launcher set; from `torch.distributed` where it runs
without them; else one process alone.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from typing import Any

from datasync.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A place among all processes that read.

    Args:
        rank (int): Which rank.
        ranks (int): Of how many.
        ranks_per_node (int): How many of them on a node.
        worker (int): Which DataLoader worker of the rank; 0 without workers. Default: ``0``.
        workers (int): Of how many; 1 without workers. Default: ``1``.
    """

    rank: int
    ranks: int
    ranks_per_node: int
    worker: int = 0
    workers: int = 1

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.ranks // self.ranks_per_node

    @property
    def node(self) -> int:
        """Which node."""
        return self.rank // self.ranks_per_node

    @property
    def local_rank(self) -> int:
        """Which rank of the node."""
        return self.rank % self.ranks_per_node

    @classmethod
    def detect(cls) -> World:
        """The world of this process, without workers."""
        ranks = _from_environment("WORLD_SIZE")
        rank = _from_environment("RANK")
        if ranks is None or rank is None:
            rank, ranks = _from_torch()
        per_node = _from_environment("LOCAL_WORLD_SIZE") or (ranks if ranks == 1 else 1)
        if ranks % per_node:
            raise UsageError(
                f"WORLD_SIZE {ranks} is no multiple of LOCAL_WORLD_SIZE {per_node}",
                mend="start the same number of ranks on every node",
            )
        if not 0 <= rank < ranks:
            raise UsageError(
                f"RANK {rank} is not below WORLD_SIZE {ranks}", mend="mend the launcher's variables"
            )
        return cls(rank=rank, ranks=ranks, ranks_per_node=per_node)

    def with_workers(self) -> World:
        """The same rank as the DataLoader worker that this process is."""
        module = sys.modules.get("torch.utils.data")
        info = module.get_worker_info() if module is not None else None
        return self if info is None else replace(self, worker=info.id, workers=info.num_workers)

    def replicate(self, replication: int) -> World:
        """The world in which each `replication` consecutive ranks are one.

        Raises:
            UsageError: It is not positive, or does not divide the number of ranks.
        """
        if replication <= 0:
            raise UsageError(f"replication {replication} is not positive", mend="use 1 for no replication")
        if self.ranks % replication:
            raise UsageError(
                f"{self.ranks} ranks cannot be divided into groups of replication {replication}",
                mend="let replication divide the number of ranks",
            )
        ranks = self.ranks // replication
        nodes = ranks // self.ranks_per_node if ranks % self.ranks_per_node == 0 else 1
        return replace(self, rank=self.rank // replication, ranks=ranks, ranks_per_node=ranks // nodes)


def refuse_division(dataset: object, world: World) -> None:
    """Refuse to be read through a loader of Accelerate's that divides among ranks what is divided already.

    That reads the dataset on the first rank alone, or drops on each rank what it takes for the part of
    others: either way samples would be missing, without a word. It names its epoch before it begins to read.

    Raises:
        UsageError: Accelerate has begun to iterate over such a loader of this dataset.
    """
    module = sys.modules.get("accelerate.data_loader")
    if module is None or world.ranks == 1:
        return
    loader = module.GradientState().active_dataloader
    read: Any = getattr(loader, "dataset", None)
    shard = isinstance(read, module.IterableDatasetShard)
    divides = shard or isinstance(loader, module.DataLoaderDispatcher)
    if divides and dataset is (read.dataset if shard else read):
        raise UsageError(
            "Accelerate would divide this dataset among the ranks once more, and leave samples out",
            mend="prepare a StreamingDataLoader over it, which Accelerate leaves as it is; with Hugging "
            "Face's Trainer, return one from get_train_dataloader",
        )


def _from_environment(name: str) -> int | None:
    text = os.environ.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"${name} is {text!r}, not a number", mend="mend the launcher's variables") from None


def _from_torch() -> tuple[int, int]:
    """Rank and number of ranks of `torch.distributed`, where it is loaded and initialised."""
    module = sys.modules.get("torch.distributed")
    if module is not None and module.is_available() and module.is_initialized():
        return module.get_rank(), module.get_world_size()
    return 0, 1
