"""Digests of bytes, streams and files.

`crc32c` is what object stores check in transit, `xxh3_64` is what a loader checks before it uses a shard (it
costs next to nothing), `sha256` is what names a shard and proves that two clusters hold the same bytes. Every
other algorithm that hashlib or xxhash knows is accepted too, since indexes of other writers may use it.

Digests are written as lower-case hexadecimal; CRC-32C as eight digits, most significant first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import google_crc32c
import xxhash

from shards.errors import CorruptError, UsageError

Buffer = bytes | bytearray | memoryview

_CHUNK = 1 << 20
_COPY_BYTES = 4096

# From cheap to dear: the first of these that an index offers is enough to catch damage.
_CHEAP_FIRST = (
    "xxh3_64",
    "xxh3_128",
    "xxh128",
    "xxh64",
    "crc32c",
    "xxh32",
    "sha256",
    "blake2b",
    "sha1",
    "md5",
)


class _Hasher(Protocol):
    def update(self, data: Buffer, /) -> Any: ...

    def hexdigest(self) -> str: ...


def crc32c(data: Buffer, value: int = 0) -> int:
    """CRC-32C (Castagnoli) of `data`, continuing from `value`."""
    if isinstance(data, bytes) or len(data) < _COPY_BYTES:
        return int(google_crc32c.extend(value, bytes(data)))
    import numpy as np

    # The library takes read-only buffers alone; an array over the same memory passes, without a copy.
    return int(google_crc32c.extend(value, np.frombuffer(data, np.uint8)))


class _Crc32c:
    """CRC-32C with the interface of a hashlib object."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Buffer) -> None:
        self._value = crc32c(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def _collect() -> dict[str, Callable[[], _Hasher]]:
    makers: dict[str, Callable[[], _Hasher]] = {"crc32c": _Crc32c}
    for name in sorted(hashlib.algorithms_available):
        # The shake family has no fixed length, so a digest by it says nothing without one.
        if hasattr(hashlib, name) and not name.startswith("shake_"):
            makers[name] = partial(getattr(hashlib, name), usedforsecurity=False)
    for name in sorted(xxhash.algorithms_available):
        makers[name] = getattr(xxhash, name)
    return makers


_MAKERS = _collect()

ALGORITHMS: tuple[str, ...] = tuple(sorted(_MAKERS))


def check_algorithm(name: str) -> str:
    """Return `name` if it is a known algorithm, else raise `UsageError` naming those that are."""
    if name not in _MAKERS:
        raise UsageError(f"unknown hash algorithm {name!r}", mend=f"use one of: {', '.join(ALGORITHMS)}")
    return name


class Digest:
    """Several digests of one stream of bytes.

    Args:
        algorithms (Iterable[str]): Names out of `ALGORITHMS`.
    """

    def __init__(self, algorithms: Iterable[str]) -> None:
        self._hashers = {name: _MAKERS[check_algorithm(name)]() for name in algorithms}
        self.bytes = 0

    def update(self, data: Buffer) -> None:
        """Add the next bytes of the stream."""
        self.bytes += len(data) if isinstance(data, bytes | bytearray) else data.nbytes
        for hasher in self._hashers.values():
            hasher.update(data)

    def hexdigests(self) -> dict[str, str]:
        """Algorithm -> digest of everything so far, sorted by algorithm."""
        return {name: self._hashers[name].hexdigest() for name in sorted(self._hashers)}


def digest_bytes(data: Buffer, algorithms: Iterable[str]) -> dict[str, str]:
    """Algorithm -> digest of `data`."""
    digest = Digest(algorithms)
    digest.update(data)
    return digest.hexdigests()


def digest_file(path: str | Path, algorithms: Iterable[str]) -> dict[str, str]:
    """Algorithm -> digest of a whole file, read once in constant memory."""
    digest = Digest(algorithms)
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigests()


def cheapest(hashes: Mapping[str, str]) -> str | None:
    """The algorithm of `hashes` that is cheapest to check; None if none of them is known here."""
    for name in _CHEAP_FIRST:
        if name in hashes:
            return name
    return next((name for name in sorted(hashes) if name in _MAKERS), None)


def compare(expected: Mapping[str, str], got: Mapping[str, str], *, where: str) -> None:
    """Raise `CorruptError` naming `where` and both digests if one of those in `got` differs."""
    for name, digest in got.items():
        if name in expected and expected[name].lower() != digest:
            raise CorruptError(
                f"{where} does not match the index\n  expected {name} {expected[name]}  got {digest}",
                mend="fetch it again from a good replica (datasync repair)",
            )


def check_bytes(
    data: Buffer, *, size: int, hashes: Mapping[str, str], where: str, algorithms: Iterable[str] | None = None
) -> None:
    """Raise `CorruptError` unless `data` has `size` bytes and the digests of `hashes`.

    Args:
        data (Buffer): What was read.
        size (int): Bytes it should have.
        hashes (Mapping[str, str]): Algorithm -> digest it should have.
        where (str): What it is, for the message.
        algorithms (Iterable[str] | None): Which of `hashes` to check. Default: the cheapest one.
    """
    check_size(len(data) if isinstance(data, bytes | bytearray) else data.nbytes, size=size, where=where)
    if algorithms is None:
        name = cheapest(hashes)
        algorithms = () if name is None else (name,)
    compare(hashes, digest_bytes(data, algorithms), where=where)


def check_size(got: int, *, size: int, where: str) -> None:
    """Raise `CorruptError` naming `where` if `got` bytes are not `size`."""
    if got != size:
        what = "is truncated" if got < size else "is too long"
        raise CorruptError(
            f"{where} {what}: {got:,} bytes, the index says {size:,}",
            mend="fetch it again from a good replica (datasync repair)",
        )
