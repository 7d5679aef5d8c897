"""The feed: what it draws ahead, where it stands, and what validation keeps from it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from shards.errors import UsageError
from shards.index import Index
from train.config import Config
from train.data import Feed, fixed_samples, open_dataset, open_fixed, side
from train.distributed import Team
from train.documents import Encoder

TREE = {"run": {"dir": "r", "steps": 10}, "data": {"batch_size": 16}, "model": {"image": {"size": 16}}}


def make(shapes: Path, folder: Path, *sets: str) -> Config:
    return Config.from_tree(TREE, [f"data.remote={shapes}", f"run.dir={folder}", *sets], where="test")[0]


def feed_of(config: Config) -> Feed:
    return Feed(config, Team(config.parallel), Encoder(config), 1)


def test_what_is_drawn_ahead_is_not_consumed(shapes: Path, tmp_path: Path) -> None:
    feed = feed_of(make(shapes, tmp_path))
    feed.next()
    assert feed._ahead is not None
    state, second = feed.state(), feed.next()
    third = feed.next(more=False)
    assert feed._ahead is None
    feed.load(state)
    assert [feed.next().ids, feed.next().ids] == [second.ids, third.ids]
    assert state["number"] == 1


def test_the_next_batch_is_ready_when_a_step_took_long_enough(shapes: Path, tmp_path: Path) -> None:
    feed = feed_of(make(shapes, tmp_path))
    feed.next()
    time.sleep(0.5)
    assert feed.next().wait_s < 0.05


def test_an_error_ahead_comes_when_its_batch_is_asked_for(shapes: Path, tmp_path: Path) -> None:
    feed = feed_of(make(shapes, tmp_path))
    feed.next()
    draw = feed._draw
    feed.next()

    def broken() -> object:
        draw()
        raise OSError("the disk is gone")

    feed._draw = broken  # type: ignore[method-assign,assignment]
    feed.next()
    with pytest.raises(OSError, match="the disk is gone"):
        feed.next()


@pytest.mark.parametrize("workers", [0, 1])
def test_no_random_number_of_the_model_goes_to_the_loader(shapes: Path, tmp_path: Path, workers: int) -> None:
    feed = feed_of(make(shapes, tmp_path, f"data.workers={workers}"))
    before = torch.get_rng_state()
    for _ in range(17):  # into the second epoch
        feed.next()
    feed.close()
    assert torch.equal(torch.get_rng_state(), before)


def test_what_is_held_out_is_never_drawn_and_all_that_validates(shapes: Path, tmp_path: Path) -> None:
    config = make(shapes, tmp_path, "eval.holdout=0.2", "data.batch_size=1")
    dataset, fixed = open_dataset(config), open_fixed(config)
    drawn = [bytes(sample["image"]) for sample in dataset]
    held = [bytes(fixed[i]["image"]) for i in range(fixed.size)]
    assert dataset.size + fixed.size == 240
    assert len(drawn) == dataset.size
    assert not set(drawn) & set(held)
    assert 0 < fixed.size < 120


def test_a_shard_stays_on_its_side_when_the_dataset_grows(shapes: Path) -> None:
    whole = Index.parse((shapes / "index.json").read_bytes(), where="test")
    part = Index(list(whole.shards)[:-3])
    names = [
        {info.stored.basename for info in side(index, 0.3, held=True, name="x").shards}
        for index in (part, whole)
    ]
    assert names[0] <= names[1]
    for share in (0.3, 1e-9):
        held, kept = (side(whole, share, held=held, name="x") for held in (True, False))
        assert held.samples + kept.samples == whole.samples
        assert held.samples > 0
    with pytest.raises(UsageError, match="leaves nothing of x to train on: it has 1 shard"):
        side(Index(list(whole.shards)[:1]), 0.1, held=False, name="x")


def test_fixed_samples_are_spread_over_the_set(shapes: Path, tmp_path: Path) -> None:
    fixed = open_fixed(make(shapes, tmp_path))
    assert fixed_samples(fixed, 0) == list(range(240))
    assert fixed_samples(fixed, 1000) == list(range(240))
    assert fixed_samples(fixed, 4) == [0, 60, 120, 180]
