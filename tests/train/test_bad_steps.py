"""Bad steps in a real run: a batch that gives NaN, under each policy, with restarts between."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.train.ranks import records, run, start


def sets(shapes: Path, folder: Path, *more: str) -> list[str]:
    return [f"data.remote={shapes}", f"run.dir={folder}", "run.steps=12", *more]


def digest(folder: Path) -> str:
    return str(json.loads((folder / "summary.json").read_text())["digest"])


def events(folder: Path) -> list[dict[str, object]]:
    return list(json.loads((folder / "checkpoints" / "guard.json").read_text()))


def test_stop_ends_with_the_samples_named(shapes: Path, tmp_path: Path) -> None:
    outcome = start(1, *sets(shapes, tmp_path / "run", "fault.nan=7")).wait()[0]
    assert outcome["kind"] == "BadStepError"
    assert "step 8: the loss is not a number; samples " in outcome["error"]
    assert [r["step"] for r in records(tmp_path / "run")] == list(range(1, 8))


@pytest.mark.parametrize("world", [1, 2])
def test_skip_leaves_the_update_out_and_makes_all_steps(shapes: Path, tmp_path: Path, world: int) -> None:
    summary = run(world, *sets(shapes, tmp_path / "run", "guard.policy=skip", "fault.nan=7"))
    assert (summary["step"], summary["left_out"], summary["samples"]) == (12, 1, 13 * 16)
    assert [r["batch"] for r in records(tmp_path / "run")] == [*range(7), *range(8, 13)]
    (event,) = events(tmp_path / "run")
    assert (event["step"], event["batch"], event["kind"]) == (8, 7, "nan")
    assert len(set(event["samples"])) == 16  # type: ignore[call-overload]


def test_rewind_goes_back_and_never_meets_the_batch_again(shapes: Path, tmp_path: Path) -> None:
    calm = tmp_path / "calm"
    run(1, *sets(shapes, calm, "guard.policy=rewind", "fault.nan=7"))
    assert [r["batch"] for r in records(calm)] == [*range(7), *range(8, 13)]
    lines = [json.loads(line) for line in (calm / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in lines] == [*range(1, 8), *range(7, 13)]


def test_a_decision_outlives_a_kill_before_the_next_checkpoint(shapes: Path, tmp_path: Path) -> None:
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    more = ("guard.policy=rewind", "fault.nan=7")
    run(1, *sets(shapes, calm, *more))
    start(1, *sets(shapes, killed, *more, "fault.kill=0:8")).wait()
    assert len(events(killed)) == 1
    run(1, *sets(shapes, killed, "guard.policy=rewind"))  # without the fault: it must not be met again
    assert digest(killed) == digest(calm)
    assert len(events(killed)) == 1


def test_rewind_before_the_first_checkpoint_goes_back_to_the_beginning(shapes: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(1, *sets(shapes, folder, "guard.policy=rewind", "fault.nan=1"))
    assert [r["batch"] for r in records(folder)] == [0, *range(2, 13)]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [r["loss"] for r in lines if r["step"] == 1] == [records(folder)[0]["loss"]] * 2
