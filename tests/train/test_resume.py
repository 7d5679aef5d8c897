"""N steps are k steps and N-k steps, bit for bit, on one rank; every way of stopping."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.servers import S3Server
from tests.train.ranks import TREE, records, run, start

STEPS = 24  # 240 samples in batches of 16: 15 steps an epoch


def sets(shapes: Path, folder: Path, *more: str) -> list[str]:
    return [
        f"data.remote={shapes}", f"run.dir={folder}", f"run.steps={STEPS}", "checkpoint.every=4",
        "model.dropout=0.1", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    run(1, *sets(shapes, folder))
    return folder


def digest(folder: Path) -> str:
    return str(json.loads((folder / "summary.json").read_text())["digest"])


def same_steps(a: Path, b: Path) -> bool:
    """Every step saw the same samples and had the same loss and norm to the last bit."""
    keep = ("step", "loss", "norm", "ledger", "batch", "epoch", "samples")
    return [[r[k] for k in keep] for r in records(a)] == [[r[k] for k in keep] for r in records(b)]


def test_the_loss_falls_and_each_epoch_sees_every_sample_once(undisturbed: Path) -> None:
    steps = records(undisturbed)
    assert [r["step"] for r in steps] == list(range(1, STEPS + 1))
    assert steps[-1]["loss"] < 0.7 * steps[0]["loss"]
    first, second = steps[:15], steps[15:]
    assert {r["epoch"] for r in first} == {0}
    assert {r["epoch"] for r in second} == {1}
    assert len({r["ledger"] for r in steps}) == STEPS


def write_config(shapes: Path, folder: Path) -> Path:
    tree = {**TREE, "data": {**TREE["data"], "remote": str(shapes)}}
    lines = []
    for section, values in tree.items():
        lines.append(f"[{section}]")
        inner = {key: value for key, value in values.items() if not isinstance(value, dict)}
        lines += [f"{key} = {json.dumps(value)}" for key, value in inner.items()]
        for name in values.keys() - inner.keys():
            lines.append(f"[{section}.{name}]")
            lines += [f"{key} = {json.dumps(value)}" for key, value in values[name].items()]
    path = folder / "run.toml"
    path.write_text("\n".join(lines))
    return path


def command(config: Path, shapes: Path, folder: Path, *more: str) -> list[str]:
    out = [sys.executable, "-m", "datasync.cli", "train", str(config)]
    for text in sets(shapes, folder, *more):
        out += ["--set", text]
    return out


def test_killed_at_random_twice_and_started_again_it_ends_with_the_same_bits(
    shapes: Path, undisturbed: Path, tmp_path: Path
) -> None:
    config, folder = write_config(shapes, tmp_path), tmp_path / "killed"
    chance = random.Random(time.time_ns())
    kills = sorted(chance.sample(range(2, STEPS - 1), 2))
    for kill in kills:
        with subprocess.Popen(command(config, shapes, folder), stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            for line in process.stderr:
                if line.startswith(f"step {kill}/") or line.startswith(f"step  {kill}/"):
                    process.send_signal(signal.SIGKILL)
                    break
            process.communicate()
            assert process.returncode == -signal.SIGKILL, (kills, kill)
    done = subprocess.run(command(config, shapes, folder, "log.every=100"), capture_output=True, text=True)
    assert done.returncode == 0, (kills, done.stderr)
    assert digest(folder) == digest(undisturbed), kills
    assert same_steps(folder, undisturbed), kills
    assert digest(folder) in done.stdout


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGUSR1", 138)])
def test_a_signal_saves_and_exits_with_its_code(
    shapes: Path, undisturbed: Path, tmp_path: Path, name: str, code: int
) -> None:
    folder = tmp_path / name
    outcome = start(1, *sets(shapes, folder, f"fault.signal=0:9:{name}")).wait()[0]
    assert (outcome["kind"], outcome["code"]) == ("StoppedError", code)
    assert f"stopped by {name} after step" in outcome["error"]
    assert len(records(folder)) in (9, 10)
    run(1, *sets(shapes, folder))
    assert digest(folder) == digest(undisturbed)
    assert same_steps(folder, undisturbed)


def test_a_signal_to_the_whole_group_does_not_take_the_workers_away_before_the_save(
    shapes: Path, undisturbed: Path, tmp_path: Path
) -> None:
    config, folder = write_config(shapes, tmp_path), tmp_path / "group"
    more = ("data.workers=2", "checkpoint.every=100")
    with subprocess.Popen(
        command(config, shapes, folder, *more), stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("step  6/"):
                os.killpg(process.pid, signal.SIGTERM)
                break
        said = process.stderr.read()
        assert process.wait(60) == 143, said
    assert "everything is saved" in said
    assert "worker" not in said.lower()
    stopped = len(records(folder))
    run(1, *sets(shapes, folder, *more))
    assert next(r["step"] for r in records(folder) if r["attempt"] == 2) == stopped + 1
    assert digest(folder) == digest(undisturbed)


def test_background_checkpoints_resume_to_the_same_bits(
    shapes: Path, undisturbed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "async"
    start(1, *sets(shapes, folder, "checkpoint.asynchronous=true", "fault.kill=0:17")).wait()
    assert len(records(folder)) == 17
    run(1, *sets(shapes, folder, "checkpoint.asynchronous=true"))
    assert digest(folder) == digest(undisturbed)


def test_workers_change_nothing(shapes: Path, undisturbed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "workers"
    start(1, *sets(shapes, folder, "data.workers=2", "fault.kill=0:13")).wait()
    run(1, *sets(shapes, folder, "data.workers=1"))
    assert digest(folder) == digest(undisturbed)
    assert same_steps(folder, undisturbed)


def test_a_flipped_bit_in_the_newest_checkpoint_costs_steps_and_no_bits(
    shapes: Path, undisturbed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "flipped"
    start(1, *sets(shapes, folder, "fault.kill=0:14")).wait()
    newest = folder / "checkpoints" / "step-00000012" / "__0_0.distcp"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 4
    newest.write_bytes(data)
    run(1, *sets(shapes, folder))
    again = [
        r["step"]
        for r in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        if r["attempt"] == 2
    ]
    assert again[0] == 9
    assert digest(folder) == digest(undisturbed)


def test_checkpoints_in_another_store_resume_on_another_machine(
    shapes: Path, undisturbed: Path, tmp_path: Path
) -> None:
    store = f"checkpoint.url={tmp_path / 'store'}"
    start(1, *sets(shapes, tmp_path / "here", store, "fault.kill=0:10")).wait()
    run(1, *sets(shapes, tmp_path / "there", store))
    assert digest(tmp_path / "there") == digest(undisturbed)
    assert [r["step"] for r in records(tmp_path / "there")] == list(range(9, STEPS + 1))


def test_a_replicated_checkpoint_is_whole_and_continues_on_another_cluster(
    shapes: Path, undisturbed: Path, tmp_path: Path
) -> None:
    clusters = tmp_path / "clusters.toml"
    clusters.write_text(
        "".join(f'[clusters.{name}]\nurl = "{tmp_path / name}"\n' for name in ("here", "there"))
    )
    variables = {"DATASYNC_CONFIG": str(clusters)}
    (tmp_path / "here").mkdir()
    start(
        1, *sets(shapes, tmp_path / "one", "checkpoint.url=here:kept", "fault.kill=0:10"), **variables
    ).wait()
    copy = [sys.executable, "-m", "datasync.cli", "replicate", "here:kept", "--to", "there:kept"]
    done = subprocess.run(copy, env={**os.environ, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (tmp_path / "here").rename(tmp_path / "gone")
    two = tmp_path / "two"
    outcome = start(1, *sets(shapes, two, "checkpoint.url=there:kept"), **variables).wait()[0]
    assert outcome["digest"] == digest(undisturbed)
    assert [r["step"] for r in records(two)] == list(range(9, STEPS + 1))


def test_other_data_is_refused_by_name_and_taken_where_it_is_meant(shapes: Path, tmp_path: Path) -> None:
    from datasync.shapes import make_shapes
    from shards.writer import ShardWriter

    make_shapes(tmp_path / "corpus", count=64, pixels=16, seed=9)
    with ShardWriter(columns={"image": "bytes", "caption": "str"}, out=tmp_path / "other") as writer:
        for path in sorted((tmp_path / "corpus").glob("*.png")):
            writer.write({"image": path.read_bytes(), "caption": path.stem})
    folder = tmp_path / "run"
    start(1, *sets(shapes, folder, "fault.kill=0:6")).wait()
    other = sets(tmp_path / "other", folder)
    refused = start(1, *other).wait()[0]
    assert refused["code"] == 2
    assert "dataset was" in refused["error"]
    assert "--accept NAME" in refused["error"]
    run(1, *other, "accept.dataset", "accept.epoch_size", "accept.mixture")
    assert records(folder)[-1]["step"] == STEPS


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_checkpoints_in_a_bucket(
    shapes: Path, undisturbed: Path, tmp_path: Path, s3_a: S3Server, asynchronous: str
) -> None:
    (tmp_path / "clusters.toml").write_text(
        f'[clusters.away]\nurl = "s3://{s3_a.bucket()}"\nendpoint = "{s3_a.endpoint}"\n'
    )
    variables = {"DATASYNC_CONFIG": str(tmp_path / "clusters.toml"), **s3_a.environment}
    more = ("checkpoint.url=away:runs/one", f"checkpoint.asynchronous={asynchronous}")
    start(1, *sets(shapes, tmp_path / "run", *more, "fault.kill=0:15"), **variables).wait()
    outcomes = start(1, *sets(shapes, tmp_path / "elsewhere", *more), **variables).wait()
    assert outcomes[0]["digest"] == digest(undisturbed)
    assert records(tmp_path / "elsewhere")[0]["step"] in (9, 13)
    assert not list((tmp_path / "elsewhere" / "staging").glob("*"))


def test_a_finished_run_is_only_told_of(shapes: Path, undisturbed: Path) -> None:
    before = (undisturbed / "metrics.jsonl").read_bytes()
    assert run(1, *sets(shapes, undisturbed))["digest"] == digest(undisturbed)
    assert (undisturbed / "metrics.jsonl").read_bytes() == before
