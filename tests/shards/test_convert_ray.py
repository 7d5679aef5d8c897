"""The Ray engine: the same bytes as the local one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.shards.corpus import jsonl, rows, run, start, tree

pytest.importorskip("ray")


def test_ray_gives_the_same_bytes_and_the_same_refusals(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", 300)
    with open(tmp_path / "a.jsonl", "a") as file:
        file.write("bad\n")
    options = [tmp_path / "a.jsonl", "--size-limit", "16kb", "--on-error", "skip", "-q"]
    calm = run("shard", *options[:1], tmp_path / "calm", *options[1:])
    assert calm.returncode == 3, calm.stderr
    result = run("shard", *options[:1], tmp_path / "ray", *options[1:], "--engine", "ray", "--workers", "2")
    assert result.returncode == 3, result.stderr
    assert tree(tmp_path / "ray") == tree(tmp_path / "calm")
    strict = run("shard", tmp_path / "a.jsonl", tmp_path / "x", "--engine", "ray", "--workers", "1")
    assert strict.returncode == 1
    assert "not JSON" in strict.stderr
    assert "Traceback" not in strict.stderr


def test_a_cluster_that_is_not_there_is_one_clear_error(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", 3)
    result = run("shard", tmp_path / "a.jsonl", tmp_path / "x", "--engine", "ray", "--address", "127.0.0.1:1")
    assert result.returncode == 1
    assert "127.0.0.1:1" in result.stderr
    assert "Traceback" not in result.stderr


SLOW = """
import os, time
def change(row):
    if os.path.exists({flag!r}) and row["id"] % 40 == 0:
        time.sleep(0.3)
    return {{**row, "more": helper(row["id"])}}
def helper(number):
    return number * 2
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_node_that_dies_costs_its_tasks_another_try_and_no_byte(tmp_path: Path) -> None:
    """A cluster of three nodes that does not know the user's module; one node is killed at work."""
    import ray
    from ray.cluster_utils import Cluster

    made = jsonl(tmp_path / "a.jsonl", 1200)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "mine.py").write_text(SLOW.format(flag=str(tmp_path / "slow")))
    options = ["--transform", "mine:change", "--size-limit", "16kb", "-q"]
    calm = run("shard", tmp_path / "a.jsonl", tmp_path / "calm", *options, cwd=tmp_path / "here")
    assert calm.returncode == 0, calm.stderr
    (tmp_path / "slow").touch()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        first = cluster.add_node(num_cpus=1)
        cluster.add_node(num_cpus=1)
        arguments = ["shard", tmp_path / "a.jsonl", tmp_path / "ray", *options, "--engine", "ray"]
        process = start(*arguments, "--address", cluster.address, cwd=tmp_path / "here")
        deadline = time.monotonic() + 100
        while len(list(tmp_path.glob("ray/_datasync/jobs/*/tasks/*"))) < 4 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert process.poll() is None
        cluster.remove_node(first, allow_graceful=False)
        _, err = process.communicate(timeout=150)
    finally:
        cluster.shutdown()
        ray.shutdown()
    assert process.returncode == 0, err
    assert tree(tmp_path / "ray") == tree(tmp_path / "calm")
    assert [row["more"] for row in rows(tmp_path / "ray")] == [2 * row["id"] for row in made]
