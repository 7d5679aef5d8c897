"""The team: votes, gatherings, and a barrier that names who is missing."""

from __future__ import annotations

import os
import time
from typing import Any

from tests.train.ranks import CONTEXT, port


def _member(rank: int, world: int, at: int, late: bool, results: Any) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(at),
    )  # fmt: skip
    from train.config import ParallelConfig
    from train.distributed import RankError, Team

    team = Team(ParallelConfig(device="cpu"), timeout_s=3.0)
    seen: list[Any] = [team.vote(0, [rank + 1, 10]), team.gather([float(rank)]).flatten().tolist()]
    seen.append(team.gather_objects({"rank": rank, "name": "é" * rank}))
    team.barrier("the first meeting")
    if not (late and rank == 1):
        try:
            team.barrier("the second meeting")
        except RankError as error:
            seen.append(error.message)
    results.put((rank, seen))
    results.close()
    results.join_thread()
    if rank == 0:
        time.sleep(2.0)  # the rendezvous lives here; the others still read it
    os._exit(0)  # without goodbye: whoever waits, waits


def members(world: int, late: bool) -> dict[int, list[Any]]:
    results, at = CONTEXT.Queue(), port()
    processes = [
        CONTEXT.Process(target=_member, args=(rank, world, at, late, results)) for rank in range(world)
    ]
    for process in processes:
        process.start()
    out = dict(results.get(timeout=60) for _ in range(world))
    for process in processes:
        process.join(20)
        process.kill()
    return out


def test_all_ranks_see_the_same_sums_and_values() -> None:
    for seen in members(3, late=False).values():
        assert seen[0] == [6, 30]
        assert seen[1] == [0.0, 1.0, 2.0]
        assert [entry["rank"] for entry in seen[2]] == [0, 1, 2]
        assert seen[2][2]["name"] == "éé"
        assert len(seen) == 3


def test_the_barrier_names_the_missing_rank() -> None:
    seen = members(3, late=True)
    assert len(seen[1]) == 3
    for rank in (0, 2):
        assert "the second meeting: rank 1 (" in seen[rank][3]
        assert "did not come within 3 s; 2 of 3 ranks are here" in seen[rank][3]
