"""MosaicML Streaming's sample sequence, in a process of its own: `their_order.py CONFIG.json` prints it.

The configuration is one dataset with its cases, or a list of those. The library keeps state in named shared
memory, so every use of it gets a process; what a rank's worker `w` of `K` would get is computed by its own
code with the worker's place set in a `World`.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main(path: str) -> None:
    with open(path) as file:
        config = json.load(file)
    if isinstance(config, list):
        json.dump([sequences(one) for one in config], sys.stdout)
    else:
        json.dump(sequences(config), sys.stdout)


def sequences(config: dict[str, Any]) -> list[Any]:
    """For each case, a list of samples for every worker of the world; or what the library says against it."""
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
        dataset.shuffle_block_size = config["options"].get("shuffle_block_size")
        world = World(nodes, per_node, workers, 0)
        dataset._resume(world, case["epoch"])  # nothing to resume: what was not given is chosen
        try:
            work = generate_work(dataset.batching_method, dataset, world, case["epoch"], case["sample"])
        except ValueError as error:
            result.append(f"refused: {error}")
            continue
        per_worker = work.reshape(nodes * per_node * workers, -1)
        result.append([[int(i) for i in row if i >= 0] for row in per_worker])
    return result


if __name__ == "__main__":
    main(sys.argv[1])
