"""`datasync demo`: the whole path on a generated corpus, with the commands that a user would type.

Draws a corpus of shapes, shards it to cluster-a, replicates it to cluster-b (both are folders here), trains
from cluster-b, kills the training half way with SIGKILL, starts it again, and compares it with a run that
nobody disturbed. Every step is an ordinary command, run as a process of its own; the folder stays, to try
things in.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import typer

MARK = ".datasync-demo"

CLUSTERS = """\
# Two clusters. Here they are folders; a bucket is `url = "s3://bucket/datasets"`, with endpoint and profile.
[clusters.cluster-a]
url = "cluster-a"

[clusters.cluster-b]
url = "cluster-b"

# A dataset and its recipe: `datasync shard shapes` makes it, at its home.
[datasets.shapes]
source = "corpus"
home = "cluster-a"
shard.size_limit = "256kb"
"""

TRAIN = """\
# A small decoder that sees a drawing as patches and learns to write its caption.
[run]
dir = "runs/first"
steps = {steps}
threads = 1

[data]
remote = "cluster-b:shapes"
batch_size = 32

[model]
context = 80
dim = 128
layers = 3
heads = 4
kv_heads = 2
hidden = 352

[checkpoint]
every = {every}

[log]
every = 10
"""


def demo(
    folder: Annotated[
        Path, typer.Argument(help="Where to work; what an earlier demo left there goes.")
    ] = Path("demo"),
    count: Annotated[int, typer.Option(help="Drawings in the corpus.", min=64)] = 4000,
    steps: Annotated[int, typer.Option(help="Training steps.", min=8)] = 60,
    only_prepare: Annotated[
        bool, typer.Option("--prepare", help="Draw the corpus, write the configuration, stop.")
    ] = False,
) -> None:
    """Shard, replicate, train, kill and resume, on a corpus that is drawn on the spot.

    Example: datasync demo
    """
    started = time.monotonic()
    stage = _Stages(folder)
    stage.say(f"{count:,} drawings with captions → {folder}/corpus")
    prepare(folder, count=count, steps=steps)
    if only_prepare:
        return

    stage.run("shard", "shapes")
    stage.run("replicate", "shapes", "--to", "cluster-b")
    stage.run("verify", "shapes", "--cluster", "cluster-b")
    killed_at = stage.run_and_kill("train", "train.toml", metrics="runs/first/metrics.jsonl", step=steps // 2)
    stage.run("train", "train.toml")
    stage.run("train", "train.toml", "--set", "run.dir=runs/undisturbed")

    same = _summarise(folder, killed_at=killed_at)
    print(f"\n{time.monotonic() - started:.0f} s in all. To go on: cd {folder} && datasync status")
    if not same:
        raise typer.Exit(1)


def prepare(folder: Path, *, count: int, steps: int = 60) -> None:
    """Write the corpus, `datasync.toml` and `train.toml` into `folder`.

    Raises:
        UsageError: The folder holds something that no demo has made.
    """
    from datasync.errors import UsageError
    from datasync.shapes import make_shapes

    if folder.exists() and any(folder.iterdir()) and not (folder / MARK).exists():
        raise UsageError(
            f"{folder} is not empty and was not made by this demo",
            mend="name another folder: datasync demo FOLDER",
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / MARK).touch()
    make_shapes(folder / "corpus", count=count)
    (folder / "datasync.toml").write_text(CLUSTERS)
    (folder / "train.toml").write_text(TRAIN.format(steps=steps, every=max(1, steps // 8)))


class _Stages:
    """Runs one command after the other in the demo's folder and shows what each says."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0

    def say(self, text: str) -> None:
        self._number += 1
        print(f"\n{self._number}. {text}", flush=True)

    def run(self, *arguments: str) -> None:
        """Run `datasync ARGUMENTS`; an error ends the demo with the command's own message and code."""
        self.say("$ datasync " + " ".join(arguments))
        code = _show(self._start(*arguments))
        if code != 0:
            raise typer.Exit(code)

    def run_and_kill(self, *arguments: str, metrics: str, step: int) -> int:
        """Run `datasync ARGUMENTS` and SIGKILL it once its metrics tell of `step`; the step it got to."""
        self.say("$ datasync " + " ".join(arguments) + "      (to be killed half way)")
        process = self._start(*arguments)
        reached: list[int] = []
        watch = threading.Thread(target=_kill_at, args=(process, self._folder / metrics, step, reached))
        watch.start()
        code = _show(process)
        watch.join()
        if not reached:
            print("   it ended before it could be killed", flush=True)
            raise typer.Exit(code or 1)
        print(f"   kill -9 after step {reached[0]}", flush=True)
        return reached[0]

    def _start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "datasync.cli", *arguments],
            cwd=self._folder,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def _show(process: subprocess.Popen[str]) -> int:
    """Show what a process says, and wait for it."""
    assert process.stdout is not None
    for line in process.stdout:
        print("   " + line.rstrip(), flush=True)
    return process.wait()


