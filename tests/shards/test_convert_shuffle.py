"""The shuffle: every row once, in an order that is random, the same for any workers, and of the seed."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from shards.convert import convert, merge
from shards.errors import FormatError
from tests.shards.corpus import command, jsonl, rows, tree

SMALL = 4096


def ids(dataset: Path) -> list[int]:
    return [row["id"] for row in rows(dataset)]


def test_every_row_comes_once_in_an_order_of_the_seed(tmp_path: Path) -> None:
    made = jsonl(tmp_path / "a.jsonl", 600)
    convert(tmp_path / "a.jsonl", tmp_path / "one", shuffle_seed=1, size_limit=SMALL, workers=1)
    convert(tmp_path / "a.jsonl", tmp_path / "again", shuffle_seed=1, size_limit=SMALL, workers=3)
    convert(tmp_path / "a.jsonl", tmp_path / "other", shuffle_seed=2, size_limit=SMALL, workers=1)
    one, other = rows(tmp_path / "one"), ids(tmp_path / "other")
    assert sorted((row["id"], row["text"]) for row in one) == [(row["id"], row["text"]) for row in made]
    assert tree(tmp_path / "one") == tree(tmp_path / "again")
    assert [row["id"] for row in one] != other
    assert sorted(other) == list(range(600))
    assert not list((tmp_path / "one").glob("_datasync/jobs/*/runs"))


def test_the_order_is_global(tmp_path: Path) -> None:
    """Rows of the beginning are spread over the whole: ranks before and after do not correlate."""
    jsonl(tmp_path / "a.jsonl", 2000)
    convert(tmp_path / "a.jsonl", tmp_path / "out", shuffle_seed=7, size_limit=SMALL, workers=1)
    order = np.array(ids(tmp_path / "out"))
    assert abs(np.corrcoef(order, np.arange(len(order)))[0, 1]) < 0.1
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.1


def test_splits_and_bad_rows_go_through_a_shuffle(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", 300)
    with open(tmp_path / "a.jsonl", "a") as file:
        file.write("bad\n")
    options = {"shuffle_seed": 3, "size_limit": SMALL, "on_error": "skip", "split": {"a": 0.7, "b": 0.3}}
    result = convert(tmp_path / "a.jsonl", tmp_path / "out", **options)
    assert (result.rows, result.skipped) == (300, 1)
    assert sorted(ids(tmp_path / "out" / "a") + ids(tmp_path / "out" / "b")) == list(range(300))
    assert convert(tmp_path / "a.jsonl", tmp_path / "out", **options).finished


def test_a_shuffle_that_is_killed_goes_on_with_the_same_bytes(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", 600)
    convert(tmp_path / "a.jsonl", tmp_path / "calm", shuffle_seed=1, size_limit=SMALL)
    arguments = [
        tmp_path / "a.jsonl",
        tmp_path / "out",
        "--shuffle-seed",
        "1",
        "--size-limit",
        str(SMALL),
        "-q",
    ]
    for _ in range(3):
        process = subprocess.Popen(command("shard", *arguments, "--workers", "1"), stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        start = len(list(tmp_path.glob("out/_datasync/jobs/*/tasks/*")))
        while process.poll() is None and time.monotonic() < deadline:
            if len(list(tmp_path.glob("out/_datasync/jobs/*/tasks/*"))) >= start + 12:
                break
            time.sleep(0.005)
        process.kill()
        process.wait()
    convert(tmp_path / "a.jsonl", tmp_path / "out", shuffle_seed=1, size_limit=SMALL)
    assert tree(tmp_path / "out") == tree(tmp_path / "calm")


@pytest.mark.parametrize("splits", [{}, {"train": 0.7, "val": 0.3}])
def test_shares_of_machines_shuffle_in_two_rounds(tmp_path: Path, splits: dict[str, float]) -> None:
    jsonl(tmp_path / "a.jsonl", 300)
    options = {"shuffle_seed": 1, "size_limit": SMALL, "split": splits}
    convert(tmp_path / "a.jsonl", tmp_path / "calm", **options)
    out = tmp_path / "out"
    shares = [convert(tmp_path / "a.jsonl", out, task=(share, 3), **options) for share in range(3)]
    assert [share.pending for share in shares] == [True, True, False]
    with pytest.raises(FormatError, match="are not finished"):
        merge(out)
    shares = [convert(tmp_path / "a.jsonl", out, task=(share, 3), **options) for share in range(3)]
    assert [share.pending for share in shares] == [False] * 3
    assert shares[2].ran == 0
    merged = merge(out)
    assert sum(part.samples for part in merged.published) == 300
    assert tree(out) == tree(tmp_path / "calm")
