"""Run folders: one writer, the same config or a refusal, time accounted for, pictures."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
from PIL import Image

from datasync.errors import BusyError, UsageError
from train.config import Config
from train.folder import RunFolder, read_lines
from train.metrics import line, plot_loss, smooth, steps_of, straggler
from train.runs import differences, find, summarise, write_report

TREE = {"run": {"dir": "r", "steps": 10}, "data": {"remote": "x"}}


def make(*sets: str) -> Config:
    return Config.from_tree(TREE, sets, where="test")[0]


def record(step: int, attempt: int, time: float, loss: float = 2.0) -> dict[str, object]:
    return {
        "step": step, "loss": loss, "lr": 1e-3, "norm": 1.0, "targets": 10, "positions": 100,
        "batch": step - 1,
        "epoch": 0, "samples": step, "ledger": step, "step_s": 2.0, "wait_s": 0.5, "save_s": 0.0,
        "tokens_per_s": 50.0, "mfu": None, "memory_bytes": 1 << 20, "slowest": None, "eval_loss": None,
        "attempt": attempt, "time": time,
    }  # fmt: skip


def killed_and_resumed(path: Path) -> Path:
    """Steps 1-6, killed; from a checkpoint of step 4: steps 5-10."""
    folder = RunFolder(path)
    folder.open(make(f"run.dir={path}"))
    folder.begin(setup_s=5.0, time=105.0)
    for step in range(1, 7):
        folder.append("metrics.jsonl", record(step, 1, 105.0 + 2 * step, loss=3.0 - 0.1 * step))
    folder.append("attempts.jsonl", {"attempt": 2, "event": "start", "time": 140.0, "setup_s": 3.0})
    for step in range(5, 11):
        folder.append("metrics.jsonl", record(step, 2, 140.0 + 2 * (step - 4), loss=3.0 - 0.1 * step))
    end = {"attempt": 2, "event": "end", "time": 153.0, "cause": "finished"}
    folder.append("attempts.jsonl", end)
    folder.write("summary.json", {"digest": "abc"})
    return path


def test_time_is_accounted_for(tmp_path: Path) -> None:
    run = summarise(killed_and_resumed(tmp_path / "a"))
    first, second = run.attempts
    assert (first.cause, first.redone, first.lost_s, first.productive_s) == ("killed", 2, 4.0, 8.0)
    assert (second.cause, second.redone, second.productive_s, second.setup_s) == ("finished", 0, 12.0, 3.0)
    assert first.seconds == 17.0
    assert second.idle_s == pytest.approx(137.0 - 117.0)
    assert run.goodput == pytest.approx(20.0 / (153.0 - 100.0))
    assert (run.state, run.step, run.steps, run.digest) == ("finished", 10, 10, "abc")
    assert run.wait == pytest.approx(0.25)


def test_only_the_last_time_of_a_step_counts(tmp_path: Path) -> None:
    records = steps_of(killed_and_resumed(tmp_path / "a") / "metrics.jsonl")
    assert [r["step"] for r in records] == list(range(1, 11))
    assert [r["attempt"] for r in records] == [1] * 4 + [2] * 6


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    assert [r["step"] for r in read_lines(path)] == [1]
    assert list(read_lines(tmp_path / "none")) == []


def begin(path: Path, config: Config) -> None:
    folder = RunFolder(path)
    folder.open(config)
    folder.begin()
    folder.close()


def test_a_run_continues_only_with_the_config_it_began_with(tmp_path: Path) -> None:
    begin(tmp_path / "a", make())
    RunFolder(tmp_path / "a").append("metrics.jsonl", record(1, 1, 0.0))
    with pytest.raises(UsageError) as caught:
        RunFolder(tmp_path / "a").open(make("optim.lr=1.0", "run.steps=20"))
    assert "optim.lr: 0.003 → 1.0" in str(caught.value)
    assert "--accept optim.lr --accept run.steps" in str(caught.value)
    RunFolder(tmp_path / "a").open(make("optim.lr=1.0"), accept=["optim.lr"])


def test_a_run_that_failed_before_its_first_step_may_begin_with_another_config(tmp_path: Path) -> None:
    begin(tmp_path / "a", make("data.text=captoin"))
    begin(tmp_path / "a", make("data.text=caption"))
    RunFolder(tmp_path / "a").append("metrics.jsonl", record(1, 1, 0.0))
    with pytest.raises(UsageError, match=r"data\.text: 'caption' → 'title'"):
        RunFolder(tmp_path / "a").open(make("data.text=title"))


def test_what_does_not_change_the_computation_may_change(tmp_path: Path) -> None:
    begin(tmp_path / "a", make())
    RunFolder(tmp_path / "a").append("metrics.jsonl", record(1, 1, 0.0))
    RunFolder(tmp_path / "a").open(
        make("checkpoint.every=7", "data.workers=2", "log.every=5", "run.timeout_s=9")
    )


def _hold(path: Path, ready: object, leave: object) -> None:
    folder = RunFolder(path)
    folder.open(make())
    ready.set()  # type: ignore[attr-defined]
    leave.wait(30)  # type: ignore[attr-defined]


def test_a_second_process_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready, leave = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(tmp_path / "a", ready, leave))
    process.start()
    try:
        assert ready.wait(30)
        with pytest.raises(BusyError, match="another process trains"):
            RunFolder(tmp_path / "a").open(make())
    finally:
        process.kill()
        process.join()
    RunFolder(tmp_path / "a").open(make())


def test_runs_are_found_listed_and_compared(tmp_path: Path) -> None:
    for name in ("a", "b"):
        killed_and_resumed(tmp_path / name)
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    config["optim"]["lr"] = 0.5
    (tmp_path / "b" / "config.json").write_text(json.dumps(config))
    found = find([tmp_path])
    assert [path.name for path in found] == ["a", "b"]
    assert find([tmp_path / "a"]) == [tmp_path / "a"]
    assert differences([summarise(path) for path in found]) == {"optim.lr": [0.003, 0.5]}
    with pytest.raises(UsageError, match="no folder"):
        find([tmp_path / "nowhere"])


def test_pictures_of_the_loss_show_something(tmp_path: Path) -> None:
    runs = [summarise(killed_and_resumed(tmp_path / name)) for name in ("a", "b")]
    out = plot_loss(
        {"one": runs[0].path, "two": runs[1].path / "metrics.jsonl"}, tmp_path / "deep" / "loss.png"
    )
    colors = Image.open(out).convert("RGB").getcolors(1 << 24)
    assert colors is not None
    assert len(colors) > 50
    page = write_report(runs, tmp_path / "report.html").read_text()
    assert "<svg" in page
    assert "goodput" in page
    assert not (tmp_path / "report.svg").exists()


def test_the_slowest_rank_is_named_only_where_it_matters() -> None:
    assert straggler([1.0, 1.0, 2.0, 1.0]) == {"rank": 2, "own_s": 2.0, "median_s": 1.0}
    assert straggler([1.0, 1.1, 1.05]) is None
    assert straggler([0.001, 0.004]) is None
    assert straggler([3.0]) is None


def test_a_step_is_one_line() -> None:
    text = line(
        {**record(3, 1, 0.0), "mfu": 0.41, "eval_loss": 1.5, "slowest": straggler([1.0, 1.0, 2.0])}, 100
    )
    assert text.startswith("step   3/100  loss 2.0000")
    assert "wait 25.0%" in text
    assert "mfu 41.0%" in text
    assert "eval 1.5000" in text
    assert "slowest rank 2: 2.00 s, median 1.00 s" in text
    assert "\n" not in text


def test_smoothing_starts_at_the_first_value() -> None:
    assert smooth([4.0, 4.0, 4.0]) == pytest.approx([4.0, 4.0, 4.0])
    assert smooth([4.0, 2.0])[1] < 4.0
