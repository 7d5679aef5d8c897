"""Bytes and lines of a file, decompressed as they are read.

What a file is compressed with is found from its first bytes, never from its name: half of all `.gz` files in
the wild were decompressed by a proxy on the way. gzip, bzip2, zstandard and xz; several members or frames in
one file; in bounded memory (invariant 10): a zstd window has at most 128 MiB, an xz stream may ask for 256, a
line has what the caller says.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple, Protocol, cast

import zstandard

from shards.sources.base import content_error
from shards.sources.files import COMPRESSED, FileList

_BLOCK = 1 << 20
_WINDOW = 1 << 27
_XZ_MEMORY = 1 << 28
_BITE = 1 << 12
_BINARY = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f]")  # what no text holds


class Line(NamedTuple):
    """One line without its end.

    Args:
        data (bytes): The line; empty where it was too long.
        number (int): From 1.
        offset (int): Where it begins, in decompressed bytes.
        too_long (bool): It had more bytes than allowed and was passed over.
    """

    data: bytes
    number: int
    offset: int
    too_long: bool = False


def compression(head: bytes) -> str | None:
    """What bytes that begin with `head` are compressed with, or None."""
    if head[:2] == b"\x1f\x8b":
        return "gz"
    if head[:3] == b"BZh":
        return "bz2"
    if head[:6] == b"\xfd7zXZ\x00":
        return "xz"
    if head[:4] == b"\x28\xb5\x2f\xfd" or (head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F):
        return "zstd"
    return None


def is_compressed(files: FileList, number: int) -> bool:
    """Whether a file is compressed, by its first bytes."""
    try:
        with files.open(number) as file:
            return compression(file.read(6)) is not None
    except Exception as error:
        if not content_error(error):
            raise
        return False


_MARKS = (  # the longer first: UTF-32 begins as UTF-16 does
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def marked_encoding(head: bytes) -> str | None:
    """The character set that a byte order mark at the beginning of text says, or None."""
    return next((kind for mark, kind in _MARKS if head.startswith(mark)), None)


def extends_ascii(encoding: str) -> bool:
    """Whether the bytes of ASCII mean themselves in a character set wherever they stand."""
    name = codecs.lookup(encoding).name
    return name.startswith(("utf-8", "ascii", "iso8859", "cp125", "koi8", "mac-"))


def peek(stream: BinaryIO) -> bytes:
    """The first bytes of a stream that stands at its beginning, and stays there."""
    look = getattr(stream, "peek", None)
    if look is not None:
        return bytes(look(8)[:8])
    head = stream.read(8)
    stream.seek(0)
    return head


@contextmanager
def open_stream(files: FileList, number: int, *, text: bool = True) -> Iterator[BinaryIO]:
    """Open a file for reading forwards, decompressed; it should hold `text`, or anything.

    On leaving without an error, checks that the file is still the one that was listed.

    Raises:
        ValueError: It is neither compressed, as its name says, nor text; or it is compressed twice.
    """
    with files.open(number) as raw:
        head = raw.read(512)
        raw.seek(0)
        kind = compression(head)
        if kind is None:
            name = files.names[number].lower()
            if text and name.endswith(COMPRESSED) and not marked_encoding(head) and _BINARY.search(head):
                raise ValueError(f"the file is not compressed with {name.rpartition('.')[2]}, nor is it text")
            yield raw
        else:
            with _decompressed(cast(BinaryIO, _Counted(raw)), kind) as stream:
                if text and compression(peek(stream)) is not None:
                    raise ValueError("the file is compressed twice")
                yield stream
    files.check_unchanged(number)


def take_count() -> int:
    """Compressed bytes that this process has read since it was asked last: how far it is in a large file."""
    count, _Counted.count = _Counted.count, 0
    return count


class _Counted:
    """A compressed file whose bytes are counted as they are read."""

    count = 0

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw

    def read(self, size: int = -1) -> Any:
        data = self._raw.read(size)
        _Counted.count += len(data)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)


def _decompressed(raw: BinaryIO, kind: str) -> BinaryIO:
    if kind == "gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw, mode="rb"))
    if kind == "bz2":
        return cast(BinaryIO, bz2.BZ2File(raw))
    if kind == "xz":
        return cast(BinaryIO, io.BufferedReader(_XzStream(raw), _BLOCK))
    return cast(BinaryIO, io.BufferedReader(_ZstdStream(raw), _BLOCK))


class _XzStream(io.RawIOBase):
    """The streams of an xz file; `lzma.LZMAFile` would give them all the memory that they ask for."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._stream: lzma.LZMADecompressor | None = None
        self._input = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # any buffer, there
        while True:
            if not self._input and (self._stream is None or self._stream.needs_input):
                self._input = self._raw.read(_BLOCK)
                if not self._input and self._stream is None:
                    return 0
                if not self._input:
                    raise EOFError("the xz stream ended before its end-of-stream marker")
            if self._stream is None:
                self._input = self._input.lstrip(b"\0")  # padding between streams
                if not self._input:
                    continue
                self._stream = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY)
            out = self._stream.decompress(self._input, len(buffer))
            self._input = b""
            if self._stream.eof:
                self._input, self._stream = self._stream.unused_data, None
            if out:
                buffer[: len(out)] = out
                return len(out)


