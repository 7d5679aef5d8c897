"""Global batches: the same for every world, cut so that ranks keep their shards; tails; batching methods."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datasync.errors import UsageError
from datasync.streaming.epoch import EpochOrder, EpochSettings, check_ranks
from datasync.streaming.order import OrderSettings


def epoch_of(sizes, *, batch=24, lanes=8, choose=None, method="random", device=4, tail="pad", epoch=0):
    sizes = [np.array(s) for s in sizes]
    order = OrderSettings(seed=5, shuffle=True, lanes=lanes)
    made = EpochSettings(
        sizes=sizes,
        phases=[choose or [int(s.sum()) for s in sizes]],
        order=order,
        method=method,
        global_batch=batch,
        device_batch=device,
        tail=tail,
    )
    return EpochOrder(made, epoch)


def batches(epoch, ranks, start=0):
    """For each step the list of ranks' numbers."""
    starts = start + np.arange(epoch.full_steps(start)) * epoch.settings.global_batch
    full = [epoch.pieces(starts, rank=r, ranks=ranks) for r in range(ranks)]
    return [[piece[t].tolist() for piece in full] for t in range(len(starts))]


@pytest.mark.parametrize("method", ["random", "stratified", "per_stream"])
@pytest.mark.parametrize("lanes", [8, 10])
def test_global_batches_are_the_same_for_every_number_of_ranks(method, lanes):
    epoch = epoch_of([[90] * 4, [50] * 3, [77]], method=method, lanes=lanes)
    one = [step[0] for step in batches(epoch, 1)]
    for ranks in (2, 3, 4, 6, 8, 12, 24):
        many = [[n for piece in step for n in piece] for step in batches(epoch, ranks)]
        assert many == one


def test_device_batches_are_the_same_sequence_for_every_number_of_ranks():
    for ranks in (1, 2, 3, 6):
        epoch = epoch_of([[90] * 4, [50] * 3], method="device_per_stream", batch=4 * ranks, device=4)
        device = [piece for step in batches(epoch, ranks) for piece in step]
        assert [piece[0] for piece in device] == list(range(0, 4 * len(device), 4))
        for piece in device:
            stream, _, _ = epoch.locate(np.array(piece))
            assert len(set(stream.tolist())) == 1


@settings(max_examples=40, deadline=None)
@given(
    samples=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    batch=st.integers(1, 40),
    lanes=st.sampled_from([1, 3, 8]),
    data=st.data(),
)
def test_batches_and_tail_hold_every_number_once(samples, batch, lanes, data):
    epoch = epoch_of([[n] for n in samples], batch=batch, lanes=lanes, tail="uneven")
    start = data.draw(st.integers(0, epoch.samples))
    ranks = data.draw(st.integers(1, batch))
    rest = (epoch.samples - start) % batch
    if 0 < rest < ranks:
        with pytest.raises(UsageError, match="tail='mask'"):
            epoch.check_tail(start, ranks=ranks)
        return
    epoch.check_tail(start, ranks=ranks)
    steps = batches(epoch, ranks, start)
    numbers = [n for step in steps for piece in step for n in piece]
    sizes = []
    for rank in range(ranks):
        tail, real = epoch.tail(start, rank=rank, ranks=ranks)
        assert real.all()
        numbers += tail.tolist()
        sizes.append(len(tail))
    assert sorted(numbers) == list(range(start, epoch.samples))
    # No rank is a step short, in the tail either.
    assert (min(sizes) > 0) == (max(sizes) > 0)
    assert len(steps) + (max(sizes) > 0) == epoch.steps(start)


@pytest.mark.parametrize("tail", ["pad", "mask"])
@pytest.mark.parametrize("method", ["random", "device_per_stream"])
def test_padded_tails_are_equal_and_mark_repeats(tail, method):
    epoch = epoch_of([[50], [51]], batch=24, tail=tail, method=method, device=4)
    rest = epoch.samples % 24
    tails = [epoch.tail(0, rank=r, ranks=6) for r in range(6)]
    assert len({len(numbers) for numbers, _ in tails}) == 1
    real = [n for numbers, mask in tails for n in numbers[mask].tolist()]
    assert sorted(real) == list(range(epoch.samples - rest, epoch.samples))


def test_a_dropped_tail_is_no_step():
    epoch = epoch_of([[100]], batch=24, tail="drop")
    assert epoch.steps(0) == 4
    assert len(epoch.tail(0, rank=0, ranks=2)[0]) == 0


