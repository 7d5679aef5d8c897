"""Shards are stored while the next are made, one at a time; an error ends the task whose shard it was."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from shards.convert import convert
from shards.errors import StoreError, TransientError
from shards.sink import LocalInfo, LocalSink
from shards.storing import Behind, Storing
from tests.shards.corpus import jsonl, tree


def test_one_step_is_on_its_way_while_the_next_is_made() -> None:
    storing, done = Storing(), []
    task = Behind(storing)
    go = threading.Event()
    task.put(lambda: (go.wait(10), done.append("a")))  # does not wait for its own step
    assert done == []
    threading.Timer(0.05, go.set).start()
    task.put(lambda: done.append("b"))  # waits for the step before
    assert done[0] == "a"
    assert task.finish(lambda: len(done)).result() == 2


def test_a_failed_step_ends_its_own_task_and_no_other() -> None:
    storing = Storing()
    failing, following = Behind(storing), Behind(storing)

    def fail() -> None:
        raise StoreError("the disk is full")

    failing.put(fail)
    record = failing.finish(lambda: "record")
    following.put(time.monotonic)
    with pytest.raises(StoreError):
        record.result()
    assert following.finish(lambda: "record").result() == "record"
    again = Behind(storing)
    again.put(fail)
    with pytest.raises(StoreError):
        again.put(time.monotonic)


class Sometimes(LocalSink):
    """A folder that refuses the first shard of the fourth task once, and is slow, as a store is."""

    def write(self, key: str, data: Any, **options: Any) -> LocalInfo:
        if key.startswith("shards/"):
            time.sleep(0.02)
            refused = self.root.parent / "refused"
            if key.startswith("shards/00003") and not refused.exists():
                refused.touch()
                raise TransientError("the store does not answer")
        return super().write(key, data, **options)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_task_whose_shard_could_not_be_stored_is_done_again(tmp_path: Path, workers: int) -> None:
    jsonl(tmp_path / "a.jsonl", 150)
    convert(tmp_path / "a.jsonl", tmp_path / "calm", size_limit=8192, workers=1)
    result = convert(tmp_path / "a.jsonl", Sometimes(tmp_path / "out"), size_limit=8192, workers=workers)
    assert (tmp_path / "refused").exists()
    assert result.ran == result.tasks > 3
    assert tree(tmp_path / "out") == tree(tmp_path / "calm")


def test_a_folder_that_cannot_be_written_ends_the_job_with_its_name(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", 150)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "shards").write_text("a file where the folder should be")
    with pytest.raises(StoreError, match="shards/"):
        convert(tmp_path / "a.jsonl", tmp_path / "out", size_limit=8192, workers=2)
    assert not (tmp_path / "out" / "index.json").exists()
