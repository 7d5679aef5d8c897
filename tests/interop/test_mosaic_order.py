"""With `shuffle_algo` one of MosaicML Streaming's, the order is that library's, sample for sample."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from datasync import Stream, StreamingDataLoader, StreamingDataset
from datasync.errors import UsageError
from datasync.streaming.mosaic import worker_samples
from datasync.streaming.world import World
from tests.streaming.order_helpers import as_rank, flat, ids, write_dataset

pytest.importorskip("streaming", reason="MosaicML Streaming is not installed")

# Each case imports that library in a process of its own, which takes seconds: the rest are slow tests.
ALGORITHMS = [
    "py1e",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("py1br", "py1s", "py2s", "naive")),
]
METHODS = [
    "stratified",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("per_stream", "device_per_stream")),
]
WORLDS = [  # nodes, ranks a node, workers a rank
    (1, 1, 1),
    (1, 2, 2),
    (2, 2, 1),
    (2, 4, 3),
]


@pytest.fixture(scope="module")
def remotes(tmp_path_factory):
    return [
        str(write_dataset(tmp_path_factory.mktemp("first"), 700)),
        str(write_dataset(tmp_path_factory.mktemp("second"), 410, first=1000)),
    ]


def theirs(tmp_path: Path, remotes, weights, options, cases):
    """Their sequences for each case, each a list of samples for every worker of the world."""
    return run_theirs(tmp_path, their_config(tmp_path, remotes, weights, options, cases))


def their_config(tmp_path: Path, remotes, weights, options, cases):
    """What `their_order.py` is given."""
    return {
        "streams": [
            {"remote": remote, "local": str(tmp_path / f"theirs{i}"), **weight}
            for i, (remote, weight) in enumerate(zip(remotes, weights, strict=True))
        ],
        "options": {"batch_size": 4, **options},
        "cases": cases,
    }


def run_theirs(tmp_path: Path, config):
    """What `their_order.py` prints."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    script = Path(__file__).with_name("their_order.py")
    done = subprocess.run(
        [sys.executable, str(script), str(path)], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def ours(tmp_path: Path, remotes, weights, options, cases):
    """Ours, asked in the same way."""
    result = []
    for case in cases:
        nodes, per_node, workers = case["world"]
        streams = [
            Stream(remote=remote, local=str(tmp_path / f"ours{i}"), **weight)
            for i, (remote, weight) in enumerate(zip(remotes, weights, strict=True))
        ]
        made = StreamingDataset(streams=streams, batch_size=case["batch_size"], **options)
        if case["canonical_nodes"] is not None:
            made.load_state_dict(
                {
                    "epoch": case["epoch"],
                    "sample_in_epoch": case["sample"],
                    "num_canonical_nodes": case["canonical_nodes"],
                    "shuffle_seed": made.shuffle_seed,
                    "initial_physical_nodes": case["initial_nodes"],
                }
            )
        per_worker = []
        for rank in range(nodes * per_node):
            for worker in range(workers):
                world = World(
                    rank=rank,
                    ranks=nodes * per_node,
                    ranks_per_node=per_node,
                    worker=worker,
                    workers=workers,
                )
                made._world = World(rank=rank, ranks=nodes * per_node, ranks_per_node=per_node)
                try:
                    per_worker.append(worker_samples(made, world, case["epoch"], case["sample"]).tolist())
                except UsageError as error:
                    said = error.message.removeprefix("MosaicML Streaming refuses this order: ")
                    per_worker.append(f"refused: {said}")
        refused = [said for said in per_worker if isinstance(said, str)]
        result.append(refused[0] if refused else per_worker)
    return result


def every_case():
    cases = []
    for world in WORLDS:
        for epoch, step in ((0, 0), (1, 0), (3, 9)):
            ranks = world[0] * world[1]
            cases.append(
                {
                    "world": world,
                    "batch_size": 4,
                    "canonical_nodes": 4,
                    "initial_nodes": 2 if step else None,
                    "epoch": epoch,
                    "sample": step * 4 * ranks,
                }
            )
    return cases


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_whole_sequence_is_theirs_over_ranks_workers_and_resumes(tmp_path, remotes, algorithm):
    options = {"shuffle": True, "shuffle_algo": algorithm, "shuffle_seed": 77, "shuffle_block_size": 200}
    weights = [{}, {"repeat": 1.5}]
    cases = every_case()
    expected = theirs(tmp_path, remotes, weights, options, cases)
    assert ours(tmp_path, remotes, weights, options, cases) == expected


@pytest.mark.parametrize("method", METHODS)
def test_batching_methods_are_theirs(tmp_path, remotes, method):
    options = {
        "shuffle": True,
        "shuffle_algo": "py1s",
        "batching_method": method,
        "shuffle_block_size": 300,
        "epoch_size": 900,
    }
    weights = [{"proportion": 0.7}, {"proportion": 0.3}]
    cases = every_case()
    expected = theirs(tmp_path, remotes, weights, options, cases)
    assert ours(tmp_path, remotes, weights, options, cases) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("method", "granularity"), [("balanced", 1), ("balanced", 10), ("fixed", 7)])
