"""The ranks of a run: who there is, what all of them agree on, and who is missing.

One process is a team of one; under torchrun a team is made from its environment. Each step opens with
`vote`, one small sum over all ranks (tokens to train on, signals received). It is also the place where a
rank that has died or hangs is noticed: every rank leaves its step in the rendezvous store first, so those
behind can be named.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shards.errors import DatasyncError, UsageError
from train.config import ParallelConfig
from train.signals import StopRequest

log = logging.getLogger("train")

_MEND = "look at the log of that rank; run the same command again to continue from the last checkpoint"


class RankError(DatasyncError):
    """Ranks that did not come to a meeting in time."""


class Team:
    """All ranks, seen from this one.

    Args:
        parallel (ParallelConfig): Which device to use.
        timeout_s (float): Seconds to wait for the others.
        working (Callable[[int], int]): How many of the ranks that were started compute; those beyond stand
            by.
    """

    def __init__(
        self,
        parallel: ParallelConfig,
        timeout_s: float = 600.0,
        working: Callable[[int], int] = lambda started: started,
    ) -> None:
        self.rank, self.started = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.world = working(self.started)
        here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.local_world = max(min(here, self.world - (self.rank - self.local_rank)), 1)
        self.timeout_s = timeout_s
        self.device = _device(parallel.device, self.local_rank)
        self._store: dist.Store | None = None
        self._writers: dist.ProcessGroup | None = None
        self._meetings = 0
        self.hosts = [socket.gethostname()]
        if "RANK" in os.environ and "MASTER_ADDR" in os.environ:
            backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
            timeout = timedelta(seconds=timeout_s)
            store = _rendezvous(self.rank, self.started, timeout)
            self._store = dist.PrefixStore("datasync", store)
            if self.spare:
                return
            if self.world < self.started:  # who reads data looks here
                alike = self.local_world if self.world % self.local_world == 0 else 1
                os.environ.update(WORLD_SIZE=str(self.world), LOCAL_WORLD_SIZE=str(alike))
            dist.init_process_group(
                backend, store=store, rank=self.rank, world_size=self.world, timeout=timeout
            )
            self.hosts = [str(host) for host in self.gather_objects(socket.gethostname())]
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    @property
    def distributed(self) -> bool:
        """Whether there are process groups."""
        return self._store is not None

    @property
    def leads(self) -> bool:
        """Whether this rank writes what only one may write."""
        return self.rank == 0

    @property
    def spare(self) -> bool:
        """Whether this rank only stands by."""
        return self.rank >= self.world

    def stand_by(self) -> dict[str, Any]:
        """Wait until the ranks that work have ended, also through a signal, which is theirs to answer."""
        assert self._store is not None
        log.info("rank %d of %d stands by: the work goes to %d", self.rank, self.started, self.world)
        stop = StopRequest()
        try:
            while not self._store.check(["ended"]):
                time.sleep(0.2)
        except RuntimeError:
            log.info("rank %d: the rendezvous is gone", self.rank)
        finally:
            stop.restore()
        return {}

    def vote(self, step: int, numbers: Sequence[int]) -> list[int]:
        """The sum of each number over all ranks; names the ranks that do not come.

        Raises:
            RankError: A rank is gone, or did not reach this step in time.
        """
        if self._store is None:
            return list(numbers)
        self._store.set(f"step/{self.rank}", str(step))
        ballot = torch.tensor(list(numbers), dtype=torch.int64)
        try:
            dist.all_reduce(ballot)
        except RuntimeError as error:
            raise self.missing(step, error) from error
        return [int(n) for n in ballot]

    def gather(self, numbers: Sequence[float]) -> Tensor:
        """(world, n) float64: the numbers of each rank, on every rank."""
        mine = torch.tensor(list(numbers), dtype=torch.float64)
        if not self.distributed:
            return mine[None]
        everyone = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(everyone, mine)
        return torch.stack(everyone)

    def gather_objects(self, value: Any, *, writers: bool = False) -> list[Any]:
        """One small JSON value from each rank, on every rank; `writers` for the thread that writes
        checkpoints."""
        if not self.distributed:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        group = self.writers if writers else None
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=group)
        width = max(int(size) for size in sizes)
        rows = [torch.zeros(width, dtype=torch.uint8) for _ in range(self.world)]
        dist.all_gather(
            rows, torch.cat([data, torch.zeros(width - len(data), dtype=torch.uint8)]), group=group
        )
        return [json.loads(bytes(row[: int(size)].numpy())) for row, size in zip(rows, sizes, strict=True)]

    @property
    def writers(self) -> dist.ProcessGroup | None:
        """A group of all ranks for the background thread, so that its messages never meet those of the
        steps."""
        if self._writers is None and self.distributed:
            self._writers = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout_s))
        return self._writers

    def barrier(self, what: str) -> None:
        """Wait until every rank is here; `what` is what the meeting is called in an error.

        Raises:
            RankError: Names the ranks that did not come within the timeout.
        """
        if self._store is None:
            return
        self._meetings += 1
        key = f"meeting/{self._meetings}"
        self._store.set(f"{key}/{self.rank}", "here")
        deadline = time.monotonic() + self.timeout_s
        absent, gone = list(range(self.world)), ""
        while absent:
            try:
                absent = [rank for rank in absent if not self._store.check([f"{key}/{rank}"])]
            except RuntimeError:
                gone = f"; the rendezvous on rank 0 ({self.hosts[0]}) is gone too"
            if gone or (absent and time.monotonic() > deadline):
                raise RankError(
                    f"{what}: {self._names(absent)} did not come within {self.timeout_s:.0f} s; "
                    f"{self.world - len(absent)} of {self.world} ranks are here{gone}",
                    mend=_MEND,
                )
            time.sleep(0.02 if absent else 0.0)

    def missing(self, step: int, error: RuntimeError) -> RankError:
        """What a failed collective means: which ranks did not reach this step."""
        assert self._store is not None
        try:
            reached = {
                rank: int(self._store.get(f"step/{rank}"))
                for rank in range(self.world)
                if self._store.check([f"step/{rank}"])
            }
            behind = [rank for rank in range(self.world) if reached.get(rank, -1) < step]
            who = f"{self._names(behind)} did not reach it" if behind else "a rank left in the middle of it"
        except RuntimeError:
            who = f"rank 0 ({self.hosts[0]}) is gone, and the rendezvous with it"
        return RankError(f"step {step}: {who}", mend=f"{_MEND} (torch: {str(error).splitlines()[0]})")

    def _names(self, ranks: Sequence[int]) -> str:
        return ", ".join(f"rank {rank} ({self.hosts[rank]})" for rank in ranks)

    def close(self) -> None:
        """Leave the process groups."""
        if self._store is not None:
            if self.leads and self.world < self.started:
                with contextlib.suppress(RuntimeError):
                    self._store.set("ended", "")
            dist.destroy_process_group()
            self._store = None


def _rendezvous(rank: int, world: int, timeout: timedelta) -> dist.Store:
    """Where the ranks leave their addresses.

    torchrun keeps one store through its restarts, and a fast rank would find there where a slow one was
    before. On one node the count of restarts tells them apart; over several it is not the same everywhere,
    and ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` makes torchrun open a new store each time
    (docs/clusters-jobs.md).
    """
    store, _, _ = next(dist.rendezvous("env://", rank, world, timeout=timeout))
    store.set_timeout(timeout)
    alone = os.environ.get("GROUP_WORLD_SIZE") == "1"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if alone else "0"
    return dist.PrefixStore(f"attempt-{attempt}", store)


def _device(choice: str, local_rank: int) -> torch.device:
    if choice == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank)
    if choice == "cuda":
        raise UsageError(
            "parallel.device = cuda, but torch sees no CUDA device", mend="--set parallel.device=cpu"
        )
    return torch.device("cpu")
