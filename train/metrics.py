"""What a run tells while it runs, and the pictures made of it afterwards.

One line a step on standard error, and one object a step in `metrics.jsonl`:

    step loss lr norm        the step (from 1), mean loss of its targets, learning rate, gradient norm before
                             clipping
    targets positions        tokens that carried loss, and positions computed, over all ranks
    batch epoch samples      number of the batch in the stream, its epoch, samples consumed in all
    ledger                   a sum over the ids of its samples: the same samples give the same number on any
                             ranks
    step_s wait_s save_s     seconds from the end of the step before to the end of this one, waiting for data
                             (slowest rank), and in saving a checkpoint
    tokens_per_s mfu         positions a second; share of the peak of the GPUs, where that is known
    memory_bytes             peak of this rank: GPU memory, or resident memory on a CPU
    own_s                    seconds of each rank: data and forward pass, in which it waits for no other
    slowest                  {rank, own_s, median_s} where one rank takes over 1.2 times the median
    eval_loss                where a validation followed the step
    attempt time             which start of the run this was, seconds since the epoch
"""

from __future__ import annotations

import itertools
import resource
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shards.progress import format_bytes
from train.folder import RunFolder, read_lines

if TYPE_CHECKING:
    import torch

PEAKS = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "4090": 165e12,
    "B200": 2250e12,
}
"""Dense bfloat16 FLOP/s by a part of the GPU's name, from the makers' data sheets."""

SMOOTH_FROM = 200
"""Steps from which a plot shows a mean over the raw line: a mean lags, which misleads on a short run."""
NOISE_S = 0.05
"""Seconds by which a rank must be slower than the median to be named."""


class Metrics:
    """Writes each step's line; only the first rank makes one."""

    def __init__(self, folder: RunFolder, steps: int, *, every: int, tensorboard: bool) -> None:
        self.folder, self.steps, self.every = folder, steps, every
        self._events: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(folder.path / "tensorboard"))

    def write(self, record: Mapping[str, Any]) -> None:
        """Keep a step, and show it if it is its turn."""
        self.folder.append("metrics.jsonl", record)
        step = record["step"]
        if step % self.every == 0 or step in (1, self.steps):
            sys.stderr.write(line(record, self.steps) + "\n")
            sys.stderr.flush()
        if self._events is not None:
            for name, value in record.items():
                if isinstance(value, int | float) and name not in ("step", "time", "attempt"):
                    self._events.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush what is buffered."""
        if self._events is not None:
            self._events.close()


def line(record: Mapping[str, Any], steps: int) -> str:
    """A step as a person reads it."""
    parts = [
        f"step {record['step']:>{len(str(steps))}}/{steps}",
        f"loss {record['loss']:.4f}",
        f"lr {record['lr']:.2e}",
        f"norm {record['norm']:.2f}",
        f"{record['tokens_per_s']:,.0f} tok/s",
        f"wait {100 * record['wait_s'] / max(record['step_s'], 1e-9):.1f}%",
        format_bytes(record["memory_bytes"]),
    ]
    if record.get("mfu") is not None:
        parts.append(f"mfu {100 * record['mfu']:.1f}%")
    if record.get("eval_loss") is not None:
        parts.append(f"eval {record['eval_loss']:.4f}")
    if record.get("slowest"):
        slow = record["slowest"]
        parts.append(f"slowest rank {slow['rank']}: {slow['own_s']:.2f} s, median {slow['median_s']:.2f} s")
    return "  ".join(parts)


def straggler(own_s: Sequence[float]) -> dict[str, Any] | None:
    """The slowest rank, if it takes over 1.2 times the median; `own_s` is (world,) seconds of work without
    waiting."""
    if len(own_s) < 2:
        return None
    slowest, median = max(own_s), statistics.median(own_s)
    if slowest <= 1.2 * median or slowest - median < NOISE_S:
        return None
    return {"rank": own_s.index(slowest), "own_s": slowest, "median_s": median}


def peak_flops(device: torch.device) -> float | None:
    """What this device can do a second at most, where we know."""
    import torch

    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def memory_bytes(device: torch.device) -> int:
    """The most memory used so far."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def steps_of(path: Path) -> list[dict[str, Any]]:
    """The steps of a `metrics.jsonl` in order; where a restart computed one again, the last time counts."""
    return [record for _, record in sorted({record["step"]: record for record in read_lines(path)}.items())]


def smooth(values: Sequence[float], weight: float = 0.95) -> list[float]:
    """Exponential mean without the bias of its start."""
    mean, total, out = 0.0, 0.0, []
    for value in values:
        mean, total = weight * mean + (1 - weight) * value, weight * total + (1 - weight)
        out.append(mean / total)
    return out


def plot_loss(runs: Mapping[str, Path], out: Path) -> Path:
    """Draw the loss of one or more runs into `out` (PNG, SVG, PDF): label -> `metrics.jsonl` or run folder.

    Restarts are marked by a vertical line, validation losses by dots.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    for number, (label, path) in enumerate(runs.items()):
        records = steps_of(path / "metrics.jsonl" if path.is_dir() else path)
        color, style = f"C{number}", ("-", "--", "-.", ":")[number % 4]
        steps, losses = [r["step"] for r in records], [r["loss"] for r in records]
        if len(steps) > SMOOTH_FROM:
            axes.plot(steps, losses, color=color, alpha=0.25, linewidth=1)
            losses = smooth(losses)
        axes.plot(steps, losses, color=color, linestyle=style, linewidth=1.8, label=label)
        for before, after in itertools.pairwise(records):
            if before.get("attempt") != after.get("attempt"):
                axes.axvline(after["step"] - 0.5, color=color, linewidth=0.8, linestyle=":")
        dots = [(r["step"], r["eval_loss"]) for r in records if r.get("eval_loss") is not None]
        if dots:
            axes.plot(*zip(*dots, strict=True), "o", color=color, markersize=4)
    axes.set(xlabel="step", ylabel="loss (nats a token)")
    axes.grid(alpha=0.3)
    if runs:
        axes.legend()
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    pyplot.close(figure)
    return out
