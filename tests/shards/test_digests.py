"""Digests: known answers, streams equal wholes, and what is said when bytes are wrong."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from shards import digests
from shards.errors import CorruptError, UsageError


def test_crc32c_known_answers() -> None:
    assert digests.crc32c(b"") == 0
    assert digests.crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32C
    assert digests.crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4


@given(st.binary(max_size=2000), st.integers(0, 2000))
@settings(max_examples=50)
def test_a_stream_in_pieces_has_the_digests_of_the_whole(data: bytes, cut: int) -> None:
    names = ["crc32c", "md5", "sha256", "xxh3_64", "xxh64"]
    whole = digests.digest_bytes(data, names)
    pieces = digests.Digest(names)
    pieces.update(data[:cut])
    pieces.update(memoryview(data)[cut:])
    assert pieces.hexdigests() == whole
    assert pieces.bytes == len(data)
    assert whole["sha256"] == hashlib.sha256(data).hexdigest()
    assert whole["xxh3_64"] == xxhash.xxh3_64(data).hexdigest()
    assert whole["crc32c"] == f"{digests.crc32c(data):08x}"
    assert digests.crc32c(data[cut:], digests.crc32c(data[:cut])) == digests.crc32c(data)


def test_a_file_larger_than_the_buffer(tmp_path: Path) -> None:
    data = bytes(range(256)) * 10_000
    (tmp_path / "f").write_bytes(data)
    assert digests.digest_file(tmp_path / "f", ["sha256", "xxh3_64"]) == digests.digest_bytes(
        data, ["sha256", "xxh3_64"]
    )


def test_every_algorithm_of_mosaicml_is_known() -> None:
    hashing = pytest.importorskip("streaming.base.hashing")
    assert hashing.get_hashes() <= set(digests.ALGORITHMS)
    for name in hashing.get_hashes():
        assert digests.digest_bytes(b"abc", [name])[name] == hashing.get_hash(name, b"abc")


def test_an_unknown_algorithm_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="'sha257'"):
        digests.Digest(["sha257"])


def test_a_wrong_digest_names_the_file_and_both_digests() -> None:
    good = digests.digest_bytes(b"abc", ["sha256", "xxh3_64"])
    digests.check_bytes(b"abc", size=3, hashes=good, where="x")
    with pytest.raises(CorruptError) as error:
        digests.check_bytes(b"abd", size=3, hashes=good, where="shard 7", algorithms=["sha256"])
    assert "shard 7" in str(error.value)
    assert good["sha256"] in str(error.value)
    assert hashlib.sha256(b"abd").hexdigest() in str(error.value)


def test_a_wrong_size_is_found_before_any_digest() -> None:
    with pytest.raises(CorruptError, match="truncated: 2 bytes, the index says 3"):
        digests.check_bytes(b"ab", size=3, hashes={}, where="x")
    with pytest.raises(CorruptError, match="too long"):
        digests.check_bytes(b"abcd", size=3, hashes={}, where="x")


def test_the_cheapest_digest_is_checked() -> None:
    assert digests.cheapest({"sha256": "", "xxh3_64": ""}) == "xxh3_64"
    assert digests.cheapest({"sha256": ""}) == "sha256"
    assert digests.cheapest({"unheard_of": ""}) is None
