"""A manifest too large to hold: read where it lies, in ranges, and copied in parts."""

from __future__ import annotations

import pytest

from datasync.errors import ConflictError, FormatError, NotFoundError
from datasync.ops import receipts
from datasync.replicate import manifests, replicate
from datasync.replicate.manifests import ManifestFile
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
