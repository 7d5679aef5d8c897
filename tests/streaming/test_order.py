"""The order of one stream: every sample as often as asked, computed from its number, shards held bounded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datasync.streaming.order import OrderSettings, StreamOrder, default_lanes, lane_places
from datasync.streaming.sampling import shard_parts

shard_sizes = st.lists(st.integers(0, 60), min_size=1, max_size=30).filter(sum).map(np.array)
orders = st.builds(
    OrderSettings,
    seed=st.integers(0, 2**40),
    shuffle=st.booleans(),
    lanes=st.sampled_from([1, 2, 3, 8, 60, 64]),
    block_size=st.sampled_from([None, 1, 37, 1000]),
    sampling_method=st.sampled_from(["balanced", "fixed"]),
    granularity=st.sampled_from([1, 7, 1000]),
)


def samples_of(order: StreamOrder, sizes: np.ndarray) -> np.ndarray:
    """Number of the sample in the dataset, for each item."""
    shard, row = order.locate(np.arange(order.samples))
    assert ((row >= 0) & (row < sizes[shard])).all()
    return (np.cumsum(sizes) - sizes)[shard] + row


@settings(max_examples=80, deadline=None)
@given(sizes=shard_sizes, order=orders, epoch=st.integers(0, 5), data=st.data())
def test_every_sample_is_used_as_often_as_asked(sizes, order, epoch, data):
    total = int(sizes.sum())
    choose = data.draw(st.one_of(st.just(total), st.integers(1, 3 * total)))
    made = StreamOrder(sizes, choose, stream=0, epoch=epoch, settings=order)
    uses = np.bincount(samples_of(made, sizes), minlength=total)
    assert uses.sum() == choose
    assert uses.max() - uses.min() <= 1


@settings(max_examples=60, deadline=None)
@given(sizes=shard_sizes, order=orders, data=st.data())
def test_items_do_not_depend_on_the_call_they_are_asked_in(sizes, order, data):
    made = StreamOrder(sizes, int(sizes.sum()), stream=0, epoch=1, settings=order)
    again = StreamOrder(sizes, int(sizes.sum()), stream=0, epoch=1, settings=order)
    items = np.array(data.draw(st.lists(st.integers(0, made.samples - 1), min_size=1, max_size=20)))
    together = np.stack(made.locate(items))
    for i, item in enumerate(items):
        assert np.stack(again.locate(np.array([item])))[:, 0].tolist() == together[:, i].tolist()


@settings(max_examples=60, deadline=None)
@given(sizes=shard_sizes, order=orders, data=st.data())
def test_the_plan_names_every_shard_that_is_needed(sizes, order, data):
    made = StreamOrder(sizes, int(sizes.sum()), stream=0, epoch=0, settings=order)
    start = data.draw(st.integers(0, made.samples))
    stop = data.draw(st.integers(start, made.samples))
    needed = set(made.locate(np.arange(start, stop))[0].tolist())
    plan = made.ahead(0, made.lanes - 1, start, stop)
    assert needed <= set(plan)
    assert len(plan) == len(set(plan))


def test_without_shuffling_the_order_is_the_datasets_own():
    sizes = np.array([3, 0, 5, 2])
    order = OrderSettings(seed=1, shuffle=False, lanes=1)
    made = StreamOrder(sizes, 10, stream=0, epoch=4, settings=order)
    assert samples_of(made, sizes).tolist() == list(range(10))


def test_a_part_without_shuffling_is_in_order_and_spread():
    sizes = np.array([100, 100])
    order = OrderSettings(seed=1, shuffle=False, lanes=1)
    used = samples_of(StreamOrder(sizes, 20, stream=0, epoch=0, settings=order), sizes)
    assert (np.diff(used) > 0).all()
    assert (used < 100).sum() == 10


@pytest.mark.parametrize("lanes", [1, 2, 8, 64])
def test_few_shards_are_held_at_a_time_and_as_many_for_every_number_of_lanes(lanes):
    sizes = np.full(2048, 50)
    order = OrderSettings(seed=7, shuffle=True, lanes=lanes)
    made = StreamOrder(sizes, int(sizes.sum()), stream=0, epoch=0, settings=order)
    shard, _ = made.locate(np.arange(made.samples))
    # A shard is held from its first use to its last.
    first, last = np.full(2048, made.samples), np.zeros(2048, dtype=int)
    np.minimum.at(first, shard, np.arange(made.samples))
    np.maximum.at(last, shard, np.arange(made.samples))
    held = np.cumsum(np.bincount(first, minlength=made.samples) - np.bincount(last, minlength=made.samples))
    assert np.median(held) >= 40
    assert held.max() <= 64 + 2 * lanes


def test_epochs_seeds_and_streams_have_orders_of_their_own():
    sizes = np.full(40, 25)

    def order(*, seed=1, epoch=0, stream=0):
        made = OrderSettings(seed=seed, shuffle=True, lanes=8)
        return samples_of(StreamOrder(sizes, 1000, stream=stream, epoch=epoch, settings=made), sizes)

    base = order()
    others = [order(seed=2), order(epoch=1), order(stream=1), order(seed=0, epoch=1)]
    for other in others:
        assert (base == other).mean() < 0.02


@pytest.mark.parametrize(("method", "same"), [("fixed", True), ("balanced", False)])
def test_fixed_sampling_uses_the_same_part_in_every_epoch(method, same):
    sizes = np.full(10, 100)
    order = OrderSettings(seed=3, shuffle=True, lanes=4, sampling_method=method)
    used = [
        set(samples_of(StreamOrder(sizes, 300, stream=0, epoch=e, settings=order), sizes).tolist())
        for e in range(2)
    ]
    assert (used[0] == used[1]) is same


@settings(max_examples=80, deadline=None)
@given(sizes=shard_sizes, granularity=st.integers(1, 80), key=st.integers(0, 2**64 - 1), data=st.data())
def test_a_part_takes_granules_and_sums_up(sizes, granularity, key, data):
    total = data.draw(st.integers(0, int(sizes.sum())))
    part = shard_parts(sizes, total, granularity=granularity, key=key)
    assert part.sum() == total
    assert ((part >= 0) & (part <= sizes)).all()


def test_granularity_decides_how_many_shards_a_part_touches():
    sizes = np.full(100, 1000)
    touched = [int((shard_parts(sizes, 5000, granularity=g, key=5) > 0).sum()) for g in (1, 100, 1000)]
    assert touched == [100, 50, 5]


@pytest.mark.parametrize(
    ("batch", "lanes"), [(1, 1), (32, 32), (64, 64), (96, 48), (100, 50), (97, 1), (4096, 64)]
)
def test_default_lanes_divide_the_batch(batch, lanes):
    assert default_lanes(batch) == lanes


@pytest.mark.parametrize("lanes", [1, 2, 3, 30, 64, 97])
def test_consecutive_lanes_walk_spans_that_are_spread(lanes):
    places = lane_places(lanes)
    assert sorted(places.tolist()) == list(range(lanes))
    if lanes >= 8:
        window = np.sort(places[:4])
        assert np.diff(window).min() >= lanes // 8


def test_the_order_is_the_same_for_ever():
    """A change here would reorder every run that is under way."""
    sizes = np.array([100, 250, 60, 90])
    order = OrderSettings(seed=9176, shuffle=True, lanes=4)
    made = StreamOrder(sizes, 700, stream=0, epoch=2, settings=order)
    shard, row = made.locate(np.arange(0, 700, 100))
    assert list(zip(shard.tolist(), row.tolist(), strict=True)) == GOLDEN


GOLDEN = [(3, 52), (3, 1), (0, 66), (0, 23), (0, 11), (0, 92), (0, 96)]
