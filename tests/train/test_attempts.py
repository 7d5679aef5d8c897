"""Attempts that fail leave the run as it was, and say by name what they refuse."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from datasync.storage.local import LocalStore
from shards.errors import DatasyncError, UsageError
from shards.writer import ShardWriter
from tests.train.ranks import TREE, run, start
from train.checkpoint import Checkpoints, folder
from train.config import CheckpointConfig, Config, ParallelConfig
from train.data import open_fixed
from train.distributed import Team
from train.folder import RunFolder
from train.settings import leaves


@pytest.fixture(scope="module")
def finished(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps, all of them saved."""
    place = tmp_path_factory.mktemp("runs") / "finished"
    run(1, *sets(shapes, place))
    return place


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def sets(shapes: Path, place: Path, *more: str) -> list[str]:
    return [f"data.remote={shapes}", f"run.dir={place}", "run.steps=4", "checkpoint.every=2", *more]


def attempt(*sets: str) -> dict[str, Any]:
    return start(1, *sets).wait()[0]


def config_of(place: Path) -> dict[str, Any]:
    return dict(leaves(json.loads((place / "config.json").read_text())))


def test_a_change_that_came_to_nothing_is_not_the_runs(shapes: Path, copy: Path) -> None:
    before = config_of(copy)
    more = ("run.steps=6", "accept.run.steps", "data.remote=/nowhere")
    assert "/nowhere/index.json" in attempt(*sets(shapes, copy, *more))["error"]
    assert config_of(copy) == before
    assert run(1, *sets(shapes, copy, "run.steps=5", "accept.run.steps"))["step"] == 5
    assert config_of(copy)["run.steps"] == 5


def test_weights_of_another_shape_are_refused_even_if_accepted(shapes: Path, copy: Path) -> None:
    refused = attempt(*sets(shapes, copy, "model.layers=3", "accept.model.layers", "accept.model.size"))
    assert refused["kind"] == "UsageError"
    assert "model.layers = 2, its weights do not fit 3" in refused["error"]
    assert run(1, *sets(shapes, copy))["step"] == 4


def test_accepting_a_key_that_is_none_names_the_nearest(shapes: Path, copy: Path) -> None:
    refused = attempt(*sets(shapes, copy, "accept.run.stpes"))
    assert "--accept run.stpes: there is no such key" in refused["error"]
    assert "did you mean run.steps?" in refused["error"]


def test_checkpoints_that_were_there_are_missed(shapes: Path, copy: Path) -> None:
    """Never a silent fresh start, also where the whole folder of checkpoints is gone."""
    shutil.rmtree(copy / "checkpoints")
    refused = attempt(*sets(shapes, copy))
    assert refused["kind"] == "CorruptError"
    assert "has saved step 4, and there is no checkpoint" in refused["error"]


def test_a_step_that_was_not_kept_is_told_from_one_that_is_bad(copy: Path) -> None:
    from datasync.storage import open_store
    from train.config import CheckpointConfig, ParallelConfig
    from train.distributed import Team

    kept = Checkpoints(
        open_store(str(copy / "checkpoints")), Team(ParallelConfig()), CheckpointConfig(), copy
    )
    with pytest.raises(UsageError, match="no checkpoint of step 3") as refused:
        kept.load({}, step=3)
    assert "there are: 2, 4" in str(refused.value)
    assert (copy / "checkpoints" / folder(4)).is_dir()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_is_one_line_and_the_next_save_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, asynchronous: bool
) -> None:
    """What PyTorch raises here is no `Exception`: it ended the thread, which was taken for success."""
    from torch.distributed.checkpoint.filesystem import FileSystem

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    settings = CheckpointConfig(asynchronous=asynchronous)
    kept = Checkpoints(LocalStore(tmp_path / "kept"), Team(ParallelConfig()), settings, tmp_path / "scratch")
    tensors = {"w": torch.ones(3)}
    with monkeypatch.context() as patched:
        patched.setattr(FileSystem, "create_stream", full)
        kept.save(1, tensors, {})
        kept.finish()
        assert "checkpoint of step 1 NOT written: rank 0: OSError: [Errno 28] No space left" in caplog.text
        with pytest.raises(DatasyncError, match="No space left on device") as failed:
            kept.save(2, tensors, {}, wait=True)
    assert "Traceback" not in str(failed.value)
    assert kept.steps() == []
    kept.save(3, tensors, {}, wait=True)
    assert kept.steps() == [3]


def test_progress_is_what_the_run_folder_knows(copy: Path) -> None:
    assert RunFolder(copy).progress() == (4, 4)
    (copy / "attempts.jsonl").unlink()
    assert RunFolder(copy).progress() == (0, 4)


def test_a_line_that_was_cut_short_does_not_take_the_next_one_with_it(copy: Path) -> None:
    known = json.loads((copy / "config.json").read_text())
    for name in ("attempts.jsonl", "metrics.jsonl"):
        with (copy / name).open("a") as file:
            file.write('{"attempt": 9, "st')
    held = RunFolder(copy)
    held.open(Config.from_tree(known, where="test")[0])
    held.begin(step=4)
    assert [entry["event"] for entry in held.lines("attempts.jsonl")] == ["start", "end", "start"]
    assert held.attempt == 2
    held.close()


