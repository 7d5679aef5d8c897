"""A manifest too large to hold: read where it lies, in ranges, and copied in parts."""

from __future__ import annotations

import hashlib

import pytest

from datasync.errors import ConflictError, FormatError, NotFoundError
from datasync.ops import receipts
from datasync.replicate import manifests, replicate
from datasync.replicate.layout import INDEX
from datasync.replicate.manifests import ManifestFile, StoredFile
from datasync.storage.local import LocalStore
from shards.manifest import Manifest, ManifestEntry, manifest_key
from tests.replicate.kit import QUICK, Spy, data_of, make_dataset


def entries(count: int) -> list[ManifestEntry]:
    return [ManifestEntry(key=f"k{n:07d}", bytes=n, sha256=f"{n:064x}") for n in range(count)]


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch):
    monkeypatch.setattr(manifests, "HELD_BYTES", 100)


def test_it_is_read_in_batches_and_not_whole(tmp_path):
    store = Spy(LocalStore(tmp_path))
    manifest = Manifest.from_entries(entries(150_000))
    data = manifest.to_parquet()
    store.write("m", data)
    file = ManifestFile.open(store, "m")
    batches = list(file.batches())
    assert [batch.num_rows for batch in batches] == [65_536, 65_536, 18_928]
    assert [key for batch in batches for key in batch["key"].to_pylist()] == manifest.table["key"].to_pylist()
    assert max(batch.num_rows for batch in batches) < 150_000
    assert store.count("read", "m") > 4
    assert store.read_bytes < 1.5 * len(data)


def test_one_that_is_replaced_while_it_is_read_is_noticed(tmp_path):
    store = LocalStore(tmp_path)
    store.write("m", Manifest.from_entries(entries(1000)).to_parquet())
    file = ManifestFile.open(store, "m")
    store.write("m", Manifest.from_entries(entries(2000)).to_parquet())
    with pytest.raises((ConflictError, FormatError)):
        list(file.batches())
    with pytest.raises(NotFoundError):
        ManifestFile.open(store, "no")


def test_a_copy_is_the_same_file(tmp_path):
    store = LocalStore(tmp_path)
    data = Manifest.from_entries(entries(5000)).to_parquet()
    store.write("a", data)
    ManifestFile.open(store, "a").write_to(store, "b")
    assert store.read("b") == data
    assert list(store.uploads()) == []


def test_a_dataset_is_replicated_and_the_next_version_too(tmp_path):
    source, b = Spy(LocalStore(tmp_path / "a")), LocalStore(tmp_path / "b")
    make_dataset(source, count=5)
    (outcome,) = replicate(source, {"b": b}, name="x", options=QUICK)
    assert outcome.error is None
    assert outcome.tally.copied == 5
    version = receipts.read(b).version
    assert b.read(manifest_key(version)) == source.inner.read(manifest_key(version))
    make_dataset(source, count=7)
    (outcome,) = replicate(source, {"b": b}, name="x", options=QUICK)
    assert outcome.tally.copied == 2
    assert data_of(b) == data_of(source)


def test_an_index_that_is_replaced_during_the_run_is_published_as_it_was_read(tmp_path):
    source, b = Spy(LocalStore(tmp_path / "a")), LocalStore(tmp_path / "b")
    make_dataset(source, count=5)
    before = source.inner.read(INDEX)

    def replace(operation: str, key: str) -> None:
        if operation == "read" and key.startswith("shards/"):
            source.inner.write(INDEX, b"{}" * 1000)

    source.before = replace
    (outcome,) = replicate(source, {"b": b}, name="x", options=QUICK)
    assert outcome.error is None
    assert source.inner.read(INDEX) != before
    assert b.read(INDEX) == before
    assert receipts.read(b).index["sha256"] == hashlib.sha256(before).hexdigest()


def test_without_room_for_a_copy_the_index_is_read_where_it_lies(tmp_path, monkeypatch):
    source, b = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")
    make_dataset(source, count=5)
    file = StoredFile.open(source, INDEX)
    full = open("/dev/full", "wb", buffering=0)  # noqa: SIM115  # closed by what is tested
    monkeypatch.setattr(manifests.tempfile, "TemporaryFile", lambda **options: full)
    kept = file.spooled()
    assert kept.spool is None
    assert kept.sha256() == hashlib.sha256(source.read(INDEX)).hexdigest()
    kept.write_to(b, "copy")
    assert b.read("copy") == source.read(INDEX)


def test_an_upload_of_an_index_that_a_killed_run_left_is_aborted(tmp_path):
    source, b = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")
    make_dataset(source, count=2)
    for key in (INDEX, manifest_key("0" * 64)):
        b.begin(key, bytes=1000).put(1, b"x" * 1000)
    assert len(list(b.uploads())) == 2
    (outcome,) = replicate(source, {"b": b}, name="x", options=QUICK)
    assert outcome.error is None
    assert list(b.uploads()) == []
    assert b.read(INDEX) == source.read(INDEX)
