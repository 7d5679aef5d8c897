"""Mixtures: exact over the epoch, exact in every window, computed from the number alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datasync.errors import UsageError
from datasync.streaming.mixture import Mixture, apportion, scaled_floor

counts = st.lists(st.integers(0, 400), min_size=1, max_size=9).filter(sum)


@settings(max_examples=60, deadline=None)
@given(counts=counts)
def test_every_stream_gives_each_of_its_items_once_and_in_order(counts):
    stream, item = Mixture([counts]).locate(np.arange(sum(counts)))
    for i, count in enumerate(counts):
        assert item[stream == i].tolist() == list(range(count))


@settings(max_examples=60, deadline=None)
@given(counts=counts)
def test_every_window_holds_the_exact_share_of_each_stream(counts):
    total = sum(counts)
    stream, _ = Mixture([counts]).locate(np.arange(total))
    levels = int(np.ceil(np.log2(max(len(counts), 2)))) + len(counts) // 2
    for i, count in enumerate(counts):
        ahead = np.cumsum(stream == i) - np.arange(1, total + 1) * (count / total)
        # The most and the least ahead bound every window between two places.
        assert ahead.max() - ahead.min() <= 1 + levels


def test_windows_of_even_mixtures_are_within_two_samples():
    counts = [40_000, 25_000, 20_000, 15_000]
    stream, _ = Mixture([counts]).locate(np.arange(100_000))
    for i, count in enumerate(counts):
        ahead = np.cumsum(stream == i) - np.arange(1, 100_001) * (count / 100_000)
        assert ahead.max() - ahead.min() < 2


@settings(max_examples=40, deadline=None)
@given(first=counts, data=st.data())
def test_a_phase_goes_on_where_the_one_before_stopped(first, data):
    second = data.draw(st.lists(st.integers(0, 400), min_size=len(first), max_size=len(first)))
    mixture = Mixture([first, second])
    number = np.arange(sum(first) + sum(second))
    stream, item = mixture.locate(number)
    for i in range(len(first)):
        assert item[stream == i].tolist() == list(range(first[i] + second[i]))
        assert (stream[: sum(first)] == i).sum() == first[i]
    at = data.draw(st.integers(0, len(number)))
    assert mixture.taken(at) == [int((stream[:at] == i).sum()) for i in range(len(first))]


def test_huge_epochs_are_exact_at_any_place():
    counts = [7 * 10**14 + 3, 2 * 10**14 + 1, 10**14 + 7]
    mixture = Mixture([counts])
    total = sum(counts)
    for start in (0, 10**9, total // 2, total - 1000):
        window = np.arange(start, start + 1000)
        stream, item = mixture.locate(window)
        for i, taken in enumerate(mixture.taken(start)):
            mine = item[stream == i]
            assert mine.tolist() == list(range(taken, taken + len(mine)))
    assert mixture.taken(total) == counts


@settings(max_examples=200, deadline=None)
@given(total=st.integers(1, (1 << 54) - 1), data=st.data())
def test_scaled_floor_equals_exact_arithmetic(total, data):
    number, weight = data.draw(st.integers(0, total)), data.draw(st.integers(0, total))
    offset = data.draw(st.integers(0, total - 1))
    exact = (number * weight + offset) // total
    assert scaled_floor(np.array([number]), weight, offset, total).tolist() == [exact]


@settings(max_examples=100, deadline=None)
@given(total=st.integers(0, 10**12), weights=st.lists(st.floats(0, 100), min_size=1, max_size=8))
def test_apportionment_sums_up_and_is_within_one(total, weights):
    if not sum(weights) > 1e-6:
        return
    shares = apportion(total, weights)
    assert sum(shares) == total
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - total * weight / sum(weights)) <= 1 + total * 1e-9


@pytest.mark.parametrize("phases", [[], [[]], [[0, 0]], [[1, -1]], [[1], [1, 2]], [[1 << 54]]])
def test_what_cannot_be_mixed_is_refused(phases):
    with pytest.raises(UsageError, match=r"mix|count|samples"):
        Mixture(phases)


@pytest.mark.parametrize("weights", [[], [0.0], [1.0, -0.5], [float("inf")], [float("nan")]])
def test_weights_that_are_none_are_refused(weights):
    with pytest.raises(UsageError, match="mixture"):
        apportion(10, weights)