def test_sampling_is_theirs(tmp_path, remotes, method, granularity):
    options = {
        "shuffle": True,
        "shuffle_algo": "py1br",
        "sampling_method": method,
        "sampling_granularity": granularity,
        "shuffle_block_size": 300,
    }
    weights = [{"choose": 333}, {"choose": 555}]
    cases = every_case()
    expected = theirs(tmp_path, remotes, weights, options, cases)
    assert ours(tmp_path, remotes, weights, options, cases) == expected


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_any_combination_of_settings_and_worlds_goes_on_from_any_state(tmp_path, remotes, seed):
    """Each algorithm, batching and sampling method, drawn together; states of other worlds than the one."""
    random = Random(seed)
    runs = []
    draws = itertools.cycle(("py1e", "py1br", "py1s", "py2s", "naive", None))
    for _, algorithm in zip(range(24), draws, strict=False):
        options = {
            "shuffle": algorithm is not None,
            "shuffle_algo": algorithm or "py1e",
            "shuffle_seed": random.randrange(10_000),
            "shuffle_block_size": random.choice([50, 200, 3000]),
            "batching_method": random.choice(["random", "stratified", "per_stream", "device_per_stream"]),
            "sampling_method": random.choice(["balanced", "fixed"]),
            "sampling_granularity": random.choice([1, 7, 30]),
            "partition_algo": random.choice(["relaxed", "orig"]),
        }
        weights = random.choice(
            [[{}, {}], [{"proportion": 0.6}, {"proportion": 0.4}], [{"repeat": 0.7}, {"choose": 500}]]
        )
        cases = []
        for _ in range(3):
            nodes, per_node, workers = random.choice([(1, 1, 1), (1, 2, 2), (2, 2, 1), (2, 1, 3), (4, 2, 1)])
            batch = random.choice([1, 4, 6])
            cases.append(
                {
                    "world": (nodes, per_node, workers),
                    "batch_size": batch,
                    "canonical_nodes": random.choice([1, 2, 4, 8]),
                    "initial_nodes": random.choice([None, 1, 2, 4]),
                    "epoch": random.randrange(5),
                    "sample": random.randrange(20) * batch * nodes * per_node,
                }
            )
        runs.append((weights, options, cases))
    configs = []
    for i, run in enumerate(runs):
        (tmp_path / f"run{i}").mkdir()
        configs.append(their_config(tmp_path / f"run{i}", remotes, *run))
    expected = run_theirs(tmp_path, configs)
    for i, (run, wanted) in enumerate(zip(runs, expected, strict=True)):
        assert ours(tmp_path / f"run{i}", remotes, *run) == wanted, run
    given = [case for run in expected for case in run if not isinstance(case, str)]
    assert len(given) > 48, "most combinations are not refused"