class _ZstdStream(io.RawIOBase):
    """The frames of a zstd file one after the other; a file that is cut is an EOFError, not a silent end."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._frame: Any = None
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # any buffer, there
        while not self._output:
            if not self._input:
                self._input = self._raw.read(_BLOCK)
            if not self._input:
                if self._frame is not None:
                    raise EOFError("the zstd stream ends early")
                return 0
            self._output = memoryview(self._step())
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count

    def _step(self) -> bytes:
        """What comes out of the next bite of input; a small bite, since a bomb grows 30,000 times."""
        if self._frame is None:
            if self._input[1:4] == b"\x2a\x4d\x18" and 0x50 <= self._input[0] <= 0x5F:
                return self._skip_frame()
            self._frame = zstandard.ZstdDecompressor(max_window_size=_WINDOW).decompressobj()
        bite, self._input = self._input[:_BITE], self._input[_BITE:]
        out: bytes = self._frame.decompress(bite)
        if self._frame.eof:
            self._input = self._frame.unused_data + self._input
            self._frame = None
        return out

    def _skip_frame(self) -> bytes:
        """Pass over a skippable frame."""
        self._input += self._raw.read(max(8 - len(self._input), 0))
        left = 8 + int.from_bytes(self._input[4:8], "little")
        while left > len(self._input):
            left -= len(self._input)
            self._input = self._raw.read(_BLOCK)
            if not self._input:
                raise EOFError("the zstd stream ends early")
        self._input = self._input[left:]
        return b""


class AsUtf8:
    """Text of another character set as UTF-8."""

    def __init__(self, stream: BinaryIO, encoding: str) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder(encoding)()

    def read(self, size: int) -> bytes:
        text = ""
        while not text and (data := self._stream.read(size)):
            text = self._decoder.decode(data)
        return (text or self._decoder.decode(b"", final=True)).encode()


class Readable(Protocol):
    """What `lines` needs of a stream."""

    def read(self, size: int, /) -> bytes: ...


def lines(stream: Readable, *, limit: int, offset: int = 0, end: int | None = None) -> Iterator[Line]:
    """Lines of `stream`, which stands at byte `offset`; each ends at ``\\n``, and a ``\\r`` before it goes.

    With `end`, stops before the first line that begins at or after it. A line longer than `limit` is passed
    over without being held.
    """
    number, start = 0, offset
    held: list[bytes] = []
    length = 0  # bytes of the line so far, held or not
    # read1 gives what there is before it meets the end of a file that is cut, read would lose it.
    read = getattr(stream, "read1", stream.read)
    while block := read(_BLOCK):
        *whole, rest = block.split(b"\n")
        for part in whole:
            number += 1
            length += len(part)
            too_long = length > limit
            data = b"" if too_long else (b"".join((*held, part)) if held else part)
            yield Line(data[:-1] if data.endswith(b"\r") else data, number, start, too_long)
            start += length + 1
            if end is not None and start >= end:
                return
            held.clear()
            length = 0
        length += len(rest)
        if length > limit:
            held.clear()
        elif rest:
            held.append(rest)
    if length:
        data = b"" if length > limit else b"".join(held)
        yield Line(data[:-1] if data.endswith(b"\r") else data, number + 1, start, length > limit)


def seek_line(stream: BinaryIO, offset: int) -> int:
    """Move `stream` to the first line that begins at or after `offset`, and say where that is."""
    if offset == 0:
        return 0
    stream.seek(offset - 1)
    position = offset - 1
    while block := stream.read(1 << 16):
        found = block.find(b"\n")
        if found >= 0:
            position += found + 1
            stream.seek(position)
            return position
        position += len(block)
    return position
