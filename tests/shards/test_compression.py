"""Compression: round trips, and what nobody vouches for stays bounded."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from shards import compression
from shards.errors import CorruptError, UsageError

EVERY = ["br:5", "bz2", "bz2:1", "gz", "gz:0", "snappy", "zstd", "zstd:1", "zstd:22"]
FAMILIES = ["br:5", "bz2", "gz", "snappy", "zstd"]


@pytest.mark.parametrize("name", EVERY)
@given(data=st.binary(max_size=3000), repeat=st.integers(1, 50))
@settings(max_examples=15, deadline=None)
def test_what_goes_in_comes_out(name: str, data: bytes, repeat: int) -> None:
    raw = data * repeat
    packed = compression.compress(raw, name)
    assert compression.compress(raw, name) == packed
    assert compression.decompress(packed, name, limit=len(raw)) == raw


@pytest.mark.parametrize("name", FAMILIES)
def test_in_pieces_of_any_size(name: str) -> None:
    raw = bytes(range(256)) * 500 + b"x" * 100_000
    packed = compression.compress(raw, name)
    for step in (1, 7, 1000, len(packed)):
        stream = compression.Decompressor(name, limit=len(raw))
        out = [piece for at in range(0, len(packed), step) for piece in stream.feed(packed[at : at + step])]
        assert b"".join([*out, stream.finish()]) == raw


@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_grows_beyond_the_limit(name: str) -> None:
    raw = b"a" * 100_000_000
    packed = compression.compress(raw, name)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError, match=r"shard 3 grows beyond 1,000,000 bytes"):
            compression.decompress(packed, name, limit=1_000_000, where="shard 3")
        assert tracemalloc.get_traced_memory()[1] < 60_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("cut", [1, 3, 500])
def test_input_that_ends_early_is_corrupt(name: str, cut: int) -> None:
    raw = bytes(i * i % 251 for i in range(9000))
    packed = compression.compress(raw, name)
    with pytest.raises(CorruptError):
        compression.decompress(packed[:-cut], name, limit=len(raw))
    with pytest.raises(CorruptError):
        compression.decompress(b"", name, limit=len(raw))


@pytest.mark.parametrize("name", FAMILIES)
def test_garbage_is_corrupt(name: str) -> None:
    with pytest.raises(CorruptError):
        compression.decompress(b"\xff\xfe\xfd" * 1000, name, limit=1 << 20)


def test_zstd_files_as_other_programs_write_them() -> None:
    raw = b"some text " * 1000
    frame = zstandard.ZstdCompressor().compress(raw)
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(raw)
    skippable = struct.pack("<II", 0x184D2A50, 5) + b"aside"
    cases = [
        (frame + frame, raw * 2),
        (unsized, raw),
        (unsized + frame, raw * 2),
        (skippable + frame, raw),
        (frame + skippable + unsized, raw * 2),
    ]
    for packed, expected in cases:
        assert compression.decompress(packed, "zstd", limit=len(expected)) == expected
        with pytest.raises(CorruptError):
            compression.decompress(packed, "zstd", limit=len(expected) - 1)


def test_a_frame_that_lies_about_its_size_takes_no_memory() -> None:
    liar = zstandard.ZstdCompressor().compress(b"a" * 1000)
    parameters = zstandard.get_frame_parameters(liar)
    assert parameters.content_size == 1000
    lie = liar.replace(struct.pack("<H", 1000 - 256), struct.pack("<H", 65_000), 1)
    assert zstandard.get_frame_parameters(lie).content_size == 65_000 + 256
    with pytest.raises(CorruptError):
        compression.decompress(lie, "zstd", limit=100_000)


def test_every_compression_of_mosaicml_is_known() -> None:
    peer = pytest.importorskip("streaming.base.compression")
    for name in peer.get_compressions():
        assert compression.extension(name) == peer.get_compression_extension(name)


@pytest.mark.parametrize("name", ["lzma", "zstd:0", "zstd:23", "zstd:x", "zstd:", "snappy:1", "gz:10", ""])
def test_an_unknown_compression_is_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError, match=repr(name)):
        compression.parse(name)
