"""Workers, ranks and whole jobs killed at any instant: resumed, in whatever world, nothing is lost or
repeated.

A job is a process a rank, forked from this one; every rank writes down each batch that it was given,
and rank 0 saves the state behind it, as a trainer would. A job that was hurt is started again from the
last saved state with another number of ranks and workers. At the end, each batch that any rank of any
job wrote down must be its piece of the batch of the uninterrupted run, and the jobs together must have
all of them.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import time
import warnings
from pathlib import Path

import pytest
import torch

from datasync import Stream, StreamingDataLoader, StreamingDataset
from datasync.streaming.epoch import piece_bounds
from tests.streaming.order_helpers import ids, write_dataset

BATCH = 12
SAMPLES = 420 + 260
STEPS = -(-SAMPLES // BATCH)


def build(root: Path) -> StreamingDataset:
    streams = [Stream(remote=str(root / name), local=str(root / f"cache-{name}")) for name in ("a", "b")]
    return StreamingDataset(
        streams=streams, global_batch_size=BATCH, shuffle=True, tail="uneven", download_timeout=30
    )


def keep(sample: dict) -> bool:
    return sample["id"] % 3 == 0


def rank_process(
    root: Path, job: int, rank: int, ranks: int, workers: int, epochs: int, filtered: bool
) -> None:
    """One rank of one job: read, write down, save."""
    os.setsid()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    loader = StreamingDataLoader(build(root), num_workers=workers, filter=keep if filtered else None)
    saved = root / "state.json"
    if saved.exists():
        loader.load_state_dict(json.loads(saved.read_text()))
    with open(root / f"log-{job}-{rank}", "w", buffering=1) as log:
        while loader.state_dict()["epoch"] < epochs:
            for batch in loader:
                state = loader.state_dict()
                after = [state["epoch"], state["sample_in_epoch"]]
                got = ids(batch) if batch else []
                log.write(json.dumps({"after": after, "rank": rank, "ranks": ranks, "ids": got}) + "\n")
                if rank == 0:
                    (root / "state.tmp").write_text(json.dumps(state))
                    os.replace(root / "state.tmp", saved)
                time.sleep(0.01)


def uninterrupted(root: Path, epochs: int) -> dict[tuple[int, int], list[int]]:
    """Every global batch, by the position behind it."""
    loader = StreamingDataLoader(build(root))
    batches = {}
    for _ in range(epochs):
        for batch in loader:
            state = loader.state_dict()
            batches[state["epoch"], state["sample_in_epoch"]] = ids(batch)
    return batches


def children(pid: int) -> list[int]:
    """Processes that this one has started."""
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def hurt(chance: random.Random, processes: list[multiprocessing.Process]) -> None:
    """Kill a worker, a rank or everything."""
    alive = [process for process in processes if process.is_alive()]
    if not alive:
        return
    victim = chance.choice(alive)
    workers = children(victim.pid)
    what = chance.choice(["worker", "rank", "job"])
    if what == "worker" and workers:
        _kill(chance.choice(workers))
    elif what == "job":
        for process in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    else:
        _kill(victim.pid)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def run_jobs(root: Path, *, kills: int, epochs: int, seed: int, filtered: bool = False) -> int:
    """Start and hurt jobs, then let one end; returns how many there were."""
    chance = random.Random(seed)
    fork = multiprocessing.get_context("fork")
    for job in range(kills + 1):
        ranks, workers = chance.choice([1, 2, 3, 4]), chance.choice([0, 0, 1, 2])
        arguments = [(root, job, rank, ranks, workers, epochs, filtered) for rank in range(ranks)]
        processes = [fork.Process(target=rank_process, args=each) for each in arguments]
        for process in processes:
            process.start()
        try:
            if job < kills:
                time.sleep(chance.uniform(0.0, 0.8))
                hurt(chance, processes)
                time.sleep(chance.uniform(0.0, 0.1))
            else:
                for process in processes:
                    process.join(120)
                    assert process.exitcode == 0, "the last job was not hurt and must end"
        finally:
            # A launcher ends what is left of a job that lost a process.
            for process in processes:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.join()
    return kills + 1


def check(root: Path, jobs: int, expected: dict[tuple[int, int], list[int]], *, filtered: bool) -> None:
    """Every line is its piece of the uninterrupted batch, and the saved positions leave no batch out."""
    places = list(expected)
    covered: set[tuple[int, int]] = set()
    began: set[int] = set()
    for job in range(jobs):
        for path in sorted(root.glob(f"log-{job}-*")):
            lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
            for line in lines:
                after = tuple(line["after"])
                batch = expected[after]
                low, high = piece_bounds(len(batch), line["rank"], line["ranks"])
                piece = [i for i in batch[low:high] if not filtered or keep({"id": i})]
                assert line["ids"] == piece, (job, line)
            if lines and path.name.endswith("-0"):
                positions = [places.index(tuple(line["after"])) for line in lines]
                assert positions == list(range(positions[0], positions[0] + len(positions)))
                # A job begins behind a batch that an earlier one had saved.
                assert positions[0] == 0 or places[positions[0] - 1] in covered
                began.add(positions[0])
                covered |= {tuple(line["after"]) for line in lines}
    assert covered == set(expected)
    assert len(began) > 1, "no job was resumed: the test kills too early or too late"


@pytest.fixture(scope="module")
def remotes(tmp_path_factory):
    root = tmp_path_factory.mktemp("remotes")
    write_dataset(root / "a", 420)
    write_dataset(root / "b", 260, first=1000)
    return root


def case(tmp_path: Path, remotes: Path, **options: int) -> None:
    for name in ("a", "b"):
        (tmp_path / name).symlink_to(remotes / name)
    jobs = run_jobs(tmp_path, **options)
    expected = uninterrupted(tmp_path, options["epochs"])
    check(tmp_path, jobs, expected, filtered=options.get("filtered", False))


@pytest.mark.parametrize(("seed", "filtered"), [(1, False), (2, True)])
def test_a_job_killed_a_few_times_ends_as_if_it_had_not_been(tmp_path, remotes, seed, filtered):
    case(tmp_path, remotes, kills=5, epochs=2, seed=seed, filtered=filtered)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_job_killed_two_hundred_times_ends_as_if_it_had_not_been(tmp_path, remotes):
    case(tmp_path, remotes, kills=200, epochs=25, seed=9176)