def awkward(random: Random, samples: int, block_size: int | None):
    """Proportions of two streams whose blocks would have another size by the samples that they give."""
    while True:
        weights = [random.uniform(0.3, 3) for _ in range(2)]
        shares = [weight / sum(weights) for weight in weights]
        rounded = [int(samples * share) / samples for share in shares]
        if block_size is None or any(
            int(block_size * a) != int(block_size * b) for a, b in zip(shares, rounded, strict=True)
        ):
            return weights


@pytest.mark.parametrize(
    "method",
    [
        "per_stream",
        *(pytest.param(m, marks=pytest.mark.slow) for m in ("random", "stratified", "device_per_stream")),
    ],
)
def test_blocks_and_batches_are_divided_by_the_share_that_was_asked_for(tmp_path, remotes, method):
    """Proportions that an epoch cannot have exactly, with and without `epoch_size` and a block size."""
    random = Random(6)
    runs = []
    for algorithm, epoch_size, block_size in itertools.product(
        ("py1e", "py1br", "py1s", "py2s", "naive"),
        (None, 997),
        (None, 100, 317),
    ):
        options = {
            "shuffle": True,
            "shuffle_algo": algorithm,
            "batching_method": method,
            "shuffle_seed": random.randrange(10_000),
        }
        options |= {"epoch_size": epoch_size} if epoch_size else {}
        options |= {"shuffle_block_size": block_size} if block_size else {}
        weights = [{"proportion": p} for p in awkward(random, epoch_size or 1110, block_size)]
        if not block_size and epoch_size:
            weights = [{} for _ in remotes]
        case = {
            "world": random.choice([(1, 1, 1), (1, 2, 2), (2, 2, 1)]),
            "batch_size": random.choice([4, 6, 8]),
            "canonical_nodes": None,
            "initial_nodes": None,
            "epoch": random.randrange(3),
            "sample": 0,
        }
        runs.append((weights, options, [case]))
    configs = []
    for i, run in enumerate(runs):
        (tmp_path / f"run{i}").mkdir()
        configs.append(their_config(tmp_path / f"run{i}", remotes, *run))
    expected = run_theirs(tmp_path, configs)
    for i, (run, wanted) in enumerate(zip(runs, expected, strict=True)):
        assert ours(tmp_path / f"run{i}", remotes, *run) == wanted, run
    assert sum(not isinstance(case, str) for run in expected for case in run) > 24


def test_a_state_with_other_shares_is_refused_though_the_counts_are_the_same(tmp_path, remotes):
    def build(share):
        streams = [
            Stream(remote=remote, local=str(tmp_path / f"{i}"), proportion=proportion)
            for i, (remote, proportion) in enumerate(zip(remotes, (share, 1 - share), strict=True))
        ]
        return StreamingDataset(
            streams=streams, epoch_size=10, batch_size=2, shuffle=True, shuffle_algo="py1e", shuffle_seed=5
        )

    first, second = build(0.6), build(0.604)
    assert [stream.choose for stream in first.streams] == [stream.choose for stream in second.streams]
    build(0.6).load_state_dict(first.state_dict())
    with pytest.raises(UsageError, match="mixture"):
        second.load_state_dict(first.state_dict())


@pytest.mark.slow
def test_without_shuffling_the_partition_is_theirs(tmp_path, remotes):
    options = {"shuffle": False, "shuffle_algo": "py1e", "partition_algo": "orig"}
    cases = every_case()
    expected = theirs(tmp_path, remotes, [{}, {}], options, cases)
    assert ours(tmp_path, remotes, [{}, {}], options, cases) == expected