def test_a_dataset_smaller_than_a_batch_is_counted_right(shapes: Path, tmp_path: Path) -> None:
    refused = attempt(*sets(shapes, tmp_path / "run", "data.batch_size=300"))
    assert "the dataset has 240 samples, fewer than data.batch_size = 300" in refused["error"]


def test_a_file_that_is_no_tokenizer_is_named(shapes: Path, tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("the and of")
    refused = attempt(*sets(shapes, tmp_path / "run", f"data.tokenizer={tmp_path / 'words.txt'}"))
    assert "words.txt is no tokenizer" in refused["error"]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_run_with_workers_ends_when_it_is_told_to(shapes: Path, tmp_path: Path, name: str) -> None:
    """Workers ignore the signal: who leaves has to end them, or waits for them for ever."""
    more = ("run.steps=50", "data.workers=2", f"fault.signal=0:3:{name}")
    outcome = start(1, *sets(shapes, tmp_path / "run", *more)).wait(seconds=60)[0]
    assert outcome["kind"] == "StoppedError"


def test_a_worker_that_is_killed_is_told_with_what_to_do(shapes: Path, tmp_path: Path) -> None:
    group = start(
        1,
        *sets(
            shapes,
            tmp_path / "run",
            "run.steps=100000",
            "log.every=100000",
            "data.workers=1",
            "data.batch_size=1",
        ),
    )
    try:
        while True:
            with contextlib.suppress(ProcessLookupError):  # its epoch ended: the next one
                os.kill(_worker_of(group.processes[0].pid), signal.SIGKILL)
                break
        outcome = group.wait(seconds=60)[0]
    finally:
        group.kill()
    assert outcome["kind"] == "DatasyncError"
    assert "a worker of data.workers = 1 died" in outcome["error"]
    assert "run the same command again" in outcome["error"]


def _worker_of(pid: int | None) -> int:
    """A DataLoader worker of a process, or of its fork server, once it has made a step."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = {}
        for status in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                name, _, rest = status.read_text().partition("(")[2].rpartition(")")
                found[int(status.parent.name)] = (name, int(rest.split()[1]))
        for worker, (name, parent) in found.items():
            if name == "pt_data_worker" and pid in (parent, found.get(parent, ("", 0))[1]):
                time.sleep(0.2)
                return worker
        time.sleep(0.05)
    raise AssertionError("no worker was started")


def test_captions_of_a_mixture_are_made_of_its_streams(shapes: Path, tmp_path: Path) -> None:
    streams = [{"remote": str(shapes), "proportion": 0.5}, {"remote": str(shapes), "proportion": 0.5}]
    tree = {**TREE, "data": {**TREE["data"], "streams": streams}}
    config, _ = Config.from_tree(tree, [f"run.dir={tmp_path / 'run'}"], where="test")
    assert open_fixed(config).size == 480


def write(place: Path, columns: dict[str, str], rows: list[dict[str, Any]]) -> Path:
    with ShardWriter(columns=columns, out=place) as writer:
        for row in rows:
            writer.write(row)
    return place


def test_tokens_that_the_model_does_not_know_are_named(tmp_path: Path) -> None:
    rows = [{"ids": np.arange(300, 310, dtype=np.int32)} for _ in range(32)]
    data = write(tmp_path / "data", {"ids": "ndarray:int32:10"}, rows)
    more = ("data.tokens=ids", "data.text=", "data.image=")
    refused = attempt(*sets(data, tmp_path / "run", *more))
    assert "column 'ids' has the token 309, the model knows 0 to 258" in refused["error"]
    assert run(1, *sets(data, tmp_path / "run", *more, "model.vocab=310"))["step"] == 4
    refused = attempt(*sets(data, tmp_path / "other", *more, "model.vocab=100"))
    assert "model.vocab = 100 is less than the 259 tokens of data.tokenizer" in refused["error"]


def test_what_is_no_text_is_not_trained_on_as_its_name(tmp_path: Path) -> None:
    image = Image.new("RGB", (8, 8))
    data = write(tmp_path / "data", {"image": "png"}, [{"image": image} for _ in range(32)])
    refused = attempt(*sets(data, tmp_path / "run", "data.text=image", "data.image="))
    assert "data.text: column 'image' holds a PngImageFile, no text" in refused["error"]


def test_one_damaged_run_does_not_hide_the_others(copy: Path, tmp_path: Path) -> None:
    shutil.copytree(copy, tmp_path / "other")
    (copy / "config.json").write_text("{")
    command = [sys.executable, "-m", "datasync", "runs"]
    listed = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True)
    assert listed.returncode == 3
    assert "finished" in listed.stdout
    assert f"left out: {copy / 'config.json'} cannot be read" in listed.stderr
    alone = subprocess.run([*command, str(copy)], capture_output=True, text=True)
    assert alone.returncode == 1
