"""Loaders of others over our dataset: torchdata's StatefulDataLoader and Accelerate, without glue."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from datasync import StreamingDataLoader, StreamingDataset
from datasync.errors import UsageError
from tests.streaming.order_helpers import flat, ids, write_dataset


@pytest.fixture(scope="module")
def remote(tmp_path_factory):
    return str(write_dataset(tmp_path_factory.mktemp("remote"), 400))


@pytest.fixture
def build(remote, tmp_path):
    def make(**options):
        return StreamingDataset(
            remote=remote, local=str(tmp_path / "cache"), batch_size=8, shuffle=True, **options
        )

    return make


@pytest.mark.parametrize(("workers", "steps"), [(0, 0), (0, 7), (0, 49), (2, 0), (2, 7)])
def test_a_stateful_dataloader_resumes_where_it_was(build, workers, steps):
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

    def loader():
        return stateful.StatefulDataLoader(build(), batch_size=8, num_workers=workers)

    first = loader()
    whole = [ids(batch) for _ in range(3) for batch in first]
    second = loader()
    got = [ids(batch) for _, batch in zip(range(steps), second, strict=False)]
    state = json.loads(json.dumps(second.state_dict()))
    third = loader()
    third.load_state_dict(state)
    got += [ids(batch) for _ in range(2) for batch in third]
    assert got == whole[: len(got)]
    assert len(got) >= 100


class Thirds(StreamingDataset):
    def __iter__(self):
        return (sample for sample in super().__iter__() if sample["id"] % 3 == 0)


class Lazily(StreamingDataset):
    def __iter__(self):
        for sample in super().__iter__():
            if sample["id"] % 3 == 0:
                yield sample


@pytest.mark.parametrize("kind", [Thirds, Lazily])
@pytest.mark.parametrize(("workers", "options"), [(0, {}), (2, {"persistent_workers": True})])
@pytest.mark.parametrize("steps", [1, 5])
def test_a_stateful_dataloader_resumes_a_dataset_with_an_iter_of_its_own(
    remote, tmp_path, kind, workers, options, steps
):
    """It keeps what each worker has read, so a filter is exact, twice in a row and into the next epoch."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

    def loader():
        made = kind(remote=remote, local=str(tmp_path / "cache"), batch_size=8, shuffle=True)
        return stateful.StatefulDataLoader(made, batch_size=8, num_workers=workers, **options)

    first = loader()
    whole = [ids(batch) for _ in range(2) for batch in first]
    got, state = [], None
    for _ in range(2):
        made = loader()
        if state is not None:
            made.load_state_dict(state)
        batches = iter(made)
        got += [ids(next(batches)) for _ in range(steps)]
        state = json.loads(json.dumps(made.state_dict()))
    made = loader()
    made.load_state_dict(state)
    got += [ids(batch) for _ in range(2) for batch in made]
    assert got == whole


def test_a_stateful_dataloader_refuses_the_state_of_another_order(build):
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    loader = stateful.StatefulDataLoader(build(), batch_size=8)
    next(iter(loader))
    other = stateful.StatefulDataLoader(build(shuffle_seed=1), batch_size=8)
    other.load_state_dict(loader.state_dict())
    with pytest.raises(UsageError, match="shuffle_seed"):
        next(iter(other))


@pytest.mark.parametrize("workers", [0, 2])
def test_accelerate_keeps_the_position_with_its_own_state(build, tmp_path, workers):
    accelerate = pytest.importorskip("accelerate", reason="Accelerate is not installed")

    def prepared():
        accelerator = accelerate.Accelerator(cpu=True)
        return accelerator, accelerator.prepare(StreamingDataLoader(build(), num_workers=workers))

    _, loader = prepared()
    whole = [ids(batch) for _ in range(2) for batch in loader]
    accelerator, loader = prepared()
    got = [ids(batch) for _, batch in zip(range(17), loader, strict=False)]
    accelerator.save_state(str(tmp_path / "state"))
    accelerator, loader = prepared()
    accelerator.load_state(str(tmp_path / "state"))
    assert got + [ids(batch) for _ in range(2) for batch in loader] == whole


SCRIPT = """
import json, os, sys
from datasync import StreamingDataLoader, StreamingDataset
def prepare(loader):
    return loader
if {accelerate}:
    from accelerate import Accelerator
    prepare = Accelerator(cpu=True).prepare
dataset = StreamingDataset(remote={remote!r}, local={local!r}, batch_size=8, shuffle=True)
loader = prepare(StreamingDataLoader(dataset, num_workers=1))
got = [[int(i) for i in batch["id"]] for batch in loader]
with open({out!r} + os.environ.get("RANK", "0"), "w") as file:
    json.dump(got, file)
"""


@pytest.mark.parametrize(("ranks", "accelerate"), [(2, False), (1, True), (2, True)])
def test_ranks_of_torchrun_and_accelerate_get_their_part_once(remote, tmp_path, ranks, accelerate):
    if accelerate:
        pytest.importorskip("accelerate", reason="Accelerate is not installed")
    script = tmp_path / "script.py"
    script.write_text(
        SCRIPT.format(
            remote=remote, local=str(tmp_path / "c"), out=str(tmp_path / "rank"), accelerate=accelerate
        )
    )
    command = [sys.executable, str(script)]
    if ranks > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        command = [*launcher, "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    parts = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(ranks)]
    together = [flat(step) for step in zip(*parts, strict=True)]
    expected = StreamingDataset(remote=remote, local=str(tmp_path / "c"), batch_size=8 * ranks, shuffle=True)
    assert together == [ids(batch) for batch in StreamingDataLoader(expected)]
