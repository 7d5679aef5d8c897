"""MosaicML Streaming's sample sequence, in a process of its own: `their_order.py CONFIG.json` prints it.

The library keeps state in named shared memory, so every rank, worker and resume gets a process; what a rank's
worker `w` of `K` would get is computed by its own code with the worker's place set in a `World`.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main(path: str) -> None:
    with open(path) as file:
        config = json.load(file)
    from streaming import Stream, StreamingDataset
    from streaming.base.batching import generate_work
    from streaming.base.world import World

    streams = [Stream(**stream) for stream in config["streams"]]
    dataset = StreamingDataset(streams=streams, **config["options"])
    result: list[Any] = []
    for case in config["cases"]:
        nodes, per_node, workers = case["world"]
        dataset.batch_size = case["batch_size"]
        dataset.num_canonical_nodes = case["canonical_nodes"]
        dataset.initial_physical_nodes = case["initial_nodes"]
        world = World(nodes, per_node, workers, 0)
        dataset._set_shuffle_block_size(world)
        work = generate_work(dataset.batching_method, dataset, world, case["epoch"], case["sample"])
        per_worker = work.reshape(nodes * per_node * workers, -1)
        result.append([[int(i) for i in row if i >= 0] for row in per_worker])
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
