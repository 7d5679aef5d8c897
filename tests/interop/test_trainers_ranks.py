"""Trainers of others on two ranks of torchrun, killed and resumed; and what Accelerate may not do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from datasync import StreamingDataLoader, StreamingDataset
from tests.streaming.order_helpers import flat, ids, write_dataset

SCRIPT = Path(__file__).with_name("trainer_rank.py")
RANKS, BATCH, STEPS = 2, 8, 13  # of an epoch


@pytest.fixture(scope="module")
def remote(tmp_path_factory):
    return str(write_dataset(tmp_path_factory.mktemp("remote"), RANKS * BATCH * STEPS))


def torchrun(what, remote, folder, *, steps=0, save=0, kill=0):
    """Run two ranks; gives what each of them has seen since the last run, and the exit code."""
    folder.mkdir(exist_ok=True)
    for path in folder.glob("seen-*"):
        path.unlink()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    numbers = [str(steps), str(save), str(kill)]
    done = subprocess.run(
        [*launcher, str(SCRIPT), what, remote, str(folder), *numbers],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=folder,
    )
    seen = [folder / f"seen-{what}-{rank}.json" for rank in range(RANKS)]
    assert all(path.exists() for path in seen), done.stderr[-5000:]
    return [json.loads(path.read_text()) for path in seen], done.returncode


@pytest.mark.parametrize("what", ["hugging_face", pytest.param("lightning", marks=pytest.mark.slow)])
def test_a_job_that_is_killed_goes_on_at_its_checkpoint(what, remote, tmp_path):
    pytest.importorskip({"hugging_face": "transformers"}.get(what, what), reason="it is not installed")
    save, kill, steps = 9, 11, STEPS + 4
    first, code = torchrun(what, remote, tmp_path / "job", steps=steps, save=save, kill=kill)
    assert code != 0
    rest, code = torchrun(what, remote, tmp_path / "job", steps=steps, save=save)
    assert code == 0
    loader = StreamingDataLoader(
        StreamingDataset(remote=remote, local=str(tmp_path / "cache"), batch_size=RANKS * BATCH, shuffle=True)
    )
    expected = [ids(batch) for _ in range(2) for batch in loader]
    assert [flat(parts) for parts in zip(*first, strict=False)][:save] == expected[:save]
    assert [flat(parts) for parts in zip(*rest, strict=True)] == expected[save:steps]
    if what == "hugging_face":
        for rank in range(RANKS):  # without our loader it would read the dataset on one rank alone
            answers = json.loads((tmp_path / "job" / f"answers-{rank}.json").read_text())
            assert len(answers) == 1
            assert "get_train_dataloader" in answers[0]


def test_accelerate_is_not_let_divide_what_is_divided(remote, tmp_path):
    """Every rank is told so before anything is read; where all ranks read the same, it may."""
    pytest.importorskip("accelerate", reason="Accelerate is not installed")
    seen, code = torchrun("accelerate", remote, tmp_path / "job")
    assert code == 0
    for rank in range(RANKS):
        answers = json.loads((tmp_path / "job" / f"answers-{rank}.json").read_text())
        assert len(answers) == 8
        assert all("prepare a StreamingDataLoader" in answer for answer in answers)
    assert flat(seen[0] + seen[1]) == list(range(RANKS * BATCH))
