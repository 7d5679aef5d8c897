"""Validation, packing, generation, forks and repetitions of a real run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from shards.errors import UsageError
from tests.train.ranks import records, run, start
from train.fork import config_of, fork
from train.generate import caption, load


def sets(shapes: Path, folder: Path, *more: str) -> list[str]:
    return [f"data.remote={shapes}", f"run.dir={folder}", "checkpoint.keep_last=0", *more]


@pytest.fixture(scope="module")
def parent(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parent") / "run"
    run(1, *sets(shapes, folder, "run.steps=8", "eval.every=4", "eval.samples=50"))
    return folder


def digest(folder: Path) -> str:
    return str(json.loads((folder / "summary.json").read_text())["digest"])


def test_validation_is_the_same_on_any_number_of_ranks(shapes: Path, parent: Path, tmp_path: Path) -> None:
    evals = [r["eval_loss"] for r in records(parent)]
    assert [i + 1 for i, loss in enumerate(evals) if loss is not None] == [4, 8]
    assert evals[7] < evals[3]
    elastic = ("run.deterministic=elastic", "data.micro_batch=4", "eval.every=4", "eval.samples=50")
    for world in (1, 2):
        run(world, *sets(shapes, tmp_path / str(world), *elastic))
    assert [r["eval_loss"] for r in records(tmp_path / "1")] == [
        r["eval_loss"] for r in records(tmp_path / "2")
    ]


def test_the_best_checkpoint_is_kept(shapes: Path, tmp_path: Path) -> None:
    more = (
        "checkpoint.keep_last=1",
        "checkpoint.keep_best=1",
        "checkpoint.every=2",
        "eval.every=2",
        "optim.lr=0.02",
    )
    run(1, f"data.remote={shapes}", f"run.dir={tmp_path / 'run'}", "eval.samples=32", *more)
    evals = {r["step"]: r["eval_loss"] for r in records(tmp_path / "run") if r["eval_loss"] is not None}
    best = min(evals, key=lambda step: evals[step])
    kept = {int(p.name[5:]) for p in (tmp_path / "run/checkpoints").iterdir() if p.is_dir()}
    assert kept == {best, 8}


def test_packed_rows_train_to_nearly_the_same_loss_and_resume(
    shapes: Path, parent: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    start(1, *sets(shapes, folder, "data.pack=true", "fault.kill=0:5")).wait()
    run(1, *sets(shapes, folder, "data.pack=true"))
    for a, b in zip(records(parent), records(folder), strict=True):
        assert (a["ledger"], a["targets"]) == (b["ledger"], b["targets"])
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_blocks_train_to_nearly_the_same_loss_and_resume_to_the_same_bits(
    shapes: Path, parent: Path, tmp_path: Path
) -> None:
    def more(name: str) -> list[str]:
        return [*sets(shapes, tmp_path / name, "parallel.compile=true", "run.steps=8")]

    run(1, *more("calm"))
    start(1, *more("killed"), "fault.kill=0:5").wait()
    run(1, *more("killed"))
    assert digest(tmp_path / "killed") == digest(tmp_path / "calm")
    for a, b in zip(records(parent), records(tmp_path / "calm"), strict=True):
        assert (a["ledger"], a["targets"]) == (b["ledger"], b["targets"])
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)


def test_bfloat16_trains_to_nearly_the_same_loss_and_resumes_to_the_same_bits(
    shapes: Path, parent: Path, tmp_path: Path
) -> None:
    def more(name: str) -> list[str]:
        return [*sets(shapes, tmp_path / name, "parallel.dtype=bfloat16", "run.steps=8")]

    run(1, *more("calm"))
    start(1, *more("killed"), "fault.kill=0:5").wait()
    run(1, *more("killed"))
    assert digest(tmp_path / "killed") == digest(tmp_path / "calm")
    losses = [
        (a["loss"], b["loss"]) for a, b in zip(records(parent), records(tmp_path / "calm"), strict=True)
    ]
    assert all(a == pytest.approx(b, rel=0.02) for a, b in losses)
    assert any(a != b for a, b in losses)


def test_a_fork_without_a_change_ends_as_its_parent(parent: Path) -> None:
    config = fork(parent, step=3, sets=[])
    assert Path(config.run.dir) == parent.with_name("run-step3")
    run(1, *_as_sets(config.run.dir))
    assert digest(Path(config.run.dir)) == digest(parent)
    assert [r["step"] for r in records(Path(config.run.dir))] == [4, 5, 6, 7, 8]


def test_a_fork_with_a_change_differs_from_its_step_on(parent: Path) -> None:
    config = fork(parent, step=6, sets=["optim.lr=1e-4"])
    run(1, *_as_sets(config.run.dir))
    mine, theirs = records(Path(config.run.dir)), records(parent)[6:]
    assert [r["ledger"] for r in mine] == [r["ledger"] for r in theirs]
    assert mine[0]["loss"] == theirs[0]["loss"]
    assert mine[1]["loss"] != theirs[1]["loss"]
    assert json.loads((Path(config.run.dir) / "fork.json").read_text())["step"] == 6


def _as_sets(folder: str) -> list[str]:
    """A run folder's own config as `--set` texts, for the small run's launcher."""
    from train.config import flatten

    return [
        f"{key}={json.dumps(value)}" for key, value in flatten(config_of(Path(folder))).items() if value != ()
    ]


def test_a_fork_of_a_step_without_a_checkpoint_lists_those_there_are(parent: Path) -> None:
    with pytest.raises(UsageError, match="no checkpoint of step 5") as caught:
        fork(parent, step=5, sets=[])
    assert "3, 6, 8" in caught.value.mend


def test_a_checkpoint_captions_the_first_samples(shapes: Path, parent: Path) -> None:
    from train.data import open_fixed

    trained = load(parent, device="cpu")
    assert trained.step == 8
    assert load(parent, step=3, device="cpu").step == 3
    dataset = open_fixed(trained.config)
    examples = caption(trained, [dataset[i] for i in range(3)], max_new=12)
    assert [e.truth for e in examples] == [dataset[i]["caption"] for i in range(3)]
    assert all(e.image is not None for e in examples)
    with pytest.raises(UsageError, match="no run folder"):
        load(shapes)
