"""Training: what the trainer costs beside a bare loop over the same batches in memory.

    python -m tests.bench.bench_train [--steps 24] [--rounds 3] [--size 2m] [--json]

Input: drawings with captions, made for the occasion, in a compressed dataset of many shards. All figures are
of one process on the CPU, with one thread. The contenders take turns, `--rounds` times, and the median over
all their steps counts, without the first two of each round:

    bare        forward, backward, clipping and AdamW over microbatches that lie in memory; no data, no
                metrics
    trainer     `train.loop.run` from a warm cache: stream, decoding, metrics, everything
    workers     the same with two DataLoader workers
    cold        the same with an empty cache
    saving      the same with a background checkpoint every four steps
    elastic     deterministic = "elastic" with four microbatches, beside `accumulate`, four microbatches
                without

Printed: a step's seconds; its ratio to its reference; the share of time that was spent waiting for data
(target: under 1%), and in a step for saving (target: under 3%); and a restart, from the start of the process
to its first new step, broken down. On a machine that others use too, ratios say more than seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Steps = list[dict[str, Any]]
SKIPPED = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", default="2m")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), arguments.steps, arguments.rounds, arguments.size)
    print(json.dumps(result, indent=1) if arguments.json else table(result))


def measure(folder: Path, steps: int, rounds: int, size: str) -> dict[str, Any]:
    """Run all contenders in turn; figures by name."""
    make_data(folder / "data", 32 * (steps + 1))
    base = [
        f"run.steps={steps}",
        f"model.size={size}",
        f"data.cache={folder / 'warm'}",
        "log.every=1000000",
        "run.threads=1",
    ]
    four = [*base, "data.micro_batch=8"]
    contenders: dict[str, Callable[[int], Steps]] = {
        "bare": lambda i: bare(folder, base),
        "trainer": lambda i: trained(folder, base),
        "workers": lambda i: trained(folder, [*base, "data.workers=2"]),
        "cold": lambda i: trained(folder, [*base, f"data.cache={folder / f'cold-{i}'}"]),
        "saving": lambda i: trained(folder, [*base, "checkpoint.every=4"]),
        "accumulate": lambda i: trained(folder, four),
        "elastic": lambda i: trained(folder, [*four, "run.deterministic=elastic"]),
    }
    trained(folder, base)  # fills the cache
    seen: dict[str, Steps] = {name: [] for name in contenders}
    for i in range(rounds):
        for name, contender in contenders.items():
            seen[name] += contender(i)[SKIPPED:]
    figures = {name: summary(found) for name, found in seen.items()}
    for name, figure in figures.items():
        reference = "accumulate" if name == "elastic" else "bare"
        figure["ratio"] = figure["step_s"] / figures[reference]["step_s"]
    return {
        "steps": steps,
        "rounds": rounds,
        "size": size,
        "figures": figures,
        "restart": restart(folder, base),
    }


def summary(steps: Steps) -> dict[str, float]:
    """Median step, and the shares of all time that went into waiting and saving."""
    total = sum(r["step_s"] for r in steps)
    return {
        "step_s": statistics.median(r["step_s"] for r in steps),
        "wait": sum(r["wait_s"] for r in steps) / total,
        "save": sum(r["save_s"] for r in steps) / total,
    }


def make_data(out: Path, count: int) -> None:
    """A dataset of drawings in shards of about 64 KiB."""
    from datasync.shapes import make_shapes
    from shards.writer import ShardWriter

    corpus = out.with_name("corpus")
    make_shapes(corpus, count=count)
    columns = {"image": "bytes", "caption": "str"}
    with ShardWriter(columns=columns, out=out, compression="zstd:3", size_limit="64kb") as writer:
        for line in (corpus / "metadata.jsonl").read_text().splitlines():
            entry = json.loads(line)
            image = (corpus / entry["file_name"]).read_bytes()
            writer.write({"image": image, "caption": entry["caption"]})


def configured(folder: Path, sets: list[str]) -> Any:
    from train.config import Config

    run = folder / "runs" / str(time.time_ns())
    tree = {
        "run": {"dir": str(run)},
        "data": {"remote": str(folder / "data")},
        "checkpoint": {"every": 10**9},
    }
    return Config.from_tree(tree, sets, where="bench")[0]


def trained(folder: Path, sets: list[str]) -> Steps:
    """The steps of a whole run."""
    from train.loop import run
    from train.metrics import steps_of

    config = configured(folder, sets)
    run(config)
    return steps_of(Path(config.run.dir) / "metrics.jsonl")


def bare(folder: Path, sets: list[str]) -> Steps:
    """The same batches from memory through the same model: nothing but the arithmetic."""
    from train.data import Feed
    from train.distributed import Team
    from train.documents import Encoder
    from train.loop import set_up_torch
    from train.optim import AdamW, clip_gradients
    from train.parallel import Engine, split
    from train.plan import build_model

    config = configured(folder, sets)
    team = Team(config.parallel)
    set_up_torch(config, team)
    encoder = Encoder(config)
    feed = Feed(config, team, encoder, *split(config, 1))
    batches = [feed.next().batches[0] for _ in range(config.run.steps)]
    engine = Engine(config, team, build_model(config, encoder.tokenizer.vocab))
    optimizer = AdamW(engine.model, config.optim)
    steps = []
    for step, batch in enumerate(batches):
        started = time.perf_counter()
        (engine.model(batch.tokens, **batch.inputs()) / batch.valid).backward()
        clip_gradients(engine.parameters, config.optim.clip).item()
        optimizer.step(step, config.optim.lr)
        optimizer.zero_grad()
        steps.append({"step_s": time.perf_counter() - started, "wait_s": 0.0, "save_s": 0.0})
    return steps


def restart(folder: Path, sets: list[str]) -> dict[str, float]:
    """Seconds from the start of a process to the first new step of a run that was interrupted."""
    from train.runs import summarise

    run = folder / "runs" / "restart"
    config = folder / "restart.toml"
    config.write_text(f'[run]\ndir = "{run}"\nsteps = 8\n[data]\nremote = "{folder / "data"}"\n')
    command = [sys.executable, "-m", "datasync.cli", "train", str(config), "--set", "checkpoint.every=4"]
    for text in sets[1:]:
        command += ["--set", text]
    stopped = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    marker = run / "checkpoints" / "step-00000004" / "commit.json"
    while stopped.poll() is None and not marker.exists():
        time.sleep(0.01)
    stopped.kill()
    stopped.wait()
    began = time.time()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    last = summarise(run).attempts[-1]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first = next(record for record in records if record["attempt"] == last.number)
    ready = first["time"] - first["step_s"]
    return {
        "imports_s": ready - last.setup_s - began,
        "setup_s": last.setup_s,
        "first_step_s": first["step_s"],
        "total_s": first["time"] - began,
    }


def table(result: dict[str, Any]) -> str:
    lines = [f"{'':<11} {'step':>9} {'ratio':>7} {'data wait':>10} {'saving':>8}"]
    for name, f in result["figures"].items():
        shares = f"{f['wait']:>10.2%} {f['save']:>8.2%}"
        lines.append(f"{name:<11} {1000 * f['step_s']:>6.1f} ms {f['ratio']:>7.3f} {shares}")
    r = result["restart"]
    lines.append(
        f"restart     {r['total_s']:.2f} s to the first new step: imports {r['imports_s']:.2f} s, "
        f"setting up and restoring {r['setup_s']:.2f} s, the step {r['first_step_s']:.2f} s"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
