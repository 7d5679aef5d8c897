"""The quality of shuffles, each with the shards it holds at a time: ours beside MosaicML's py1e and py1s.

    python tests/bench/bench_shuffle.py [--shards 640] [--samples 200] [--batch 256] [--json]

The measures are those of `datasync.streaming.quality`; 1.00 is a uniformly random permutation. py1e is given
the block sizes with which it holds about as many shards as ours, and more.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from datasync.streaming.order import OrderSettings, StreamOrder
from datasync.streaming.quality import measure


def our_epoch(sizes: np.ndarray, lanes: int, epoch: int) -> np.ndarray:
    settings = OrderSettings(seed=9176, shuffle=True, lanes=lanes)
    order = StreamOrder(sizes, int(sizes.sum()), stream=0, epoch=epoch, settings=settings)
    shard, row = order.locate(np.arange(order.samples))
    return (np.cumsum(sizes) - sizes)[shard] + row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shards", type=int, default=640)
    parser.add_argument("--samples", type=int, default=200, help="samples of a shard")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    sizes = np.full(options.shards, options.samples)
    total = int(sizes.sum())
    made = {f"lanes, L = {lanes}": [our_epoch(sizes, lanes, e) for e in (0, 1)] for lanes in (1, 8, 64)}
    try:
        from streaming.base.shuffle import get_shuffle
    except ImportError:
        print("MosaicML Streaming is not installed; ours alone", file=sys.stderr)
    else:
        for held in (32, 64, 128):
            block = held * options.samples
            made[f"py1e, block {block:,}"] = [get_shuffle("py1e", sizes, 1, 9176, e, block) for e in (0, 1)]
        made["py1s, 64 nodes"] = [
            get_shuffle("py1s", sizes, 64, 9176, e).reshape(64, -1).T.ravel() for e in (0, 1)
        ]
    made["random"] = [np.random.default_rng(e).permutation(total) for e in (0, 1)]
    results = {name: asdict(measure(epochs, sizes, options.batch)) for name, epochs in made.items()}
    if options.json:
        print(json.dumps(results))
        return
    print(f"{total:,} samples in {options.shards} shards, batches of {options.batch}; 1.00 is random\n")
    print(f"{'shuffle':20} {'shards held':>12} {'same shard':>11} {'neighbours':>11} {'again':>7}")
    for name, row in results.items():
        measures = f"{row['same_shard']:>11.2f} {row['neighbours']:>11.2f} {row['again']:>7.2f}"
        print(f"{name:20} {row['held']:>12} {measures}")


if __name__ == "__main__":
    main()
