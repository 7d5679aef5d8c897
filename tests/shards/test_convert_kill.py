"""Killed at any instant and run again, a job ends with the same bytes, without doing finished tasks again."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from shards.index import Index
from shards.journal import Journal, jobs
from shards.sink import LocalSink
from tests.shards.corpus import command, jsonl, run, tree

OPTIONS = ["--size-limit", "6kb", "--on-error", "skip", "--workers", "2", "--quiet"]

# Slow in workers only: the columns are found by running it here.
SLOW = """
import sys, time
def change(row):
    time.sleep({seconds} * (sys.argv[0] == '-c'))
    return row
"""


def _corpus(folder: Path) -> Path:
    jsonl(folder / "a.jsonl", 900)
    with open(folder / "a.jsonl", "a") as file:
        file.write("not json\n" * 3)
    return folder / "a.jsonl"


def _start(source: Path, out: Path, *more: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command("shard", source, out, *OPTIONS, *more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _records(out: Path) -> dict[str, int]:
    """Records of finished tasks and when each was written."""
    found = {}
    for path in out.glob("_datasync/jobs/*/tasks/*.json"):
        try:
            found[path.name] = path.stat().st_mtime_ns
        except FileNotFoundError:
            continue
    return found


def _kill_and_go_on(folder: Path, kills: int, seed: int, *, append: bool = False) -> int:
    """Kill runs of one job at random instants until `kills` of them died, and compare each finished tree.

    With `append`, the job adds to a dataset that is there before.
    """
    chance = random.Random(seed)
    source = _corpus(folder)
    more = ("--append",) if append else ()
    if append:
        jsonl(folder / "first.jsonl", 100)
        assert run("shard", folder / "first.jsonl", folder / "first", *OPTIONS).returncode == 0
        shutil.copytree(folder / "first", folder / "calm")
    started = time.monotonic()
    calm = run("shard", source, folder / "calm", *OPTIONS, *more)
    length = time.monotonic() - started
    assert calm.returncode == 3, calm.stderr
    indexes = [(folder / name / "index.json").read_bytes() for name in ("calm", *(["first"] * append))]
    expected = tree(folder / "calm")
    codes = (0, 3) if append else (3,)  # where it has been appended already, nothing is skipped
    killed = at_work = round_ = 0
    while killed < kills:
        out = folder / f"out{round_}"
        round_ += 1
        if append:
            shutil.copytree(folder / "first", out)
        while True:
            before = _records(out)
            process = _start(source, out, *more)
            time.sleep(chance.uniform(0.2, 1.0) * length)
            if process.poll() is not None:
                assert process.returncode in codes
                length *= 0.95  # the machine has become faster: kill earlier
                break
            os.killpg(process.pid, signal.SIGKILL) if chance.random() < 0.5 else process.kill()
            process.wait()
            killed += 1
            after = _records(out)
            kept = before.keys() & after.keys()
            assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
            index = out / "index.json"
            begun = len(list(out.glob("_datasync/jobs/*/job.json"))) > append
            published = index.exists() and index.read_bytes() == indexes[0]
            at_work += begun and not published
            length *= 1 if begun else 1.03
            assert published or not index.exists() or index.read_bytes() in indexes
            if killed >= kills:
                assert run("shard", source, out, *OPTIONS, *more).returncode in codes
                break
        assert tree(out) == expected
    assert at_work >= kills // 4  # the others came before its journal, or behind its index
    return killed


def test_killed_a_few_times_the_bytes_are_the_same(tmp_path: Path) -> None:
    assert _kill_and_go_on(tmp_path, kills=4, seed=1) >= 4


def test_killed_while_it_appends_readers_see_the_old_or_the_new_and_the_bytes_are_the_same(
    tmp_path: Path,
) -> None:
    assert _kill_and_go_on(tmp_path, kills=3, seed=3, append=True) >= 3


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_killed_at_200_random_instants_the_bytes_are_the_same(tmp_path: Path) -> None:
    assert _kill_and_go_on(tmp_path, kills=200, seed=2) >= 200


def test_a_job_killed_before_its_index_is_finished_without_new_tasks(tmp_path: Path) -> None:
    """Every task is done and recorded, then the machine goes: only the commit is left."""
    source = _corpus(tmp_path)
    out = tmp_path / "out"
    assert run("shard", source, out, *OPTIONS, "--task", "0/1").returncode == 3
    result = run("shard", source, out, *OPTIONS, "--json")
    assert json.loads(result.stdout)["ran"] == 0
    assert (out / "index.json").exists()


def test_a_worker_that_dies_is_replaced_and_its_task_done_again(tmp_path: Path) -> None:
    source = _corpus(tmp_path)
    (tmp_path / "deadly.py").write_text(
        "import os, signal, sys\n"
        "def change(row):\n"
        "    if row['id'] == 500 and sys.argv[0] == '-c' and not os.path.exists('died'):\n"
        "        open('died', 'w').close()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return row\n"
    )
    options = [*OPTIONS, "--transform", "deadly:change"]
    result = run("shard", source, tmp_path / "out", *options, cwd=tmp_path)
    assert (tmp_path / "died").exists()
    assert result.returncode == 3, result.stderr
    assert "trying it again" in result.stderr
    assert run("shard", source, tmp_path / "calm", *options, cwd=tmp_path).returncode == 3
    assert tree(tmp_path / "out") == tree(tmp_path / "calm")


def test_a_task_that_always_kills_its_worker_ends_the_job_with_its_number(tmp_path: Path) -> None:
    source = _corpus(tmp_path)
    (tmp_path / "deadly.py").write_text(
        "import os, sys\n"
        "def change(row):\n"
        "    if row['id'] == 500 and sys.argv[0] == '-c': os._exit(9)\n"
        "    return row\n"
    )
    result = run("shard", source, tmp_path / "out", *OPTIONS, "--transform", "deadly:change", cwd=tmp_path)
    assert result.returncode == 1
    assert "ended its worker 3 times (last exit status 9)" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out" / "index.json").exists()


def test_ctrl_c_leaves_no_process_and_a_job_that_goes_on(tmp_path: Path) -> None:
    source = _corpus(tmp_path)
    (tmp_path / "slow.py").write_text(SLOW.format(seconds=0.002))
    arguments = command("shard", source, tmp_path / "out", *OPTIONS, "--transform", "slow:change")
    process = subprocess.Popen(
        arguments,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.fspath(Path(__file__).resolve().parents[2])},
    )
    deadline = time.monotonic() + 30
    while not _records(tmp_path / "out") and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert err.strip() == "interrupted; run the same command again to continue"
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert _records(tmp_path / "out")
    assert (
        run(
            "shard", source, tmp_path / "out", *OPTIONS, "--transform", "slow:change", cwd=tmp_path
        ).returncode
        == 3
    )


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    source = _corpus(tmp_path)
    (tmp_path / "slow.py").write_text(SLOW.format(seconds=0.05))
    process = subprocess.Popen(
        command("shard", source, tmp_path / "out", *OPTIONS, "--transform", "slow:change"),
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.fspath(Path(__file__).resolve().parents[2])},
    )
    deadline = time.monotonic() + 30
    children: set[int] = set()
    while len(children) < 2 and time.monotonic() < deadline:
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        children = set(map(int, listed))
        time.sleep(0.02)
    assert len(children) == 2
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{child}").exists() for child in children)


def test_the_journal_of_an_outdated_job_goes_with_the_shards_that_only_it_named(tmp_path: Path) -> None:
    source = _corpus(tmp_path)
    out = tmp_path / "out"
    assert run("shard", source, out, *OPTIONS, "--task", "0/2").returncode in (0, 3)
    (old,) = jobs(LocalSink(out))
    before = {path.name for path in (out / "shards").iterdir()}
    jsonl(source, 350)
    assert run("shard", source, out, *OPTIONS).returncode == 0
    sink = LocalSink(out)
    assert old not in jobs(sink)
    assert all(Journal(sink, name).done() for name in jobs(sink))
    named = {shard.stored.basename for shard in Index.parse(sink.read("index.json"), where="index").shards}
    assert {f"shards/{path.name}" for path in (out / "shards").iterdir()} == named
    assert before - {name.removeprefix("shards/") for name in named}
