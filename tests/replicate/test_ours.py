"""What this tool wrote is its own, whatever ended the run that wrote it; what others wrote never is."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datasync.errors import StoreError
from datasync.ops.gc import gc
from datasync.replicate import replicate
from datasync.storage.base import Store
from datasync.storage.local import LocalStore
from shards.index import Index
from tests.replicate.kit import (
    QUICK,
    data_of,
    datasync,
    make_dataset,
    shard_bytes,
    shard_info,
    start,
    write_tree,
)

DELETE = replace(QUICK, delete=True, max_delete=1.0)


def unpublished(*_: object, **__: object) -> None:
    raise StoreError("killed")


def killed(source: Store, b: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but what follows the last object, with no record of any: what SIGKILL can leave."""
    with monkeypatch.context() as patched:
        patched.setattr("datasync.replicate.run.publish", unpublished)
        patched.setattr("datasync.replicate.journal.Journal.flush", lambda self: None)
        (outcome,) = replicate(source, {"b": b}, name="tree", options=QUICK)
    assert outcome.error is not None


def test_what_a_killed_run_wrote_is_removed_with_its_source(tmp_path, monkeypatch):
    source, b = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")
    write_tree(tmp_path / "a", {f"f{n:02d}": bytes([n]) * 900 for n in range(20)})
    b.write("f03", bytes([3]) * 900)  # somebody else's, and right
    b.write("notes.txt", b"somebody else's too")
    killed(source, b, monkeypatch)
    (outcome,) = replicate(source, {"b": b}, name="tree", options=QUICK)
    assert outcome.tally.copied == 0
    assert outcome.receipt.adopted == 1
    source.delete([f"f{n:02d}" for n in range(1, 20)])
    (outcome,) = replicate(source, {"b": b}, name="tree", options=DELETE)
    assert outcome.deleted == 18
    assert set(data_of(b)) == {"f00", "f03", "notes.txt"}


def test_what_only_got_a_new_time_stays_ours(tmp_path):
    source, b = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")
    write_tree(tmp_path / "a", dict.fromkeys(("x", "y", "z"), b"same"))
    replicate(source, {"b": b}, name="tree", options=QUICK)
    write_tree(tmp_path / "a", dict.fromkeys(("x", "y", "z"), b"same"))  # new inodes, new times
    (outcome,) = replicate(source, {"b": b}, name="tree", options=QUICK)
    assert sorted(outcome.tally.adopted) == ["x", "y", "z"]
    source.delete(["x"])
    replicate(source, {"b": b}, name="tree", options=QUICK)
    source.delete(["y"])
    replicate(source, {"b": b}, name="tree", options=QUICK)
    write_tree(tmp_path / "a", {"x": b"same"})  # back again: an older receipt knows it
    replicate(source, {"b": b}, name="tree", options=QUICK)
    source.delete(["x"])
    (outcome,) = replicate(source, {"b": b}, name="tree", options=DELETE)
    assert set(data_of(b)) == {"z"}


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_after_any_kills_and_changes_only_others_objects_are_left(tmp_path_factory, data):
    """Sources change, runs are killed before any record: in the end the source is there, and foreign ones."""
    folder = tmp_path_factory.mktemp("any")
    source, b = LocalStore(folder / "a"), LocalStore(folder / "b")
    names = [f"f{n}" for n in range(6)]
    foreign = data.draw(st.sets(st.sampled_from(names)), label="foreign")
    content = {name: name.encode() * 7 for name in names}
    for name in foreign:
        b.write(name, content[name])
    for _ in range(data.draw(st.integers(1, 4), label="runs")):
        keep = data.draw(st.sets(st.sampled_from(names), min_size=1), label="source has")
        source.delete([name for name in names if name not in keep])
        write_tree(folder / "a", {name: content[name] for name in keep})
        if data.draw(st.booleans(), label="killed"):
            with pytest.MonkeyPatch.context() as patch:
                killed(source, b, patch)
        else:
            replicate(source, {"b": b}, name="tree", options=QUICK)
    replicate(source, {"b": b}, name="tree", options=DELETE)
    assert set(data_of(b)) == set(data_of(source)) | foreign


def test_gc_removes_what_a_killed_run_left_of_a_version_that_never_came(tmp_path, monkeypatch):
    source, b = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")
    killed_shards = make_dataset(source, count=5, seed="killed")
    killed(source, b, monkeypatch)
    source.delete(list(killed_shards))
    shards = make_dataset(source, count=3, seed="new")
    replicate(source, {"b": b}, name="tree", options=QUICK)
    assert set(data_of(b)) == {*killed_shards, *shards, "index.json"}
    found = gc(b, name="tree", keep=1)
    assert (set(found.keys), found.bytes) == (set(killed_shards), sum(map(len, killed_shards.values())))
    gc(b, name="tree", keep=1, apply=True)
    assert data_of(b) == data_of(source)
    assert gc(b, name="tree", keep=1).keys == []


def test_sigkill_then_delete(tmp_path):
    (tmp_path / "datasync.toml").write_text('[clusters.b]\nurl = "b"\nrate_limit = "8 MiB/s"\n')
    write_tree(tmp_path / "tree", {f"f{n:03d}": random.Random(n).randbytes(50_000) for n in range(120)})
    for _ in range(2):
        process = start("replicate", "./tree", "--to", "b", "-q", cwd=tmp_path)
        time.sleep(0.9)
        process.kill()
        process.communicate()
    datasync("replicate", "./tree", "--to", "b", "-q", cwd=tmp_path)
    there = tmp_path / "b" / "tree"
    assert json.loads((there / "_datasync" / "receipt.json").read_text())["adopted"] == 0
    for path in sorted((tmp_path / "tree").iterdir())[1:]:
        path.unlink()
    datasync("replicate", "./tree", "--to", "b", "-q", "--delete", "--max-delete", "100%", cwd=tmp_path)
    assert [p.name for p in there.iterdir() if p.name != "_datasync"] == ["f000"]


def foreign_dataset(source: Store, seed: str, count: int = 4) -> None:
    """As MosaicML writes tokens without `hashes`: the index of other data of as many samples is the same."""
    shards = {f"shard.{n:05d}.mds": shard_bytes(f"{seed}{n}", 9000) for n in range(count)}
    for name, data in shards.items():
        source.write(name, data)
    source.write("index.json", Index([shard_info(name, data, {}) for name, data in shards.items()]).dumps())


def test_an_index_without_digests_proves_nothing(s3_a, s3_b):
    source, b = s3_a.store("ours"), s3_b.store("ours")
    foreign_dataset(source, "one")
    (first,) = replicate(source, {"b": b}, name="tokens", options=QUICK)
    (again,) = replicate(source, {"b": b}, name="tokens", options=QUICK)
    assert (again.state, again.version, again.source_bytes_read) == ("already", first.version, 0)
    index = source.read("index.json")
    foreign_dataset(source, "two")
    assert source.read("index.json") == index
    (outcome,) = replicate(source, {"b": b}, name="tokens", options=QUICK)
    assert (outcome.state, outcome.tally.copied) == ("published", 4)
    assert outcome.version != first.version
    assert data_of(b) == data_of(source)
