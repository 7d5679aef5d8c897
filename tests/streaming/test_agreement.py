"""Ranks that read different versions, or in different orders, notice; and a version can be asked for."""

from __future__ import annotations

import multiprocessing
import shutil
from pathlib import Path

import pytest
import torch.distributed

from datasync import Stream, StreamingDataLoader, StreamingDataset
from datasync.errors import NotFoundError, TransientError, UsageError
from datasync.streaming.fetch import ShardSource
from shards.index import Index
from tests.streaming.cachekit import FaultyStore, down
from tests.streaming.order_helpers import write_dataset


def rank_process(rank: int, root: Path, turn, answers, early: bool, options) -> None:
    """One of two ranks that open a dataset, one after the other."""
    if early:
        torch.distributed.init_process_group("gloo", f"file://{root}/ranks", rank=rank, world_size=2)
    if rank:
        turn.wait(60)
    try:
        local = str(root / f"local{rank}")
        made = StreamingDataset(
            remote=str(root / "remote"), local=local, batch_size=4, shuffle=True, **options
        )
        if not early:
            torch.distributed.init_process_group("gloo", f"file://{root}/ranks", rank=rank, world_size=2)
        next(iter(StreamingDataLoader(made)))
        answers.put((rank, ""))
    except UsageError as error:
        answers.put((rank, str(error)))
    turn.wait(60)
    torch.distributed.destroy_process_group()


def both(root: Path, *, early: bool = True, between=lambda: None, options=({}, {})) -> dict[int, str]:
    """What each rank has to say when something happens after the first has opened the dataset."""
    write_dataset(root / "remote", 40)
    context = multiprocessing.get_context("fork")
    turn, answers = context.Event(), context.Queue()
    ranks = [
        context.Process(target=rank_process, args=(rank, root, turn, answers, early, options[rank]))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    if not early:
        turn.set()
    found = dict([answers.get(timeout=60)])
    between()
    turn.set()
    found |= dict([answers.get(timeout=60)])
    for process in ranks:
        process.join(20)
        process.kill()
    return found


@pytest.mark.parametrize("early", [True, False])
def test_ranks_that_agree_hear_nothing(tmp_path, early):
    assert both(tmp_path, early=early) == {0: "", 1: ""}


def pretending(root: Path, answers) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    made = StreamingDataset(remote=str(root / "remote"), local=str(root / "local"), batch_size=4)
    answers.put(len(list(StreamingDataLoader(made))))


def test_where_there_is_nobody_to_ask_nothing_is_asked(tmp_path):
    write_dataset(tmp_path / "remote", 40)
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    process = context.Process(target=pretending, args=(tmp_path, answers))
    process.start()
    assert answers.get(timeout=60) == 3
    process.join(20)


def test_a_rank_that_opens_a_newer_version_says_so(tmp_path):
    def publish() -> None:
        shutil.rmtree(tmp_path / "remote")
        write_dataset(tmp_path / "remote", 44)

    said = both(tmp_path, between=publish)
    assert said[0] == ""
    assert "ranks 0 and 1 do not read the same: dataset: " in said[1]
    assert "epoch_size: 40 and 44" in said[1]


def test_a_rank_with_another_seed_says_so(tmp_path):
    said = both(tmp_path, options=({}, {"shuffle_seed": 5}))
    assert "shuffle_seed: 9176 and 5" in said[1]


def test_a_version_can_be_asked_for(tmp_path):
    """The preferred replica has an older one: the other one is read."""
    old, new = tmp_path / "old", tmp_path / "new"
    for root, samples in ((old, 40), (new, 60)):
        write_dataset(root, samples)
    wanted = Index.parse((new / "index.json").read_text(), where="").fingerprint

    def build(version, local="local"):
        local = str(tmp_path / local)
        return StreamingDataset(remote=[str(old), str(new)], local=local, batch_size=4, version=version)

    assert build(None).num_samples == 40  # the first healthy replica decides
    made = build(wanted[:12])
    assert sorted(int(sample["id"]) for sample in made) == list(range(60))
    with pytest.raises(NotFoundError, match=r"new/index.json has version .*, not version 00000000") as caught:
        build("00000000")
    assert wanted[:12] in str(caught.value)
    assert StreamingDataset(local=str(new), version=wanted).num_samples == 60
    with pytest.raises(NotFoundError, match="has version"):
        StreamingDataset(local=str(old), version=wanted)
    for bad in ("1234567", "master"):
        with pytest.raises(UsageError, match="`version`"):
            build(bad)
    with pytest.raises(UsageError, match="`version`"):
        StreamingDataset(streams=[Stream(local=str(old))], version=wanted)


def test_with_the_replicas_down_only_the_version_that_was_asked_for_serves(tmp_path, monkeypatch):
    write_dataset(tmp_path / "remote", 40)
    index = Index.parse((tmp_path / "remote/index.json").read_text(), where="")
    place = {"local": tmp_path / "local", "download_retry": 0, "download_timeout": 0.1}
    store = FaultyStore(tmp_path / "remote")
    assert ShardSource(replicas=[store], version=index.fingerprint, **place).index.samples == 40
    store.fault = down
    assert ShardSource(replicas=[store], version=index.fingerprint, **place).index.samples == 40
    with pytest.raises(TransientError):
        _ = ShardSource(replicas=[store], version="0" * 64, **place).index
