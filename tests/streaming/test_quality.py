"""The shuffle mixes as well as the shards it holds allow, and the measures can tell a bad one."""

from __future__ import annotations

import numpy as np
import pytest

from datasync.streaming.order import OrderSettings, StreamOrder
from datasync.streaming.quality import measure, shards_held

SIZES = np.full(256, 60)
TOTAL = int(SIZES.sum())


def epoch_of(lanes: int, epoch: int) -> np.ndarray:
    order = StreamOrder(
        SIZES, TOTAL, stream=0, epoch=epoch, settings=OrderSettings(seed=3, shuffle=True, lanes=lanes)
    )
    shard, row = order.locate(np.arange(TOTAL))
    return shard * 60 + row


@pytest.mark.parametrize("lanes", [1, 8, 32, 64])
def test_batches_are_drawn_evenly_from_the_shards_that_are_held(lanes):
    quality = measure([epoch_of(lanes, 0), epoch_of(lanes, 1)], SIZES, 128)
    assert quality.held <= 64 + lanes
    # Random batches out of 64 of 256 shards have 4 times as many pairs of a shard as random ones out of all.
    assert quality.same_shard < 4.2
    assert quality.neighbours < 4.2
    assert quality.again < 1.5


def test_a_random_permutation_measures_one():
    epochs = [np.random.default_rng(seed).permutation(TOTAL) for seed in (0, 1)]
    quality = measure(epochs, SIZES, 128)
    assert quality.same_shard == pytest.approx(1, abs=0.05)
    assert quality.neighbours == pytest.approx(1, abs=0.05)
    assert quality.again == pytest.approx(1, abs=0.05)
    assert quality.held == 256


def test_no_shuffle_is_seen_as_none():
    stored = np.arange(TOTAL)
    quality = measure([stored, stored], SIZES, 128)
    assert quality.held == 1
    assert quality.same_shard > 80
    assert quality.again > 100


def test_shards_held_counts_from_first_to_last_use():
    assert shards_held(np.array([0, 1, 0, 2, 2]), 4) == 2
    assert shards_held(np.array([0, 1, 2, 0]), 3) == 2
