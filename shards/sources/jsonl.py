"""JSON Lines: one JSON object a line; plain, or compressed with gz, bz2, zst or xz. Also `.json` files.

A plain file is cut into byte ranges, a range taking the lines that begin in it; a compressed file is one
task. Small files share a task. `.json` files are read as a sequence of values or as one array of them,
whichever they are, one value at a time.

Text is UTF-8, or what its byte order mark says. What is refused: a line that is not JSON or not such text,
that is not an object, that has the same name twice, or that has a number which no float holds. The rest of
the file goes on. A file that ends inside its compression gives the lines before the cut, and one refusal for
the rest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Any, BinaryIO

from shards.sources.base import Bad, Item, Row, Source, Task, content_error, group, reason
from shards.sources.files import FileList
from shards.sources.streams import (
    AsUtf8,
    Readable,
    compression,
    lines,
    marked_encoding,
    open_stream,
    peek,
    seek_line,
)

_BOM = b"\xef\xbb\xbf"
_KEPT = 4096


class JsonLines(Source):
    """JSON Lines files. A payload is (files, begin, end): a range of one file, or all of several."""

    name = "jsonl"
    summary = "JSON Lines (.jsonl .ndjson .json), also gz, bz2, zst, xz"
    extensions = frozenset({".jsonl", ".ndjson", ".json", ".jsonlines"})

    @classmethod
    def claims(cls, files: FileList) -> bool:
        return bool(cls._own(files))

    def mine(self) -> FileList:
        return self.files.select(self._own(self.files) or range(len(self.files)))

    @classmethod
    def _own(cls, files: FileList) -> list[int]:
        """The files with our extensions, without those that are the index of other tools' datasets."""
        ours = (number for number in range(len(files)) if files.suffix(number) in cls.extensions)
        return [number for number in ours if not _is_index(files, number)]

    def tasks(self) -> Iterator[Task]:
        files, target = self.mine(), self.options.target_bytes
        for numbers, size in group(files, target):
            if len(numbers) == 1 and size > target and self._splits(files, numbers.start):
                yield from self._ranges(files.slice(numbers), size)
            else:
                yield Task(payload=(files.slice(numbers), 0, None), bytes=size)

    def _splits(self, files: FileList, number: int) -> bool:
        if files.suffix(number) == ".json":
            return False
        try:
            with files.open(number) as file:
                head = file.read(6)
        except Exception as error:
            if not content_error(error):
                raise
            return False  # its reader says what is wrong
        return compression(head) is None and not _wide(head)

    def _ranges(self, file: FileList, size: int) -> Iterator[Task]:
        """Equal byte ranges of one file, none above the target."""
        count = -(-size // self.options.target_bytes)
        edges = [size * part // count for part in range(count + 1)]
        for begin, end in pairwise(edges):
            yield Task(payload=(file, begin, end), bytes=end - begin)

    def read(self, payload: tuple[FileList, int, int | None]) -> Iterator[Item]:
        files, begin, end = payload
        for number, name in enumerate(files.names):
            try:
                with open_stream(files, number) as stream:
                    if name.lower().endswith(".json"):
                        yield from self._values(stream, name)
                    else:
                        yield from self._lines(stream, name, begin, end)
            except Exception as error:
                if not content_error(error):
                    raise
                yield Bad(reason(error), name)

    def _lines(self, stream: BinaryIO, name: str, begin: int, end: int | None) -> Iterator[Item]:
        limit = self.options.max_line_bytes
        readable: Readable = stream
        if begin == 0 and (encoding := _wide(peek(stream))):
            readable = AsUtf8(stream, encoding)
        offset = seek_line(stream, begin)
        if end is not None and offset >= end:
            return
        for line in lines(readable, limit=limit, offset=offset, end=end):
            at = line.number if begin == 0 else f"byte {line.offset}"
            data = line.data.removeprefix(_BOM) if line.offset == 0 else line.data
            if line.too_long:
                yield Bad(f"the line is longer than {limit:,} bytes", name, at)
            elif data.strip():
                yield parse_row(data, name, at)

    def _values(self, stream: BinaryIO, name: str) -> Iterator[Item]:
        """The objects of a `.json` file."""
        for number, (value, problem) in enumerate(_json_values(stream, self.options.max_line_bytes), 1):
            if problem:
                yield Bad(problem, name, number)
            elif isinstance(value, dict):
                yield Row(value, name, number)
            else:
                yield Bad(f"a JSON object is expected, not {_kind(value)}", name, number)


def _wide(head: bytes) -> str:
    """The character set that a byte order mark says, where that is not UTF-8; else empty."""
    encoding = marked_encoding(head) or ""
    return "" if encoding.startswith("utf-8") else encoding


def _is_index(files: FileList, number: int) -> bool:
    """Whether a file is the index of a dataset of shards, or of chunks, and no corpus."""
    if files.names[number].rpartition("/")[2] != "index.json" or files.sizes[number] < 0:
        return False
    with files.open(number) as file:
        head = file.read(4096)
    return b'"shards"' in head or b'"chunks"' in head


def parse_row(data: bytes, file: str, at: str | int) -> Row | Bad:
    """One line as a row, or why it is none."""
    try:
        value = _DECODER.decode(data.decode())
    except UnicodeDecodeError as error:
        return Bad(f"not UTF-8: {error.reason} at byte {error.start}", file, at, data[:_KEPT])
    except (ValueError, RecursionError) as error:
        return Bad(f"not JSON: {error}", file, at, data[:_KEPT])
    if not isinstance(value, dict):
        return Bad(f"a JSON object is expected, not {_kind(value)}", file, at, data[:_KEPT])
    name = _overflow(value)
    if name is not None and b"Infinity" not in data:
        return Bad(f"the number in {name!r} is too large for a float", file, at, data[:_KEPT])
    return Row(value, file, at)


def _overflow(value: dict[str, Any]) -> str | None:
    """The first name whose value is a number that became infinite."""
    for name, item in value.items():
        if isinstance(item, float) and math.isinf(item):
            return name
    return None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the name {twice!r} stands twice in one object")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _json_values(stream: BinaryIO, limit: int) -> Iterator[tuple[Any, str]]:
    """The values of a JSON file, (value, "") each: those of its array, or those that follow one another.

    Where the text is no JSON, (None, why) comes last.
    """
    text = _Text(stream, limit)
    try:
        first = text.peek()
        if first == "[":
            yield from _array(text)
        else:
            while text.peek():
                yield text.value(), ""
    except UnicodeDecodeError as error:
        yield None, f"not UTF-8: {error.reason}"
    except (ValueError, RecursionError) as error:
        yield None, f"not JSON: {error}"


def _array(text: _Text) -> Iterator[tuple[Any, str]]:
    text.skip(1)
    if text.peek() == "]":
        text.skip(1)
    else:
        while True:
            yield text.value(), ""
            mark = text.peek()
            text.skip(1)
            if mark == "]":
                break
            if mark != ",":
                raise ValueError("the array does not go on with , or ]")
    if text.peek():
        raise ValueError("something follows the array")


class _Text:
    """The text of a stream, read a piece at a time, with a place in it."""

    def __init__(self, stream: BinaryIO, limit: int) -> None:
        import codecs

        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        blocks = iter(lambda: stream.read(1 << 20), b"")
        self._pieces = chain((decoder.decode(block) for block in blocks), iter([decoder.decode(b"", True)]))
        self._decoder = decoder
        self._held = ""
        self._at = 0
        self._limit = limit
        self._ended = False

    def _more(self) -> bool:
        piece = next(self._pieces, None)
        if piece is None:
            self._ended = True
            return False
        self._held = self._held[self._at :] + piece
        self._at = 0
        return True

    def peek(self) -> str:
        """The next character that is not white space; empty at the end."""
        while True:
            while self._at < len(self._held) and self._held[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._held):
                return self._held[self._at]
            if not self._more():
                return ""

    def skip(self, count: int) -> None:
        self._at += count

    def value(self) -> Any:
        """The next JSON value."""
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._held, self._at)
            except json.JSONDecodeError:
                if len(self._held) - self._at > self._limit:
                    raise ValueError(f"a value is longer than {self._limit:,} bytes") from None
                if self._ended or not self._more():
                    raise
                continue
            if end == len(self._held) and self._more():
                continue  # a number may go on
            self._at = end
            return value
