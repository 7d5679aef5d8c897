"""The Ray engine: the same bytes as the local one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.shards.corpus import jsonl, run, tree

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
