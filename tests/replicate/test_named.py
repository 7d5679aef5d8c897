"""What an index names: read line by line where we wrote it, as JSON elsewhere, and the same by both."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datasync.errors import FormatError
from datasync.replicate.manifests import StoredFile
from datasync.replicate.named import OtherForm, _Lines, named, named_whole
from shards.index import FileInfo, Index, ShardInfo


def stored(data: bytes) -> StoredFile:
    return StoredFile(where="here", bytes=len(data), data=data)


def columns(batches) -> list[list]:
    """Key, bytes and sha256 of all batches."""
    rows = list(batches)
    return [
        [value for batch in rows for value in batch[name].to_pylist()] for name in ("key", "bytes", "sha256")
    ]


def is_read_by_line(data: bytes) -> bool:
    lines = _Lines.of(stored(data))
    try:
        return lines is not None and bool(list(lines.blocks()))
    except OtherForm:
        return False


EXTRA = {"version": "0" * 64, "manifest": "_datasync/manifests/x.parquet"}


def shard(name: str, size: int, digest: str, compressed: bool) -> ShardInfo:
    stored = FileInfo(name, size, {"xxh3_64": digest[:16], "sha256": digest})
    raw = FileInfo(f"{name}.raw", 7, {"xxh3_64": digest[:16]})
    return ShardInfo(
        samples=3,
        size_limit=None,
        compression="zstd:3" if compressed else None,
        hashes=("sha256", "xxh3_64"),
        column_names=("a", "b"),
        column_encodings=("str", "int"),
        column_sizes=(None, 8),
        raw=raw if compressed else stored,
        zip=stored if compressed else None,
    )


shards = st.builds(
    shard,
    st.text("abcé /-\\\"'{}", min_size=1, max_size=8).map("s".__add__),
    st.integers(0, 2**32 - 1),
    st.binary(min_size=32, max_size=32).map(bytes.hex),
    st.booleans(),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(shards, max_size=5), st.booleans())
def test_both_ways_read_the_same(infos, indented):
    data = Index(infos, EXTRA).dumps()
    if indented:
        data = json.dumps(json.loads(data), indent=1).encode()
    result = named_whole(stored(data))
    assert result.top == {"datasync": EXTRA, "version": 2}
    wanted = sorted(
        (info.stored.basename.encode(), info.stored.bytes, bytes.fromhex(info.stored.hashes["sha256"]))
        for info in infos
    )
    found = columns(result.files)
    assert sorted(zip([key.encode() for key in found[0]], found[1], found[2], strict=True)) == wanted
    assert found[0] == sorted(found[0], key=str.encode)
    walked = named(stored(data))
    assert walked.top == result.top
    try:
        assert columns(walked.files) == found
    except OtherForm:  # not sorted, or a name with escapes: it cannot be walked beside a manifest
        names = [info.stored.basename.encode() for info in infos]
        assert names != sorted(names) or not is_read_by_line(data)


def test_our_own_text_is_read_by_line_whatever_its_length(monkeypatch):
    monkeypatch.setattr("datasync.replicate.named._BLOCK_BYTES", 2000)
    infos = [shard(f"shards/{n:05d}.mds", n, f"{n:064x}", bool(n % 2)) for n in range(100)]
    data = Index(infos, EXTRA).dumps()
    assert is_read_by_line(data)
    found = named(stored(data))
    assert found.top["datasync"] == EXTRA
    batches = list(found.files)
    assert len(batches) > 10
    assert columns(batches)[:2] == [[info.stored.basename for info in infos], list(range(100))]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"zip_data": null', '"zip_data": {"basename": "evil", "bytes": 1, "hashes": {}}'),
        ('"samples": 3', '"samples": 3, "raw_data": {"basename": "evil", "bytes": 1, "hashes": {}}'),
        ('"sha256": "', '"sha256": "00", "sha256": "'),
        ('"format": "mds"', '"format": "json"'),
        ('{"datasync"', '{"shards": [], "datasync"'),
        ("}},\n", "}}\n,"),
    ],
)
def test_a_line_that_is_not_quite_ours_is_left_to_json(old, new):
    infos = [shard(f"s{n}", n, f"{n:064x}", False) for n in range(3)]
    text = Index(infos, EXTRA).dumps().decode()
    assert is_read_by_line(text.encode())
    changed = text.replace(old, new, 1) if old in text else text.replace("null},\n", "null}\n,", 1)
    assert changed != text
    assert not is_read_by_line(changed.encode())


def test_other_files_called_index_json_are_told_apart():
    assert named(stored(b"[1, 2]")) is None
    assert named(stored(b'{"pages": []}')) is None
    found = named(stored(b'{"shards": [{"raw_data": {"basename": "a", "bytes": 1, "hashes": {}}}]}'))
    assert (found.top, found.files) == ({}, None)
    for bad in (b"{", b'{"shards": [], "version": 3}', b'{"shards": [{}]}', b'{"shards": [], "datasync": 1}'):
        with pytest.raises(FormatError, match="here"):
            named(stored(bad))
