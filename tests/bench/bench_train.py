"""What the trainer costs beside a bare loop over the same batches in memory.

    python -m tests.bench.bench_train [--steps 10] [--rounds 3] [--size 25m] [--batch 16] [--json]

Input: drawings with captions, made for the occasion, in compressed shards of 64 KiB. All figures are of one
thread a process on the CPU. The contenders take turns, `--rounds` times; the first two steps of each turn do
not count:

    bare        forward, backward, clipping and AdamW over microbatches that lie in memory; no data, no
                metrics
    trainer     `train.loop.run` from a warm cache: stream, decoding, metrics, everything
    paired      a step of the trainer and one of the bare loop in turn, in one process: their ratio says more
                than that of two runs, since both meet the same machine
    workers     the trainer with two DataLoader workers
    cold        the same with an empty cache, from an S3 server on loopback (SeaweedFS)
    saving      the same with a background checkpoint every `--every` steps
    elastic     deterministic = "elastic" with four microbatches, beside `accumulate`, four microbatches
                without
    elastic x2  the same on two ranks, beside `ddp x2`; both ranks share the machine

Printed: a step's seconds (median; from the end of one step to the end of the next, all told), the same over
that of its reference, the mean over the reference's mean, and the share of time that was spent waiting for
data and in saving. And a restart, from the start of the process to its first new step, broken down. On a
machine that others use too, ratios say more than seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.servers import S3Server, running, seaweedfs

Steps = list[dict[str, Any]]
SKIPPED = 2
REFERENCES = {"elastic": "accumulate", "saving": "trainer", "ddp x2": "ddp x2", "elastic x2": "ddp x2"}
"""What a contender is compared with, where that is not `bare`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", default="25m")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--only", default="", help="contenders, by comma; default: all")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, running(seaweedfs) as (server,):
        result = measure(Path(folder), server, arguments)
    print(json.dumps(result, indent=1) if arguments.json else table(result))


def measure(folder: Path, server: S3Server, options: argparse.Namespace) -> dict[str, Any]:
    """Run the contenders in turn; figures by name."""
    make_data(folder / "data", options.batch * (options.steps + 1))
    remote = copy_to(server, folder / "data")
    os.environ.update(server.environment, AWS_ENDPOINT_URL=server.endpoint)
    base = [
        f"run.steps={options.steps}",
        f"data.batch_size={options.batch}",
        f"model.size={options.size}",
        f"data.cache={folder / 'warm'}",
        "log.every=1000000",
        "run.threads=1",
    ]
    four = [*base, f"data.micro_batch={options.batch // 4}"]
    elastic = "run.deterministic=elastic"
    contenders: dict[str, Callable[[int], Steps]] = {
        "bare": lambda i: bare(folder, base),
        "trainer": lambda i: trained(folder, base),
        "paired": lambda i: paired(folder, base),
        "workers": lambda i: trained(folder, [*base, "data.workers=2"]),
        "cold": lambda i: trained(
            folder, [*base, f"data.cache={folder / f'cold-{i}'}", f"data.remote={remote}"]
        ),
        "saving": lambda i: trained(folder, [*base, f"checkpoint.every={options.every}"]),
        "accumulate": lambda i: trained(folder, four),
        "elastic": lambda i: trained(folder, [*four, elastic]),
        "ddp x2": lambda i: ranks(folder, [*four, "parallel.mode=ddp"]),
        "elastic x2": lambda i: ranks(folder, [*four, elastic]),
    }
    wanted = options.only.split(",") if options.only else [*contenders, "restart"]
    contenders = {name: contender for name, contender in contenders.items() if name in wanted}
    trained(folder, [*base, "run.steps=3"])  # fills the cache, at least its beginning
    seen: dict[str, Steps] = {name: [] for name in contenders}
    for i in range(options.rounds):
        for name, contender in contenders.items():
            seen[name] += contender(i)[SKIPPED:]
    figures = {name: summary(found) for name, found in seen.items()}
    for name, figure in figures.items():
        reference = figures.get(REFERENCES.get(name, "bare"), figure)
        figure["ratio"] = figure["step_s"] / reference["step_s"]
        figure["mean_ratio"] = figure["mean_s"] / reference["mean_s"]
    if "paired" in seen:
        figures["paired"]["ratio"] = statistics.median(r["step_s"] / r["bare_s"] for r in seen["paired"])
        figures["paired"]["mean_ratio"] = sum(r["step_s"] for r in seen["paired"]) / sum(
            r["bare_s"] for r in seen["paired"]
        )
    return {
        "options": vars(options),
        "figures": figures,
        "restart": restart(folder, base) if "restart" in wanted else None,
    }


def summary(steps: Steps) -> dict[str, float]:
    """Median and mean step, and the shares of all time that went into waiting and saving."""
    total = sum(r["step_s"] for r in steps)
    return {
        "step_s": statistics.median(r["step_s"] for r in steps),
        "mean_s": total / len(steps),
        "wait": sum(r["wait_s"] for r in steps) / total,
        "save": sum(r["save_s"] for r in steps) / total,
    }


