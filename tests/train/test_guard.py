"""Bad steps: noticed, decided, remembered."""

from __future__ import annotations

import math

import pytest

from train.config import GuardConfig
from train.guard import BadStepError, Guard


def test_what_is_not_a_number_is_bad() -> None:
    guard = Guard(GuardConfig())
    assert guard.judge(1.0, 1.0) is None
    assert [guard.judge(*x) for x in ((math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan))] == ["nan"] * 3


def test_a_jump_above_the_recent_spread_is_a_spike_and_does_not_join_it() -> None:
    guard = Guard(GuardConfig(spike=5.0, window=20))
    for i in range(20):
        assert guard.judge(2.0 + 0.01 * (i % 5), 1.0) is None
    assert guard.judge(3.0, 1.0) == "spike"
    assert max(guard.recent) < 2.1
    assert guard.judge(2.02, 1.0) is None


def test_spikes_need_some_history_and_are_off_by_default() -> None:
    assert Guard(GuardConfig(spike=3.0, window=50)).judge(100.0, 1.0) is None
    guard = Guard(GuardConfig())
    assert [guard.judge(x, 1.0) for x in (1.0,) * 60 + (1e6,)] == [None] * 61


def test_stop_names_step_and_samples() -> None:
    with pytest.raises(BadStepError, match="step 12: the loss is not a number; samples a, b"):
        Guard(GuardConfig(policy="stop")).record(
            step=12, batch=3, kind="nan", loss=math.nan, samples=["a", "b"]
        )


def test_the_limit_stops_whatever_the_policy() -> None:
    guard = Guard(GuardConfig(policy="skip", limit=2))
    for batch in (1, 2):
        guard.record(step=1, batch=batch, kind="spike", loss=9.0, samples=["a"])
    with pytest.raises(BadStepError, match=r"guard\.limit is 2"):
        guard.record(step=1, batch=3, kind="spike", loss=9.0, samples=["a"])


def test_only_rewind_leaves_batches_out_of_the_stream() -> None:
    for policy, left_out in (("skip", set()), ("rewind", {7})):
        guard = Guard(GuardConfig(policy=policy))
        guard.record(step=5, batch=7, kind="nan", loss=math.nan, samples=["a"])
        assert guard.skipped == left_out


def test_decisions_made_after_the_checkpoint_win() -> None:
    guard = Guard(GuardConfig(policy="rewind"))
    guard.judge(1.5, 1.0)
    state = guard.state()
    guard.record(step=5, batch=7, kind="nan", loss=math.nan, samples=["a"])
    again = Guard(GuardConfig(policy="rewind"))
    again.load(state, guard.events)
    assert again.skipped == {7}
    assert list(again.recent) == [1.5]


def test_a_batch_that_a_restart_meets_again_counts_once() -> None:
    guard = Guard(GuardConfig(policy="skip", limit=2))
    for batch in (7, 8, 7, 8):
        guard.record(step=batch + 1, batch=batch, kind="nan", loss=math.nan, samples=["a"])
    assert [event["batch"] for event in guard.events] == [7, 8]
