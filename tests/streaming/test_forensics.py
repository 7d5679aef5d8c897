"""What a batch was made of is computed again, by the library and by `datasync sample`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import PIL.Image
import pytest

from datasync import StreamingDataLoader, StreamingDataset
from datasync.errors import UsageError
from datasync.streaming.forensics import batch_samples
from shards.writer import ShardWriter
from tests.streaming.order_helpers import as_rank, ids, write_dataset


@pytest.fixture(scope="module")
def remote(tmp_path_factory):
    return str(write_dataset(tmp_path_factory.mktemp("remote"), 300))


def test_batches_are_traced_to_the_samples_that_they_had(remote, tmp_path, monkeypatch):
    seen = []
    for rank in range(2):
        as_rank(monkeypatch, rank, 2)
        made = StreamingDataset(remote=remote, local=str(tmp_path), batch_size=16, shuffle=True)
        made.next_epoch = 1
        seen.append([ids(batch) for batch in StreamingDataLoader(made, num_workers=2)])
    as_rank(monkeypatch, 0, 1)
    alone = StreamingDataset(remote=remote, local=str(tmp_path), global_batch_size=32, shuffle=True)
    for step in (0, 3, 9):  # the last one is the short one
        for rank in range(2):
            traced = batch_samples(alone, epoch=1, step=step, rank=rank, ranks=2)
            assert [alone[n]["id"] for n in traced.tolist()] == seen[rank][step]
    with pytest.raises(UsageError, match="no batch 10"):
        batch_samples(alone, epoch=1, step=10)
    with pytest.raises(UsageError, match="no rank 2"):
        batch_samples(alone, epoch=1, step=0, rank=2, ranks=2)


@pytest.mark.parametrize("algorithm", ["py1e", "py2s"])
def test_batches_in_mosaicmls_order_are_traced_too(remote, tmp_path, monkeypatch, algorithm):
    pytest.importorskip("streaming", reason="MosaicML Streaming is not installed")
    options = {"remote": remote, "local": str(tmp_path / "c"), "shuffle": True, "shuffle_algo": algorithm}
    seen = []
    for rank in range(4):
        as_rank(monkeypatch, rank, 4, per_node=2)
        made = StreamingDataset(batch_size=8, sample_ids=True, **options)
        made.next_epoch = 1
        loader = StreamingDataLoader(made, num_workers=2 if rank == 3 else 0)
        seen.append([batch["sample_id"].tolist() for batch in loader])
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(variable)
    alone = StreamingDataset(batch_size=32, **options)
    for step in (0, 3, 9):
        for rank in range(4):
            where = {"epoch": 1, "step": step, "rank": rank, "ranks": 4, "ranks_per_node": 2}
            assert batch_samples(alone, **where).tolist() == seen[rank][step]
    with pytest.raises(UsageError, match="no batch 10"):
        batch_samples(alone, epoch=1, step=10, ranks=4)
    options = ["--epoch", "1", "--step", "3", "--batch-size", "32", "--ranks", "4", "--ranks-per-node", "2"]
    done = command(remote, *options, "--argument", f"shuffle_algo={algorithm}", "--json", cache=tmp_path)
    assert [row["sample_id"] for row in json.loads(done.stdout)] == [n for rank in seen for n in rank[3]]


def test_other_arguments_of_the_run_can_be_named(remote, tmp_path):
    made = StreamingDataset(
        remote=remote,
        local=str(tmp_path / "c"),
        batch_size=8,
        shuffle=True,
        shuffle_block_size=50,
        epoch_size=80,
        sampling_method="fixed",
    )
    batches = [ids(batch) for batch in StreamingDataLoader(made)]
    options = [remote, "--step", "5", "--batch-size", "8", "--epoch-size", "80", "--json"]
    more = ["--argument", "shuffle_block_size=50", "--argument", "sampling_method=fixed"]
    done = command(*options, *more, cache=tmp_path)
    assert [row["sample_id"] for row in json.loads(done.stdout)] == batches[5]
    refused = command(*options, "--argument", "weather=fine", cache=tmp_path)
    assert refused.returncode == 2
    assert "no argument of the order" in refused.stderr


def command(*arguments, cache):
    return subprocess.run(
        [sys.executable, "-m", "datasync.cli", "sample", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "DATASYNC_CACHE": str(cache)},
    )


def test_the_command_prints_a_batch(remote, tmp_path):
    made = StreamingDataset(remote=remote, local=str(tmp_path / "c"), batch_size=8, shuffle=True)
    loader = StreamingDataLoader(made)
    batches = [ids(batch) for batch in loader]
    options = [remote, "--step", "5", "--batch-size", "8"]
    done = command(*options, "--json", "--show", cache=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["sample_id"] for row in rows] == batches[5]
    assert [row["values"]["text"] for row in rows] == [f"sample {i}" for i in batches[5]]
    state = tmp_path / "state.json"
    state.write_text(json.dumps(made.state_dict(8, True)))
    plain = command(*options, "--rank", "1", "--ranks", "2", "--state", str(state), cache=tmp_path)
    assert [int(line.split()[0]) for line in plain.stdout.splitlines()] == batches[5][4:]
    refused = command(*options, "--state", str(state), "--seed", "1", cache=tmp_path)
    assert refused.returncode == 2
    assert "shuffle_seed was 9176, is 1" in refused.stderr


def test_the_command_describes_an_image(tmp_path):
    with ShardWriter(out=tmp_path / "remote", columns={"image": "png"}) as writer:
        writer.write({"image": PIL.Image.new("RGB", (4, 6))})
    shown = command(str(tmp_path / "remote"), "--step", "0", "--batch-size", "1", "--show", cache=tmp_path)
    assert "image: PNG 4x6 RGB" in shown.stdout
