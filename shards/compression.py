"""Whole-file compression of shards: zstd, and for reading and writing also gz, bz2, br and snappy.

A compression is named as in an index: a family with an optional level, `zstd`, `zstd:3`, `gz:9`, `br:11`,
`bz2:1`, `snappy`. `compress` gives the same bytes for the same input on every machine with the same library
version: one thread, one frame, no checksum or date inside.

`decompress` is for bytes that nobody vouches for (invariant 10): no more comes out than the limit, which
the caller takes from the index, and input that ends early is a `CorruptError`. Files of several frames (or
members) are read to their end.
"""

from __future__ import annotations

import bz2
import gzip
import zlib
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, Protocol

import zstandard

from shards.errors import CorruptError, UsageError

Buffer = bytes | bytearray | memoryview

_LEVELS: dict[str, tuple[range, int]] = {
    "br": (range(12), 11),
    "bz2": (range(1, 10), 9),
    "gz": (range(10), 9),
    "snappy": (range(0), 0),
    "zstd": (range(1, 23), 3),
}

# A block of zstd or brotli can grow more than 30,000 times: what goes in at once bounds what comes out.
_BITE = 1 << 10
_PIECE = 1 << 20


def parse(compression: str) -> tuple[str, int]:
    """Family and level of a compression's name; the family's default level where none is given."""
    family, colon, text = compression.partition(":")
    if family not in _LEVELS:
        raise UsageError(
            f"unknown compression {compression!r}", mend=f"use one of: {', '.join(compressions())}"
        )
    levels, default = _LEVELS[family]
    if not colon:
        return family, default
    if not text.isascii() or not text.isdigit() or int(text) not in levels:
        span = f"{levels.start} to {levels.stop - 1}" if levels else "none"
        raise UsageError(f"unknown level in compression {compression!r}", mend=f"levels of {family}: {span}")
    return family, int(text)


def compressions() -> list[str]:
    """The families, each a valid name of a compression."""
    return sorted(_LEVELS)


def extension(compression: str) -> str:
    """What is appended to the name of a compressed shard, without the dot."""
    return parse(compression)[0]


def compress(data: Buffer, compression: str) -> Buffer:
    """Compress `data` whole."""
    family, level = parse(compression)
    if family == "zstd":
        import pyarrow as pa

        # By Arrow, since that uses the memory of its output again; zstandard takes new memory for each shard,
        # and page faults are 6% of its time at level 3. With the same library below, the bytes are the same.
        return memoryview(pa.Codec("zstd", level).compress(data, asbytes=False)).cast("B")
    if family == "gz":
        return gzip.compress(data, level, mtime=0)
    if family == "bz2":
        return bz2.compress(data, level)
    raw = data if isinstance(data, bytes) else bytes(data)
    if family == "br":
        return bytes(_module("brotli", "brotli").compress(raw, quality=level))
    return bytes(_module("snappy", "python-snappy").compress(raw))


def decompress(data: Buffer, compression: str, *, limit: int, where: str = "compressed data") -> bytes:
    """Decompress `data` whole.

    Args:
        data (Buffer): Compressed bytes.
        compression (str): How they were compressed.
        limit (int): Most bytes that may come out.
        where (str): What it is, for messages. Default: ``compressed data``.

    Raises:
        CorruptError: It is no such data, it ends early, or more than `limit` bytes come out.
    """
    family, _ = parse(compression)
    if family == "zstd":
        quick = _one_zstd_frame(data, limit)
        if quick is not None:
            return quick
    stream = Decompressor(compression, limit=limit, where=where)
    pieces = list(stream.feed(data))
    pieces.append(stream.finish())
    return b"".join(pieces)