def copy_to(server: S3Server, data: Path) -> str:
    """The dataset in a bucket of its own."""
    from datasync.storage import open_store

    url = server.url()
    store = open_store(url, **server.options)
    for path in sorted(p for p in data.rglob("*") if p.is_file()):
        store.write_file(path.relative_to(data).as_posix(), path)
    return url


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


def paired(folder: Path, sets: list[str]) -> Steps:
    """Steps of the trainer and of the bare loop in turn: the trainer's, each with the seconds of the bare
    step before it."""
    from train.distributed import Team
    from train.loop import Trainer
    from train.signals import StopRequest

    config = configured(folder, sets)
    trainer = Trainer(config, Team(config.parallel))
    trainer.restore()
    metrics, stop, steps = trainer._begin(), StopRequest(), []
    for bare_s in bare_steps(folder, sets):
        trainer._lap()
        started = time.perf_counter()
        record = trainer.one_step(stop)
        assert record is not None
        metrics.write(record)
        steps.append({**record, "step_s": time.perf_counter() - started, "bare_s": bare_s})
    stop.restore()
    trainer.feed.close()
    metrics.close()
    trainer.folder.close()
    return steps


def trained(folder: Path, sets: list[str]) -> Steps:
    """The steps of a whole run."""
    from train.loop import run
    from train.metrics import steps_of

    config = configured(folder, sets)
    run(config)
    return steps_of(Path(config.run.dir) / "metrics.jsonl")


def bare(folder: Path, sets: list[str]) -> Steps:
    """The same batches from memory through the same model: nothing but the arithmetic."""
    return [{"step_s": seconds, "wait_s": 0.0, "save_s": 0.0} for seconds in bare_steps(folder, sets)]


def bare_steps(folder: Path, sets: list[str]) -> Iterator[float]:
    """Seconds of each step of the bare loop, as it is made."""
    from train.data import Feed
    from train.distributed import Team
    from train.documents import Encoder
    from train.loop import set_up_torch
    from train.optim import AdamW, clip_gradients
    from train.parallel import Engine, microbatches
    from train.plan import build_model

    config = configured(folder, sets)
    team = Team(config.parallel)
    set_up_torch(config, team)
    encoder = Encoder(config)
    feed = Feed(config, team, encoder, microbatches(config, 1))
    batches = [feed.next().batches[0] for _ in range(config.run.steps)]
    engine = Engine(config, team, build_model(config, encoder.tokenizer.vocab))
    optimizer = AdamW(engine.model, config.optim)
    for step, batch in enumerate(batches):
        started = time.perf_counter()
        (engine.model(batch.tokens, **batch.inputs()) / batch.valid).backward()
        clip_gradients(engine.parameters, config.optim.clip).item()
        optimizer.step(step, config.optim.lr)
        optimizer.zero_grad()
        yield time.perf_counter() - started


def ranks(folder: Path, sets: list[str], world: int = 2) -> Steps:
    """The steps of a run under torchrun."""
    from train.metrics import steps_of

    run = folder / "runs" / str(time.time_ns())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    command += [
        "-m",
        "datasync.cli",
        "train",
        str(write_config(folder, run)),
        "--set",
        "checkpoint.every=1000000",
    ]
    for text in sets:
        command += ["--set", text]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return steps_of(run / "metrics.jsonl")


def write_config(folder: Path, run: Path) -> Path:
    path = folder / "run.toml"
    path.write_text(f'[run]\ndir = "{run}"\nsteps = 8\n[data]\nremote = "{folder / "data"}"\n')
    return path


def restart(folder: Path, sets: list[str]) -> dict[str, float]:
    """Seconds from the start of a process to the first new step of a run that was interrupted."""
    run = folder / "runs" / "restart"
    command = [sys.executable, "-m", "datasync.cli", "train", str(write_config(folder, run))]
    command += ["--set", "checkpoint.every=4"]
    for text in sets:
        command += ["--set", text]
    stopped = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    marker = run / "checkpoints" / "step-00000004" / "commit.json"
    while stopped.poll() is None and not marker.exists():
        time.sleep(0.01)
    stopped.kill()
    stopped.wait()
    began = time.time()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    start = [json.loads(line) for line in (run / "attempts.jsonl").read_text().splitlines()][-2]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first = next(record for record in records if record["attempt"] == start["attempt"])
    return {**start["setup"], "first step": first["step_s"], "in all": first["time"] - began}


def table(result: dict[str, Any]) -> str:
    lines = [f"{'':<11} {'step':>10} {'median':>7} {'mean':>7} {'data wait':>10} {'saving':>8}"]
    for name, f in result["figures"].items():
        shares = f"{f['wait']:>10.2%} {f['save']:>8.2%}"
        lines.append(
            f"{name:<11} {1000 * f['step_s']:>7.1f} ms {f['ratio']:>7.3f} {f['mean_ratio']:>7.3f} {shares}"
        )
    if result["restart"]:
        parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in result["restart"].items())
        lines.append(f"restart     {parts}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
