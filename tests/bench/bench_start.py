"""The first batch: after construction, and after resuming in mid-epoch, at 10^6, 10^8 and 10^10 samples.

    python tests/bench/bench_start.py [--theirs] [--json]

An index of that many samples names the same real shard over and over: 100, 1,000 and 10,000 times. What
is left of a dataset's size is its index.json, about 600 bytes a shard, which is read and checked once at
construction.

Each measurement is a process of its own, which has imported everything before its clock starts: `start`
is from the constructor to the first batch, `resume` the same with a position in the middle of the epoch
loaded, `memory` the growth of the resident set over both. With `--theirs`, MosaicML Streaming is measured
beside it up to 10^8.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SIZES = {10**6: 10_000, 10**8: 100_000, 10**10: 1_000_000}
BATCH = 64


def make_index(folder: Path, samples: int, per_shard: int) -> None:
    """A dataset of `samples` samples whose shards are one real file under few names."""
    sys.path.insert(0, str(ROOT))
    from shards.index import Index
    from shards.writer import ShardWriter

    with ShardWriter(out=folder, columns={"x": "uint8"}, size_limit=None, hashes=["xxh3_64"]) as writer:
        for i in range(per_shard):
            writer.write({"x": i % 256})
    text = (folder / "index.json").read_bytes()
    (info,) = Index.parse(text, where="index.json").shards
    (folder / "index.json").write_bytes(Index([info] * (samples // per_shard)).dumps())


def rss() -> int:
    """Bytes of the resident set."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure_ours(folder: str, local: str, samples: int) -> dict[str, float]:
    sys.path.insert(0, str(ROOT))
    from datasync import StreamingDataLoader, StreamingDataset

    def first(position: int | None) -> float:
        began = time.perf_counter()
        dataset = StreamingDataset(remote=folder, local=local, batch_size=BATCH, shuffle=True)
        loader = StreamingDataLoader(dataset)
        if position is not None:
            loader.load_state_dict(dataset.state_dict(position, True))
        next(iter(loader))
        seconds = time.perf_counter() - began
        dataset.close()
        return seconds

    before = rss()
    return {"start": first(None), "resume": first(samples // 2 // BATCH * BATCH), "memory": rss() - before}


def measure_theirs(folder: str, local: str, samples: int) -> dict[str, float]:
    from streaming import StreamingDataLoader, StreamingDataset

    def first(position: int | None, where: str) -> float:
        began = time.perf_counter()
        dataset = StreamingDataset(
            remote=folder, local=where, batch_size=BATCH, shuffle=True, num_canonical_nodes=1
        )
        loader = StreamingDataLoader(dataset, batch_size=BATCH)
        if position is not None:
            state = {"epoch": 0, "sample_in_epoch": position, "num_canonical_nodes": 1, "shuffle_seed": 9176}
            loader.load_state_dict({**state, "initial_physical_nodes": 1})
        next(iter(loader))
        return time.perf_counter() - began

    before = rss()
    result = {
        "start": first(None, local + "/a"),
        "resume": first(samples // 2 // BATCH * BATCH, local + "/b"),
    }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {**result, "memory": peak - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--theirs", action="store_true", help="also measure MosaicML Streaming")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--one", nargs=4, metavar=("WHO", "FOLDER", "LOCAL", "SAMPLES"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.one:
        who, folder, local, samples = options.one
        run = measure_ours if who == "datasync" else measure_theirs
        print(json.dumps(run(folder, local, int(samples))), flush=True)
        os._exit(0)  # their threads do not end with the process
    results = []
    for samples, per_shard in SIZES.items():
        root = Path(tempfile.mkdtemp())
        try:
            make_index(root / "remote", samples, per_shard)
            contenders = ["datasync"]
            if options.theirs and samples <= 10**8:
                contenders.append("mosaicml")
            for who in contenders:
                command = [sys.executable, __file__, "--one", who, root / "remote", root / who, samples]
                done = subprocess.run(
                    [str(part) for part in command], capture_output=True, text=True, check=False
                )
                row = {"who": who, "samples": samples, "shards": samples // per_shard}
                try:
                    row |= json.loads(done.stdout.splitlines()[-1])
                except (IndexError, ValueError):
                    row["failed"] = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
                results.append(row)
                if not options.json:
                    print(describe(row), flush=True)
        finally:
            shutil.rmtree(root)
    if options.json:
        print(json.dumps(results))


def describe(row: dict[str, object]) -> str:
    head = f"{row['who']:9} {row['samples']:>14,} samples in {row['shards']:>7,} shards"
    if "failed" in row:
        return f"{head}   failed: {row['failed']}"
    return (
        f"{head}   start {row['start']:7.3f} s   resume {row['resume']:7.3f} s"
        f"   memory {float(str(row['memory'])) / 2**20:7.1f} MiB"
    )


if __name__ == "__main__":
    main()
