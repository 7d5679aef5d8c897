"""Runs side by side: where each stands, what differs between them, and where their time went.

Everything is read from the run folders (`folder.py`), so it works while they train, and anywhere they were
copied to.

    goodput = seconds of the steps that count / seconds since the run began

A step counts once. What a restart had to do again, setting up, and the time between a death and the next
start are lost; each attempt's line says how much, and why it ended.
"""

from __future__ import annotations

import fcntl
import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shards.errors import UsageError
from train.folder import RunFolder
from train.metrics import steps_of
from train.settings import leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of a run.

    Args:
        number (int): From 1.
        cause (str): Why it ended: ``finished``, an error's message, ``killed``, or ``running``.
        seconds (float): From its start to its end, or to its last step.
        productive_s (float): Of its steps that count.
        setup_s (float): From the start of its process until its first step could begin.
        redone (int): Its steps that a later attempt had to do again.
        lost_s (float): Seconds of those.
        idle_s (float): From the end of the attempt before to its start.
    """

    number: int
    cause: str
    seconds: float
    productive_s: float
    setup_s: float
    redone: int
    lost_s: float
    idle_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run folder, summed up."""

    path: Path
    step: int
    steps: int
    loss: float | None
    eval_loss: float | None
    tokens_per_s: float | None
    wait: float | None
    digest: str | None
    attempts: tuple[Attempt, ...]
    config: Mapping[str, Any]

    @property
    def state(self) -> str:
        """``finished``, ``running``, ``killed``, ``stopped`` or ``failed``."""
        cause = self.attempts[-1].cause if self.attempts else "killed"
        if cause in ("finished", "running", "killed"):
            return cause
        return "stopped" if cause.startswith("stopped by") else "failed"

    @property
    def goodput(self) -> float | None:
        """Share of the run's time, pauses and all, that went into steps that count."""
        total = sum(a.seconds + a.idle_s for a in self.attempts)
        return sum(a.productive_s for a in self.attempts) / total if total > 0 else None


def find(paths: Iterable[Path]) -> list[Path]:
    """Run folders among and below `paths`."""
    found = []
    for path in paths:
        if not path.is_dir():
            raise UsageError(f"no folder {path}", mend="name run folders, or a folder that holds some")
        own = [path] if (path / "attempts.jsonl").is_file() else []
        found += own or sorted(p.parent for p in path.glob("*/attempts.jsonl"))
    return found


def summarise(path: Path) -> Run:
    """Read one run folder."""
    folder = RunFolder(path)
    config = dict(leaves(folder.read("config.json") or {}))
    counted = steps_of(path / "metrics.jsonl")
    summary = folder.read("summary.json") or {}
    recent = counted[-20:]
    evals = [r["eval_loss"] for r in counted if r.get("eval_loss") is not None]
    spent = sum(r["step_s"] for r in recent)
    return Run(
        path=path,
        step=counted[-1]["step"] if counted else 0,
        steps=config.get("run.steps", 0),
        loss=counted[-1]["loss"] if counted else None,
        eval_loss=evals[-1] if evals else None,
        tokens_per_s=sum(r["positions"] for r in recent) / spent if spent else None,
        wait=sum(r["wait_s"] for r in recent) / spent if spent else None,
        digest=summary.get("digest"),
        attempts=tuple(_attempts(folder, counted)),
        config=config,
    )


def _attempts(folder: RunFolder, counted: Sequence[Mapping[str, Any]]) -> Iterable[Attempt]:
    starts = {e["attempt"]: e for e in folder.lines("attempts.jsonl") if e["event"] == "start"}
    ends = {e["attempt"]: e for e in folder.lines("attempts.jsonl") if e["event"] == "end"}
    records = list(folder.lines("metrics.jsonl"))
    before: float | None = None
    for number, start in sorted(starts.items()):
        mine = [r for r in records if r["attempt"] == number]
        good = [r for r in counted if r["attempt"] == number]
        end = ends.get(number)
        began = start["time"] - start["setup_s"]
        until = end["time"] if end else max([start["time"], *(r["time"] for r in mine)])
        all_s, good_s = sum(r["step_s"] for r in mine), sum(r["step_s"] for r in good)
        alive = number == max(starts) and _held(folder.path / "lock")
        yield Attempt(
            number=number,
            cause=end["cause"] if end else "running" if alive else "killed",
            seconds=until - began,
            productive_s=good_s,
            setup_s=start["setup_s"],
            redone=len(mine) - len(good),
            lost_s=all_s - good_s,
            idle_s=max(began - before, 0.0) if before is not None else 0.0,
        )
        before = until


def _held(lock: Path) -> bool:
    """Whether a process trains in this folder now."""
    try:
        with lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Config keys that are not the same in all runs, with each run's value; where the run lies is left
    out."""
    keys = sorted({key for run in runs for key in run.config} - {"run.dir"})
    table = {key: [run.config.get(key) for run in runs] for key in keys}
    return {key: values for key, values in table.items() if any(value != values[0] for value in values)}


def write_report(runs: Sequence[Run], out: Path) -> Path:
    """The comparison as a picture (PNG, SVG, PDF), or as a page that holds picture and tables (HTML)."""
    from train.metrics import plot_loss

    labels = {str(run.path): run.path for run in runs}
    if out.suffix.lower() not in (".html", ".htm"):
        return plot_loss(labels, out)
    drawing = plot_loss(labels, out.with_suffix(".svg"))
    svg = drawing.read_text(encoding="utf-8")
    drawing.unlink()
    heads = "".join(f"<th>{html.escape(label)}" for label in labels)
    rows = {"state": [run.state for run in runs], "step": [f"{run.step}/{run.steps}" for run in runs]}
    rows |= {"loss": [run.loss for run in runs], "eval_loss": [run.eval_loss for run in runs]}
    rows |= {
        "goodput": [None if run.goodput is None else f"{run.goodput:.0%}" for run in runs],
        "tokens/s": [run.tokens_per_s for run in runs],
    }
    rows |= differences(runs)
    body = "".join(
        f"<tr><th>{html.escape(key)}" + "".join(f"<td>{html.escape(show(value))}" for value in values)
        for key, values in rows.items()
    )
    out.write_text(
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>runs</title>'
        "<style>body{font:15px system-ui;margin:2em}"
        "td,th{padding:.3em 1em;text-align:left}</style>"
        f"<table><tr><th>{heads}</tr>{body}</table>{svg[svg.index('<svg') :]}</html>\n",
        encoding="utf-8",
    )
    return out


def show(value: Any) -> str:
    """A value of a table."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
