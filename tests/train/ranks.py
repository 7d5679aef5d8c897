"""Runs with several ranks, each a real process, without torchrun's start-up: a fork server that has imported
torch."""

from __future__ import annotations

import multiprocessing
import os
import socket
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from queue import Empty
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["train.loop", "torch.distributed.checkpoint", "torch.distributed.fsdp", "datasync"]
)

TREE: dict[str, Any] = {
    "run": {"steps": 8, "threads": 1, "timeout_s": 60.0},
    "data": {"batch_size": 16},
    "model": {"size": "0.2m", "context": 64, "image": {"size": 16, "patch": 8}},
    "checkpoint": {"every": 3, "asynchronous": False},
    "optim": {"warmup": 2},
}


@dataclass
class Group:
    """The processes of one attempt."""

    processes: list[ForkServerProcess]
    results: Any
    outcomes: dict[int, dict[str, Any]] = field(default_factory=dict)

    def wait(self, seconds: float = 120.0) -> dict[int, dict[str, Any]]:
        """The outcome of each rank that lived to tell: its summary, or its error."""
        for process in self.processes:
            process.join(seconds)
        hanging = [i for i, process in enumerate(self.processes) if process.is_alive()]
        self.kill()
        assert not hanging, f"ranks {hanging} did not end"
        while True:
            try:
                rank, outcome = self.results.get(timeout=0.2)
            except Empty:
                return self.outcomes
            self.outcomes[rank] = outcome

    def kill(self) -> None:
        """SIGKILL whoever still lives."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()


def start(world: int, *sets: str, **environment: str) -> Group:
    """Start `world` ranks of the small run, changed by `sets`."""
    at = port()
    results = CONTEXT.Queue()
    processes = []
    for rank in range(world):
        variables = {
            "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(at), **environment,
        }  # fmt: skip
        process = CONTEXT.Process(target=_rank, args=(rank, variables, sets, results))
        process.start()
        processes.append(process)
    return Group(processes, results)


def port() -> int:
    """A free port on loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def run(world: int, *sets: str) -> dict[str, Any]:
    """Run to the end and return the first rank's summary; every rank must have the same."""
    outcomes = start(world, *sets).wait()
    errors = {rank: outcome["error"] for rank, outcome in outcomes.items() if "error" in outcome}
    assert not errors, errors
    assert sorted(outcomes) == list(range(world))
    assert len({outcome["digest"] for outcome in outcomes.values()}) == 1
    return outcomes[0]


def _rank(rank: int, variables: dict[str, str], sets: tuple[str, ...], results: Any) -> None:
    os.environ.update(variables)
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    from shards.errors import DatasyncError
    from train.config import Config
    from train.loop import run as train

    fault(sets)
    accept = [text.removeprefix("accept.") for text in sets if text.startswith("accept.")]
    config, _ = Config.from_tree(
        TREE, [text for text in sets if not text.startswith(("fault.", "accept."))], where="test"
    )
    try:
        results.put((rank, train(config, accept=accept)))
    except DatasyncError as error:
        results.put((rank, {"error": str(error), "kind": type(error).__name__, "code": error.exit_code}))
    results.close()
    results.join_thread()


def fault(sets: tuple[str, ...]) -> None:
    """``fault.kill=RANK:STEP``, ``fault.hang=…``, ``fault.signal=RANK:STEP:NAME``; ``fault.nan=BATCH``."""
    import signal
    import time

    from train.data import Feed, Share
    from train.distributed import Team

    vote, draw = Team.vote, Feed.next

    def faulty(self: Team, step: int, numbers: Any) -> Any:
        for text in sets:
            kind, _, rest = text.removeprefix("fault.").partition("=")
            rank, _, at = rest.partition(":")
            at, _, name = at.partition(":")
            if kind not in ("kill", "hang", "signal") or (self.rank, step) != (int(rank), int(at)):
                continue
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "hang":
                time.sleep(3600)
            if kind == "signal":
                os.kill(os.getpid(), getattr(signal, name))
        return vote(self, step, numbers)

    def poisoned(self: Feed, **options: Any) -> Share:
        share = draw(self, **options)
        if f"fault.nan={share.number}" in sets:
            for batch in share.batches:
                batch.media["image"][0].fill_(float("nan"))
        return share

    Team.vote, Feed.next = faulty, poisoned  # type: ignore[method-assign]


def records(folder: Path) -> list[dict[str, Any]]:
    """The steps of a run that count."""
    from train.metrics import steps_of

    return steps_of(folder / "metrics.jsonl")