class Decompressor:
    """Decompresses a stream in bounded memory: `feed` what arrives, then `finish`.

    Args:
        compression (str): How the stream was compressed.
        limit (int): Most bytes that may come out.
        where (str): What it is, for messages. Default: ``compressed data``.
    """

    def __init__(self, compression: str, *, limit: int, where: str = "compressed data") -> None:
        self._family, _ = parse(compression)
        self._limit = limit
        self._where = where
        self._out = 0
        self._frame: _Frame | None = None
        self._whole = False
        self._held: list[bytes] = []

    def feed(self, data: Buffer) -> Iterator[bytes]:
        """Yield what comes out of the next bytes of the stream, in pieces."""
        if self._family == "snappy":
            self._held.append(bytes(data))
            return
        rest = memoryview(data).cast("B")
        while len(rest):
            if self._frame is None:
                self._frame = _FRAMES[self._family]()
                self._whole = False
            take, out, ended, left = self._step(self._frame, rest)
            rest = rest[take - left :] if ended else rest[take:]
            if ended:
                self._frame = None
                self._whole = True
            if out:
                yield out

    def finish(self) -> bytes:
        """Check that the stream ended where a frame ends; returns what was held back until now."""
        if self._family == "snappy":
            return self._snappy(b"".join(self._held))
        if self._frame is not None or not self._whole:
            raise self._corrupt("ends early")
        return b""

    def _step(self, frame: _Frame, rest: memoryview) -> tuple[int, bytes, bool, int]:
        """One bite: bytes taken, what came out, whether the frame ended, how many bytes were not its own."""
        bite = bytes(rest[:_BITE])
        pieces = []
        try:
            for out in frame.pieces(bite):
                self._out += len(out)
                if self._out > self._limit:
                    raise self._corrupt(f"grows beyond {self._limit:,} bytes")
                pieces.append(out)
        except (CorruptError, UsageError):
            raise
        except Exception as error:  # each library has its own class; all mean the same
            raise self._corrupt(f"is damaged: {error}") from error
        return len(bite), b"".join(pieces), frame.ended, len(frame.unused)

    def _snappy(self, data: bytes) -> bytes:
        """Snappy's block format begins with its length, so it can be bounded before any work."""
        size, shift = 0, 0
        for byte in data[:5]:
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        else:
            raise self._corrupt("is damaged: no length at its beginning")
        if size > self._limit:
            raise self._corrupt(f"grows beyond {self._limit:,} bytes")
        try:
            return bytes(_module("snappy", "python-snappy").decompress(data))
        except Exception as error:  # the class depends on which snappy is installed
            if isinstance(error, UsageError):
                raise
            raise self._corrupt(f"is damaged: {error}") from error

    def _corrupt(self, what: str) -> CorruptError:
        return CorruptError(
            f"{self._where} {what} ({self._family})",
            mend="fetch it again from a good replica (datasync repair)",
        )


class _Frame(Protocol):
    """One frame or member of a compressed file."""

    ended: bool
    unused: bytes

    def pieces(self, data: bytes) -> Iterator[bytes]: ...


class _Zstd:
    def __init__(self) -> None:
        self._stream = zstandard.ZstdDecompressor().decompressobj()
        self.ended = False
        self.unused = b""

    def pieces(self, data: bytes) -> Iterator[bytes]:
        yield self._stream.decompress(data)
        self.ended = self._stream.eof
        self.unused = self._stream.unused_data


class _Bounded:
    """gz and bz2: the standard library bounds each call itself."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._stream = make()
        self.ended = False
        self.unused = b""

    def pieces(self, data: bytes) -> Iterator[bytes]:
        out = self._stream.decompress(data, _PIECE)
        yield out
        while not self._stream.eof and (len(out) == _PIECE or self._tail()):
            out = self._stream.decompress(self._tail(), _PIECE)
            yield out
            if not out:
                break
        self.ended = self._stream.eof
        self.unused = self._stream.unused_data

    def _tail(self) -> bytes:
        return bytes(getattr(self._stream, "unconsumed_tail", b""))


class _Brotli:
    """Brotli has no frames: one stream, and nothing may follow it."""

    def __init__(self) -> None:
        self._stream = _module("brotli", "brotli").Decompressor()
        self.ended = False
        self.unused = b""

    def pieces(self, data: bytes) -> Iterator[bytes]:
        try:
            out = self._stream.process(data, output_buffer_limit=_PIECE)
        except TypeError as error:
            raise UsageError(
                "this brotli cannot bound its output", mend="pip install 'brotli>=1.2'"
            ) from error
        yield out
        while not self._stream.can_accept_more_data():
            yield self._stream.process(b"", output_buffer_limit=_PIECE)
        self.ended = self._stream.is_finished()


_FRAMES: dict[str, Callable[[], _Frame]] = {
    "zstd": _Zstd,
    "gz": lambda: _Bounded(lambda: zlib.decompressobj(wbits=31)),
    "bz2": lambda: _Bounded(bz2.BZ2Decompressor),
    "br": _Brotli,
}


def _one_zstd_frame(data: Buffer, limit: int) -> bytes | None:
    """The quick way for what nearly every shard is: one frame that says its size. None if it is not that."""
    try:
        size = zstandard.get_frame_parameters(data).content_size
        if size in (0, zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR) or size > limit:
            return None
        return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError:
        return None


def _module(name: str, package: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise UsageError(
            f"this compression needs the package {package}", mend=f"pip install {package}"
        ) from error
