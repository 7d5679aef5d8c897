"""Who this process is among nodes, ranks and DataLoader workers.

Read from the variables that torchrun and every other launcher set; from `torch.distributed` where it runs
without them; else one process alone.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace

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
