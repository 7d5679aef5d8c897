"""Permutations: a bijection for every size, different for every key, as even as a random shuffle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datasync.streaming.permute import hash_key, permute, spread_keys


def is_bijection(size: int, key: int) -> bool:
    image = permute(np.arange(size), size, key)
    return bool((np.bincount(image, minlength=size) == 1).all()) and len(image) == size


def test_every_size_below_5000_is_a_bijection():
    for first in range(1, 5000, 20):
        sizes = np.arange(first, min(first + 20, 5000))
        size_of = np.repeat(sizes, sizes)
        starts = np.cumsum(sizes) - sizes
        index = np.arange(sizes.sum()) - np.repeat(starts, sizes)
        image = permute(index, size_of, np.uint64(first)) + np.repeat(starts, sizes)
        assert (np.bincount(image, minlength=len(index)) == 1).all(), f"sizes from {first}"


@pytest.mark.parametrize("power", [12, 13, 14, 15, 16, 17, 18])
def test_sizes_beside_a_power_of_two_are_bijections(power):
    for size in ((1 << power) - 1, 1 << power, (1 << power) + 1):
        assert is_bijection(size, hash_key(power))


@pytest.mark.slow
@pytest.mark.parametrize("power", range(1, 22))
def test_many_sizes_around_every_power_of_two_are_bijections(power):
    for size in range(max(1, (1 << power) - 9), (1 << power) + 10):
        for seed in range(3):
            assert is_bijection(size, hash_key(seed, size))


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 1 << 62), key=st.integers(0, 2**64 - 1), data=st.data())
def test_images_of_huge_sizes_stay_inside_and_apart(size, key, data):
    index = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=40, unique=True))
    image = permute(np.array(index), size, np.uint64(key))
    assert ((image >= 0) & (image < size)).all()
    assert len(set(image.tolist())) == len(index)


def test_one_call_serves_many_sizes_and_keys():
    sizes = np.array([1, 2, 7, 4096, 4097, 10**12])
    keys = spread_keys(3, np.arange(6))
    index = sizes - 1
    together = permute(index, sizes, keys)
    alone = [permute(int(i), int(s), k).item() for i, s, k in zip(index, sizes, keys, strict=True)]
    assert together.tolist() == alone


def test_the_permutation_is_the_same_for_ever():
    """A change here would reorder every run that is under way."""
    assert permute(np.arange(10), 10, 1).tolist() == GOLDEN_10
    assert permute([0, 1, 10**9], 10**10, hash_key(9176, 0, "x")).tolist() == GOLDEN_LARGE
    assert hash_key(9176, 0, "x") == GOLDEN_KEY


@pytest.mark.parametrize("size", [2, 3, 5, 8, 31])
def test_every_place_is_as_likely_as_any_other(size):
    """Chi-square of the place of each item over many keys, at 6 standard deviations."""
    keys = spread_keys(11, np.arange(20_000))
    freedom = size - 1
    for item in range(size):
        places = np.bincount(permute(np.full(len(keys), item), size, keys), minlength=size)
        expected = len(keys) / size
        chi = float(((places - expected) ** 2 / expected).sum())
        assert chi < freedom + 6 * (2 * freedom) ** 0.5 + 6, (item, places)


def test_neighbours_are_torn_apart():
    image = permute(np.arange(100_000), 100_000, 5)
    kept = np.corrcoef(np.arange(100_000), image)[0, 1]
    together = (np.abs(np.diff(image)) == 1).mean()
    assert abs(kept) < 0.02
    assert together < 0.001


@pytest.mark.parametrize(("index", "size"), [([-1], 5), ([5], 5), ([0], 0), ([0], (1 << 62) + 1)])
def test_an_index_outside_is_refused(index, size):
    with pytest.raises(IndexError):
        permute(index, size, 0)


def test_keys_tell_numbers_from_names_and_parts_from_each_other():
    keys = {
        hash_key(1, 2),
        hash_key(12),
        hash_key("1", 2),
        hash_key("12"),
        hash_key(2, 1),
        hash_key(1, 2, ""),
    }
    assert len(keys) == 6


GOLDEN_10 = [8, 7, 2, 9, 3, 5, 4, 6, 1, 0]
GOLDEN_LARGE = [7412738726, 7237766473, 3338929775]
GOLDEN_KEY = 8007659975946116368
