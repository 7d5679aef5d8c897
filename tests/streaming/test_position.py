"""A rank and its workers agree on epochs, whatever dies; worlds and sizes are read as people write them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal

import pytest

from datasync.errors import UsageError
from datasync.streaming.position import Generation, Position
from datasync.streaming.sizes import parse_bytes, parse_count
from datasync.streaming.world import World
from tests.streaming.order_helpers import as_rank


def test_workers_of_a_generation_join_one_epoch_in_any_order():
    position = Position()
    first = [position.begin(Generation(7, 1, worker)) for worker in (2, 0, 1)]
    second = [position.begin(Generation(8, 1, worker)) for worker in (1, 0, 2)]
    assert first == [(0, 0)] * 3
    assert second == [(1, 0)] * 3
    assert position.begin(None) == (2, 0)


def test_late_workers_join_their_own_generation_not_the_newest():
    position = Position()
    assert position.begin(Generation(7, 1, 0)) == (0, 0)
    assert position.begin(Generation(8, 1, 0)) == (1, 0)
    assert position.begin(Generation(7, 1, 1)) == (0, 0)
    assert position.begin(Generation(8, 1, 1)) == (1, 0)


def test_the_same_seed_again_is_a_new_generation():
    position = Position()
    for epoch in range(3):
        assert [position.begin(Generation(7, 1, worker)) for worker in (0, 1)] == [(epoch, 0)] * 2


def test_a_position_is_sought_once_and_not_carried_into_the_next_epoch():
    position = Position()
    position.seek(4, 96, lanes=8, nodes=2)
    assert position.current() == (4, 96, False)
    assert position.begin(None) == (4, 96)
    assert position.current() == (4, 96, True)
    assert position.begin(None) == (5, 0)
    assert position.lanes == 8
    position.seek(1, 10, lanes=8, nodes=2)  # back is as good as ahead
    assert position.begin(None) == (1, 10)


def test_a_process_that_dies_holding_the_lock_stops_nobody():
    position = Position()

    def die() -> None:
        with position._locked():
            os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=die)
    process.start()
    process.join(20)
    assert process.exitcode == -signal.SIGKILL
    assert position.begin(None) == (0, 0)


def test_many_forked_workers_claim_at_once():
    position = Position()
    fork = multiprocessing.get_context("fork")
    queue = fork.SimpleQueue()
    for generation in range(4):
        processes = [
            fork.Process(
                target=lambda w, g=generation: queue.put(position.begin(Generation(g, 1, w))), args=(w,)
            )
            for w in range(8)
        ]
        for process in processes:
            process.start()
        got = [queue.get() for _ in processes]
        for process in processes:
            process.join()
        assert got == [(generation, 0)] * 8


def test_a_copy_by_pickle_is_on_its_own():
    position = Position()
    position.seek(3, 5, lanes=1, nodes=1)
    twin = pickle.loads(pickle.dumps(position))
    assert twin.begin(None) == (3, 5)
    assert position.current() == (3, 5, False)


def test_worlds_are_read_from_the_launchers_variables(monkeypatch):
    as_rank(monkeypatch, 5, 8, per_node=4)
    world = World.detect()
    assert (world.rank, world.ranks, world.nodes, world.node, world.local_rank) == (5, 8, 2, 1, 1)
    halved = world.replicate(2)
    assert (halved.rank, halved.ranks, halved.ranks_per_node) == (2, 4, 4)
    monkeypatch.setenv("RANK", "8")
    with pytest.raises(UsageError, match="RANK 8"):
        World.detect()
    monkeypatch.setenv("RANK", "x")
    with pytest.raises(UsageError, match="not a number"):
        World.detect()


@pytest.mark.parametrize(
    ("text", "value"),
    [(7, 7), ("100b", 100), ("64kb", 65536), ("1.5MB", 3 << 19), (" 2gb ", 2 << 30), ("12", 12)],
)
def test_bytes_are_read_as_people_write_them(text, value):
    assert parse_bytes(text, name="x") == value


@pytest.mark.parametrize(
    ("text", "value"), [("100k", 100_000), ("1.5M", 1_500_000), ("2b", 2 * 10**9), ("7", 7)]
)
def test_counts_are_read_as_people_write_them(text, value):
    assert parse_count(text, name="x") == value


@pytest.mark.parametrize("text", ["", "k", "1.5", "12q", "-", None, True, "1e400b"])
def test_what_is_no_number_is_refused(text):
    with pytest.raises(UsageError, match="x"):
        parse_count(text, name="x")


def test_a_loop_that_counts_epochs_is_obeyed_and_a_loaded_position_stands():
    position = Position()
    position.name_epoch(0)
    assert position.begin(None) == (0, 0)
    position.name_epoch(3)
    assert position.begin(None) == (3, 0)
    position.name_epoch(4)
    assert position.begin(None) == (4, 0)
    position.seek(7, 40, lanes=8, nodes=1)
    position.name_epoch(0)  # a new process counts from 0 again
    assert position.begin(None) == (7, 40)
    position.name_epoch(1)
    assert position.begin(None) == (8, 0)