def _kill_at(process: subprocess.Popen[str], metrics: Path, step: int, reached: list[int]) -> None:
    """Wait until the run's metrics tell of `step`, then SIGKILL the process."""
    while process.poll() is None:
        done = max((row["step"] for row in _steps(metrics)), default=0)
        if done >= step:
            process.send_signal(signal.SIGKILL)
            reached.append(done)
            return
        time.sleep(0.05)


def _steps(metrics: Path) -> list[dict[str, Any]]:
    """The steps that a run has told of so far; its last line may be half written."""
    from train.metrics import steps_of

    return steps_of(metrics) if metrics.exists() else []


def _summarise(folder: Path, *, killed_at: int) -> bool:
    """Print what was done and proven; whether the two runs ended with the same weights."""
    from rich.console import Console
    from rich.table import Table

    from shards.index import Index
    from shards.progress import format_bytes
    from train.metrics import plot_loss

    index = Index.parse((folder / "cluster-b/shapes/index.json").read_bytes(), where="cluster-b:shapes")
    receipt = json.loads(next((folder / "cluster-b/shapes/_datasync/receipts").glob("*.json")).read_text())
    raw = sum(shard.raw.bytes for shard in index.shards)
    stored = sum(shard.stored.bytes for shard in index.shards)
    first, calm = (
        json.loads((folder / "runs" / run / "summary.json").read_text()) for run in ("first", "undisturbed")
    )
    losses = [step["loss"] for step in _steps(folder / "runs/first/metrics.jsonl")]
    plot = plot_loss(
        {"killed and resumed": folder / "runs/first", "undisturbed": folder / "runs/undisturbed"},
        folder / "loss.png",
    )
    same: bool = first["digest"] == calm["digest"]

    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    corpus = format_bytes(sum(path.stat().st_size for path in (folder / "corpus").iterdir()))
    table.add_row("corpus", f"{index.samples:,} samples, {corpus}")
    table.add_row("shards", f"{len(index.shards)}: {format_bytes(raw)} raw, {format_bytes(stored)} stored")
    table.add_row("replicated", f"cluster-a → cluster-b, {receipt['objects']} objects, each SHA-256 verified")
    table.add_row(
        "trained", f"loss {losses[0]:.2f} → {losses[-1]:.2f} in {len(losses)} steps, read from cluster-b"
    )
    table.add_row("killed", f"SIGKILL after step {killed_at}; {first['attempts']} attempts in all")
    ours, theirs, verdict = first["digest"][:12], calm["digest"][:12], "bit for bit" if same else "DIFFERENT"
    table.add_row("weights", f"{ours} resumed {'=' if same else '≠'} {theirs} undisturbed, {verdict}")
    table.add_row("plot", str(plot))
    print()
    Console().print(table)
    return same