def test_a_rank_keeps_its_shards():
    """With one stream, ranks on two nodes share no shard but those that a span's edge cuts."""
    epoch = epoch_of([[40] * 100], batch=64, lanes=64)
    seen = []
    for node in range(2):
        shards = set()
        for rank in range(node * 4, node * 4 + 4):
            starts = np.arange(epoch.full_steps(0)) * 64
            shards |= set(epoch.locate(epoch.pieces(starts, rank=rank, ranks=8).ravel())[1].tolist())
        seen.append(shards)
    assert len(seen[0] & seen[1]) <= 1


def test_with_a_mixture_nodes_still_keep_most_of_their_shards():
    epoch = epoch_of([[40] * 100, [40] * 60, [40] * 40], batch=256, lanes=64)
    starts = np.arange(epoch.full_steps(0)) * 256
    seen = []
    for node in range(4):
        shards = set()
        for rank in range(node * 4, node * 4 + 4):
            numbers = epoch.pieces(starts, rank=rank, ranks=16).ravel()
            stream, shard, _ = epoch.locate(numbers)
            shards |= set(zip(stream.tolist(), shard.tolist(), strict=True))
        seen.append(shards)
    assert sum(map(len, seen)) < 1.4 * 200


def test_the_plan_of_a_rank_names_what_its_batches_need():
    for method in ("random", "stratified", "per_stream", "device_per_stream"):
        epoch = epoch_of([[40] * 30, [40] * 20], batch=32, lanes=8, method=method, device=8)
        for rank in range(4):
            starts = np.arange(3, 7) * 32
            numbers = epoch.pieces(starts, rank=rank, ranks=4).ravel()
            stream, shard, _ = epoch.locate(numbers)
            need = set(zip(stream.tolist(), shard.tolist(), strict=True))
            assert need <= set(epoch.ahead(96, 224, rank=rank, ranks=4)), method


def test_stratified_batches_have_one_composition():
    epoch = epoch_of([[900], [500], [100]], batch=24, method="stratified")
    for step in batches(epoch, 1):
        stream, _, _ = epoch.locate(np.array(step[0]))
        assert np.bincount(stream, minlength=3).tolist() == [14, 8, 2]


def test_per_stream_batches_have_one_stream_and_are_mixed():
    epoch = epoch_of([[240], [480]], batch=24, method="per_stream")
    origin = []
    for step in batches(epoch, 1):
        stream, _, _ = epoch.locate(np.array(step[0]))
        assert len(set(stream.tolist())) == 1
        origin.append(int(stream[0]))
    assert np.bincount(origin).tolist() == [10, 20]
    assert max(len(run) for run in "".join(map(str, origin)).split("0")) <= 3


@pytest.mark.parametrize("method", ["stratified", "per_stream", "device_per_stream"])
def test_a_stream_that_would_never_appear_is_refused(method):
    with pytest.raises(UsageError, match="leave it out"):
        epoch_of([[1000], [3]], batch=24, method=method)


def test_ranks_that_do_not_divide_the_batch_are_refused_with_those_that_do():
    with pytest.raises(UsageError, match="4 or 6 ranks"):
        check_ranks(24, 5, uneven=False)
    check_ranks(24, 5, uneven=True)
    check_ranks(24, 6, uneven=False)
    with pytest.raises(UsageError, match="fewer ranks"):
        check_ranks(4, 5, uneven=True)


def test_uneven_pieces_differ_by_one():
    epoch = epoch_of([[100] * 4], batch=24)
    for step in batches(epoch, 5):
        assert sorted(map(len, step)) == [4, 5, 5, 5, 5]


def test_an_epoch_of_ten_billion_samples_costs_memory_by_shards_not_by_samples():
    settings = EpochSettings(
        sizes=[np.full(10_000, 1_000_000)],
        phases=[[10**10]],
        order=OrderSettings(seed=1, shuffle=True, lanes=64),
        global_batch=1024,
        device_batch=128,
    )
    tracemalloc.start()
    try:
        order = EpochOrder(settings, 3)
        numbers = order.pieces(np.array([5 * 10**9 // 1024 * 1024]), rank=3, ranks=8)
        order.locate(numbers.ravel())
        order.ahead(5 * 10**9, 5 * 10**9 + 10**6, rank=3, ranks=8)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20
