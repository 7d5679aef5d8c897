"""What is unfinished or broken never passes for whole: not as a source, not in the exit code."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys

import pytest

from datasync.errors import StoreError, UsageError
from datasync.ops import receipts
from datasync.replicate import Options, Stop, replicate
from datasync.replicate.lease import held
from datasync.replicate.report import exit_code
from datasync.replicate.verify import verify
from datasync.storage.local import LocalStore
from tests.replicate.kit import (
    QUICK,
    Spy,
    data_of,
    datasync,
    environment,
    make_dataset,
    make_shards,
    write_tree,
)

CONFIG = """
[clusters.a]
url = "a"
[clusters.b]
url = "b"
[datasets.words]
source = "words.jsonl"
home = "a"
"""


@pytest.fixture
def work(tmp_path):
    (tmp_path / "datasync.toml").write_text(CONFIG)
    (tmp_path / "words.jsonl").write_text("".join(f'{{"id": {n}}}\n' for n in range(4000)))
    return tmp_path


def stopped_copy(source, copy, after):
    """A replication of a tree that was stopped after so many objects."""
    stop, seen = Stop(), itertools.count(1)

    def before(operation, key):
        if operation == "write" and not key.startswith("_datasync/") and next(seen) > after:
            stop.ask("a test")

    (outcome,) = replicate(source, {"b": Spy(copy, before)}, name="tree", options=QUICK, stop=stop)
    assert outcome.state == "stopped"


@pytest.fixture
def tree(tmp_path):
    write_tree(tmp_path / "a" / "tree", {f"f{n:02}": os.urandom(50_000) for n in range(40)})
    return LocalStore(tmp_path / "a" / "tree")


def test_a_copy_that_was_stopped_is_no_source(tree, tmp_path):
    half, third = LocalStore(tmp_path / "b" / "tree"), LocalStore(tmp_path / "c" / "tree")
    stopped_copy(tree, half, after=3)
    assert 0 < len(data_of(half)) < 40
    for as_tree in (False, True):
        with pytest.raises(StoreError, match="not finished: a replication to it"):
            replicate(half, {"c": third}, name="tree", options=Options(quiet=True, as_tree=as_tree))
    assert not (tmp_path / "c").exists() or receipts.read(third) is None
    replicate(tree, {"b": half}, name="tree", options=QUICK)
    (outcome,) = replicate(half, {"c": third}, name="tree", options=QUICK)
    assert outcome.state == "published"
    assert data_of(third) == data_of(tree)


def test_a_copy_between_two_versions_is_no_source(tree, tmp_path):
    copy, third = LocalStore(tmp_path / "b" / "tree"), LocalStore(tmp_path / "c" / "tree")
    replicate(tree, {"b": copy}, name="tree", options=QUICK)
    write_tree(tmp_path / "a" / "tree", {f"f{n:02}": os.urandom(50_000) for n in range(40)})
    stopped_copy(tree, copy, after=3)
    with pytest.raises(StoreError, match="not finished"):
        replicate(copy, {"c": third}, name="tree", options=QUICK)
    replicate(tree, {"b": copy}, name="tree", options=QUICK)
    with held(copy, "replicate tree"), pytest.raises(StoreError, match="not finished"):
        replicate(copy, {"c": third}, name="tree", options=QUICK)
    with held(copy, "verify tree"):  # which only reads
        replicate(copy, {"c": third}, name="tree", options=QUICK)
    assert data_of(third) == data_of(tree)


@pytest.mark.parametrize("how", ["killed", "a share of two"])
def test_a_dataset_that_is_being_sharded_is_no_tree(work, how):
    if how == "killed":
        # Everything up to the publication: what SIGKILL at that instant leaves.
        datasync("shard", "words", "--workers", "1", "-q", cwd=work)
        (work / "a" / "words" / "index.json").unlink()
        next((work / "a" / "words" / "_datasync" / "jobs").glob("*/done.json")).unlink()
    else:
        datasync("shard", "words.jsonl", "a:words", "--task", "0/2", "-q", cwd=work)
    for arguments in (["words"], ["a:words"], []):
        done = datasync("replicate", *arguments, "--to", "b", cwd=work, check=1)
        assert "datasync shard has begun there and published nothing" in done.stderr
        assert "mend:" in done.stderr
    assert not (work / "b" / "words").exists()
    datasync("wait", "words", "--cluster", "b", "--timeout", "1s", cwd=work, check=1)


@pytest.mark.parametrize("where", ["home", "copy"])
def test_a_dataset_whose_index_is_gone_is_no_tree(tmp_path, where):
    home, copy = LocalStore(tmp_path / "a" / "words"), LocalStore(tmp_path / "b" / "words")
    make_dataset(home)
    replicate(home, {"b": copy}, name="words", options=QUICK)
    source, other = (home, copy) if where == "home" else (copy, home)
    source.delete(["index.json"])
    for to in (LocalStore(tmp_path / "c" / "words"), other):
        with pytest.raises(StoreError, match=r"is a dataset whose index\.json is gone"):
            replicate(source, {"c": to}, name="words", options=QUICK)
    assert not (tmp_path / "c").exists() or receipts.read(LocalStore(tmp_path / "c" / "words")) is None


def test_a_copy_that_verify_found_damaged_is_no_source(tree, tmp_path):
    copy, third = LocalStore(tmp_path / "b" / "tree"), LocalStore(tmp_path / "c" / "tree")
    replicate(tree, {"b": copy}, name="tree", options=QUICK)
    copy.write("f03", b"damaged")
    assert not verify(copy, name="tree", quiet=True).good
    with pytest.raises(StoreError, match="is damaged: its own receipt says so"):
        replicate(copy, {"c": third}, name="tree", options=QUICK)
    replicate(tree, {"b": copy}, name="tree", options=QUICK)
    replicate(copy, {"c": third}, name="tree", options=QUICK)
    assert data_of(third) == data_of(tree)


def test_a_copied_tree_is_a_source(tree, tmp_path):
    copy, third = LocalStore(tmp_path / "b" / "tree"), LocalStore(tmp_path / "c" / "tree")
    for source, to in ((tree, copy), (copy, third)):
        (outcome,) = replicate(source, {"to": to}, name="tree", options=QUICK)
        assert outcome.state == "published"
    assert data_of(third) == data_of(tree)


def test_a_tree_is_not_copied_into_itself(tmp_path):
    write_tree(tmp_path / "a", {"x": b"1"})
    for _ in range(2):
        with pytest.raises(UsageError, match="lies inside the source"):
            replicate(LocalStore(tmp_path / "a"), {"in": LocalStore(tmp_path / "a" / "in")}, name="a")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["x"]


def test_a_failure_of_any_kind_is_a_failure(tree, tmp_path, monkeypatch):
    def broken(*_args, **_more):
        raise RuntimeError("a defect")

    monkeypatch.setattr("datasync.replicate.run.publish", broken)
    (outcome,) = replicate(tree, {"b": LocalStore(tmp_path / "b")}, name="tree", options=QUICK)
    assert outcome.state == "failed"
    assert "RuntimeError: a defect" in str(outcome.error)
    assert exit_code([outcome], stopped=4) == 1
    outcome.error = None
    assert exit_code([outcome], stopped=4) == 1


def test_a_folder_whose_name_is_no_unicode_gets_its_receipt(tmp_path):
    folder = os.fsencode(tmp_path) + b"/b\xe9"
    os.mkdir(folder)
    shards = make_shards(2)
    write_tree(tmp_path / "tree", shards)
    done = subprocess.run(
        [sys.executable, "-m", "datasync", "replicate", "../tree", "--to", "./copy", "--json"],
        cwd=folder,
        env=environment({"LC_ALL": "C.UTF-8"}),
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["replications"][0]["state"] == "published"
    copy = LocalStore(os.fsdecode(folder + b"/copy/tree"))
    receipt = receipts.read(copy)
    assert receipt.destination == copy.url
    assert data_of(copy) == shards
