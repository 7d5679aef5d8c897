"""Manifests: what they keep, what they refuse, and that the version follows from the objects alone."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shards.errors import FormatError
from shards.manifest import Manifest, ManifestEntry

KEYS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
ENTRIES = st.lists(
    st.builds(
        ManifestEntry,
        key=KEYS,
        bytes=st.integers(0, 2**48),
        crc32c=st.none() | st.integers(0, 2**32 - 1),
        sha256=st.binary(min_size=32, max_size=32).map(bytes.hex),
        samples=st.none() | st.integers(0, 2**40),
    ),
    max_size=12,
    unique_by=lambda entry: entry.key,
)


@settings(max_examples=60, deadline=None)
@given(entries=ENTRIES, seed=st.randoms())
def test_round_trip_keeps_every_entry_and_the_version_in_any_order(entries, seed):
    manifest = Manifest.from_entries(entries)
    shuffled = list(entries)
    seed.shuffle(shuffled)
    again = Manifest.from_parquet(Manifest.from_entries(shuffled).to_parquet())
    expected = sorted(entries, key=lambda entry: entry.key.encode())
    assert list(again.entries) == expected
    assert again.version == manifest.version
    assert len(again) == len(entries)
    assert again.total_bytes == sum(entry.bytes for entry in entries)
    for entry in entries:
        assert again.get(entry.key) == entry


def entry(key: str, content: bytes = b"x", **more: int) -> ManifestEntry:
    return ManifestEntry(key=key, bytes=len(content), sha256=hashlib.sha256(content).hexdigest(), **more)


def test_version_is_the_documented_digest():
    digest = hashlib.sha256()
    for key, content in ((b"a", b"xy"), (b"b/c", b"z")):
        digest.update(struct.pack("<I", len(key)) + key + struct.pack("<Q", len(content)))
        digest.update(hashlib.sha256(content).digest())
    assert Manifest.from_entries([entry("b/c", b"z"), entry("a", b"xy")]).version == digest.hexdigest()


def test_version_does_not_depend_on_crc_or_samples():
    assert (
        Manifest.from_entries([entry("a")]).version
        == Manifest.from_entries([entry("a", crc32c=1, samples=2)]).version
    )


def test_a_key_twice_with_the_same_content_counts_once():
    assert len(Manifest.from_entries([entry("a"), entry("a"), entry("b")])) == 2


def test_a_key_twice_with_other_content_is_refused():
    with pytest.raises(FormatError, match="a is listed twice"):
        Manifest.from_entries([entry("a"), entry("a", b"other")])


@pytest.mark.parametrize("key", ["", "bad\udce9"])
def test_bad_keys_are_refused(key):
    with pytest.raises(FormatError):
        Manifest.from_entries([entry(key)])


@pytest.mark.parametrize("data", [b"", b"PAR1 this is not parquet PAR1"])
def test_other_bytes_are_not_a_manifest(data):
    with pytest.raises(FormatError, match="where it lies"):
        Manifest.from_parquet(data, where="where it lies")


def test_empty_manifest():
    manifest = Manifest.from_parquet(Manifest.from_entries([]).to_parquet())
    assert (len(manifest), manifest.total_bytes, manifest.total_samples) == (0, 0, 0)
    assert manifest.version == hashlib.sha256().hexdigest()


def test_entries_from_a_key_and_samples():
    manifest = Manifest.from_entries([entry(f"k{i:02}", samples=i) for i in range(20)])
    assert [e.key for e in manifest.entries_from("k17x")] == ["k18", "k19"]
    assert manifest.total_samples == 190
    assert "k03" in manifest
    assert "k03x" not in manifest