def test_a_run_of_theirs_goes_on_here_in_the_middle_of_an_epoch(tmp_path, remotes):
    """The state that their loader saves after 20 batches goes on in ours with what it had not given."""
    script = tmp_path / "their_run.py"
    script.write_text(
        "import json, sys\n"
        "from streaming import Stream, StreamingDataset, StreamingDataLoader\n"
        f"remotes, root = {remotes!r}, {str(tmp_path)!r}\n"
        "streams = [Stream(remote=r, local=f'{root}/run{i}') for i, r in enumerate(remotes)]\n"
        "dataset = StreamingDataset(streams=streams, batch_size=8, shuffle=True, shuffle_algo='py1e',\n"
        "                           num_canonical_nodes=2, shuffle_seed=5)\n"
        "loader = StreamingDataLoader(dataset, batch_size=8)\n"
        "got, state = [], None\n"
        "for step, batch in enumerate(loader, 1):\n"
        "    got.append([int(i) for i in batch['id']])\n"
        "    if step == 20: state = loader.state_dict()\n"
        "print(json.dumps([got, state]))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    got, state = json.loads(done.stdout.splitlines()[-1])

    def build(**options):
        streams = [Stream(remote=r, local=str(tmp_path / f"mine{i}")) for i, r in enumerate(remotes)]
        return StreamingDataset(streams=streams, batch_size=8, shuffle=True, **options)

    loader = StreamingDataLoader(build(shuffle_algo="py1e"))
    loader.load_state_dict(state)
    resumed = [ids(batch) for batch in loader]
    assert resumed == got[20:]
    # And on with ours, from our own state.
    loader = StreamingDataLoader(build(shuffle_algo="py1e"), num_workers=2)
    loader.load_state_dict(state)
    batches = iter(loader)
    first = [ids(next(batches)) for _ in range(7)]
    again = StreamingDataLoader(build(shuffle_algo="py1e", shuffle_seed=5))
    again.load_state_dict(loader.state_dict())
    assert first + [ids(batch) for batch in again] == got[20:]
    # Our own order does not take it for its own.
    with pytest.raises(UsageError, match="MosaicML"):
        StreamingDataLoader(build()).load_state_dict(state)


def test_ranks_get_what_their_partition_gives_them(tmp_path, remotes, monkeypatch):
    seen = []
    for rank in range(2):
        as_rank(monkeypatch, rank, 2)
        streams = [Stream(remote=r, local=str(tmp_path / f"rank{i}")) for i, r in enumerate(remotes)]
        made = StreamingDataset(
            streams=streams, batch_size=5, shuffle=True, shuffle_algo="py1s", num_canonical_nodes=2
        )
        seen.append(flat(ids(batch) for batch in StreamingDataLoader(made, num_workers=2)))
    assert len(seen[0]) == len(seen[1]) == 555
    assert len(set(flat(seen))) == 1110


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_epoch_goes_on_to_its_last_batch_and_then_to_the_next_one(remotes, tmp_path, monkeypatch, seed):
    """Epochs are longer than their size where samples are repeated, and shorter where batches are dropped."""
    random = Random(seed)
    longer = shorter = 0
    for algorithm, method in itertools.product(
        ("py1e", "py1s", "naive"), ("random", "random", "stratified", "per_stream", "device_per_stream")
    ):
        ranks = random.choice([1, 2])
        options = {
            "shuffle": True,
            "shuffle_algo": algorithm,
            "batching_method": method,
            "partition_algo": random.choice(["orig", "relaxed"]),
            "num_canonical_nodes": random.choice([2, 16, 64]),
            "batch_size": random.choice([3, 7]),
            "epoch_size": random.choice([301, 403]),
        }
        workers, drop_last = random.choice([0, 0, 0, 2]), random.choice([True, False])

        def load(state=None, options=options, workers=workers, drop_last=drop_last):
            streams = [Stream(remote=r, local=str(tmp_path / f"own{i}")) for i, r in enumerate(remotes)]
            made = StreamingDataset(streams=streams, **options)
            loader = StreamingDataLoader(made, num_workers=workers, drop_last=drop_last)
            if state is not None:
                loader.load_state_dict(state)
            return loader

        as_rank(monkeypatch, random.randrange(ranks), ranks)
        loader, states, epochs = load(), [], []
        for _ in range(2):
            epochs.append([])
            for batch in loader:
                epochs[-1].append(ids(batch))
                states.append(loader.state_dict())
        assert loader.state_dict()["epoch"] == 2
        count = len(epochs[0])
        for done in (count - random.choice([2, 3, 4, 5]), count - 1, count):
            resumed = load(states[done - 1])
            given = [[ids(batch) for batch in resumed] for _ in range(2 if done < count else 1)]
            assert given == ([epochs[0][done:], epochs[1]] if done < count else epochs[1:]), options
        longer += count * options["batch_size"] * ranks > options["epoch_size"] + 16
        shorter += count * options["batch_size"] * ranks < options["epoch_size"] - 16
    assert longer
    assert shorter


@pytest.mark.parametrize("name", ["tail", "curriculum", "global_batch_size"])
def test_what_their_order_cannot_have_is_refused(remotes, tmp_path, name):
    value = {"tail": "drop", "curriculum": [(0, [1.0])], "global_batch_size": 8}[name]
    with pytest.raises(UsageError, match=f"`{name}` does not go with"):
        StreamingDataset(
            remote=remotes[0], local=str(tmp_path), shuffle=True, shuffle_algo="py1e", **{name: value}
        )


def test_without_that_library_the_mend_is_named(remotes, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "streaming.base.batching", None)
    made = StreamingDataset(
        remote=remotes[0], local=str(tmp_path), batch_size=8, shuffle=True, shuffle_algo="py1e"
    )
    with pytest.raises(UsageError, match=r"pip install 'datasync\[mosaicml\]'"):
        iter(made)


def test_our_shuffle_mixes_at_least_as_well_as_py1e_holding_as_many_shards():
    import numpy as np
    from streaming.base.shuffle import get_shuffle

    from datasync.streaming.order import OrderSettings, StreamOrder
    from datasync.streaming.quality import measure

    sizes = np.full(256, 60)
    orders = [
        StreamOrder(
            sizes,
            15_360,
            stream=0,
            epoch=epoch,
            settings=OrderSettings(seed=9176, shuffle=True, lanes=64),
        )
        for epoch in (0, 1)
    ]
    located = [order.locate(np.arange(15_360)) for order in orders]
    mine = measure([shard * 60 + row for shard, row in located], sizes, 128)
    py1e = measure([get_shuffle("py1e", sizes, 1, 9176, e, 64 * 60) for e in (0, 1)], sizes, 128)
    assert mine.held <= py1e.held
    assert mine.same_shard <= py1e.same_shard
    assert mine.neighbours <= py1e.neighbours
    assert mine.again <= py1e.again


def test_groups_of_replicated_ranks_are_theirs():
    """Their order depends on nodes, so groups have to be counted as nodes and ranks in their way."""
    from streaming.base.world import World as TheirWorld

    compared = 0
    for nodes, per_node in ((1, 1), (1, 8), (2, 4), (4, 2), (3, 4), (4, 1), (2, 6)):
        for replication in range(1, nodes * per_node + 1):
            if nodes * per_node % replication:
                continue
            for rank in range(nodes * per_node):
                ours = World(rank=rank, ranks=nodes * per_node, ranks_per_node=per_node).replicate(
                    replication
                )
                theirs = TheirWorld(nodes, per_node, 1, rank).replicate(replication)
                assert (ours.rank, ours.ranks, ours.nodes, ours.ranks_per_node) == (
                    theirs.rank,
                    theirs.num_ranks,
                    theirs.num_nodes,
                    theirs.ranks_per_node,
                )
                compared += 1
    assert compared > 150
