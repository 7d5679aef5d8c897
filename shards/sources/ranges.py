"""Large plain files, cut into byte ranges that each begin where a row begins, so that one file is many tasks.

Where rows begin is found by passing over the file once, before any work starts: cuts follow from the file
alone and not from who reads it (invariant 3). What is found wrong on the way ends the cutting; the last range
then holds it, and whoever reads that says what is wrong, as if the file had never been cut.

A compressed file has no place to begin in the middle, and one on a store would be fetched twice: those stay
whole. So do files of which there are many: they are work enough for everybody, and to pass over all of them
would only take time.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np

from shards.sources.base import Task, content_error, group
from shards.sources.files import FileList
from shards.sources.streams import is_compressed, open_stream

_BLOCK = 4 << 20
_MANY = 32  # a file with less than this part of the corpus is not cut
_QUOTE, _LF, _CR = b'"\n\r'

Places = np.ndarray[Any, np.dtype[np.intp]]


class Edge(NamedTuple):
    """Where a range begins.

    Args:
        offset (int): In bytes.
        first (int): Lines or records before it.
        known (frozenset[str]): Keys of this range that also stand in an earlier one.
    """

    offset: int
    first: int
    known: frozenset[str] = frozenset()


class Part(NamedTuple):
    """The payload of a task: whole files, or a range of one.

    Args:
        files (FileList): The files.
        begin (Edge): Where the range begins.
        end (int | None): Byte behind it; None is the end of the file.
    """

    files: FileList
    begin: Edge = Edge(0, 0)
    end: int | None = None


def part_tasks(
    files: FileList,
    target_bytes: int,
    find_edges: Callable[[FileList], list[Edge]],
    *,
    passes_over: bool = True,
) -> Iterator[Task]:
    """Tasks of about `target_bytes`: small files together, a large plain one in ranges.

    Args:
        files (FileList): The files.
        target_bytes (int): About how many bytes a task should have.
        find_edges (Callable[[FileList], list[Edge]]): Where in the one file given a range may begin.
        passes_over (bool): It reads the file for that. Default: ``True``.
    """
    for numbers, size in group(files, target_bytes):
        own = files.slice(numbers)
        dear = passes_over and (files.remote or size * _MANY <= files.total_bytes)
        whole = len(own) > 1 or size <= target_bytes or dear or is_compressed(own, 0)
        edges = [] if whole else _sound(find_edges, own)
        begins = [Edge(0, 0), *edges]
        ends = [edge.offset for edge in edges]
        for begin, end in zip(begins, [*ends, None], strict=True):
            length = (size if end is None else end) - begin.offset
            yield Task(payload=Part(own, begin, end), bytes=length)


def _sound(find_edges: Callable[[FileList], list[Edge]], file: FileList) -> list[Edge]:
    """The edges of a file; none of one that cannot be read, which its reader will say."""
    try:
        return find_edges(file)
    except Exception as error:
        if not content_error(error):
            raise
        return []


@contextmanager
def open_part(part: Part, number: int, *, text: bool = True) -> Iterator[BinaryIO]:
    """As `open_stream`, standing at the range and ending with it."""
    with open_stream(part.files, number, text=text) as stream:
        if part.begin.offset == 0 and part.end is None:
            yield stream
            return
        stream.seek(part.begin.offset)
        left = int(part.files.sizes[number]) if part.end is None else part.end
        yield cast(BinaryIO, io.BufferedReader(_Limited(stream, left - part.begin.offset), 1 << 20))


class _Limited(io.RawIOBase):
    """The next `left` bytes of a stream."""

    def __init__(self, stream: BinaryIO, left: int) -> None:
        self._stream = stream
        self._left = left

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # any buffer, there
        data = self._stream.read(min(len(buffer), self._left))
        buffer[: len(data)] = data
        self._left -= len(data)
        return len(data)


def record_edges(file: FileList, separator: str, target_bytes: int) -> list[Edge]:
    """Where records of delimited text begin, about every `target_bytes`: behind a line end outside quotes.

    A quote opens a field only where a field begins and closes it only where one ends; behind a quote that
    stands elsewhere nothing is cut.
    """
    edges: list[Edge] = []
    offset = lines = 0
    inside = False  # whether `offset` is inside quotes
    wanted = target_bytes
    before = b"\n"
    with file.open(0) as stream:
        while block := stream.read(_BLOCK):
            if offset == 0:  # nothing stands before a byte order mark
                block = block.removeprefix(b"\xef\xbb\xbf").rjust(len(block), separator.encode())
            quotes, wrong = _quotes(before + block, inside, ord(separator))
            end = len(block) if wrong is None else wrong
            if offset + end > wanted:
                at = _line_ends(block, end, quotes, inside)
                for place in at[np.searchsorted(at, wanted - offset) :].tolist():
                    if offset + place >= wanted:
                        edges.append(Edge(offset + place, lines + _count_lines(before, block[:place])))
                        wanted = offset + place + target_bytes
            if wrong is not None:
                break
            inside ^= bool(len(quotes) & 1)
            lines += _count_lines(before, block)
            offset += len(block)
            before = block[-1:]
    return [edge for edge in edges if edge.offset < int(file.sizes[0])]


def _quotes(data: bytes, inside: bool, separator: int) -> tuple[Places, int | None]:
    """Places of quotes in ``data[1:]``, and the place of the first that stands where none may, or None."""
    if b'"' not in data:
        return np.empty(0, np.intp), None
    array = np.frombuffer(data, np.uint8)
    found = np.flatnonzero(array[1:] == _QUOTE)
    around = np.zeros(256, bool)
    around[[separator, _LF, _CR, _QUOTE]] = True
    if array[0] == _QUOTE and not inside and not around[array[1]]:
        return found, 0  # a quote at the end of the block before closed a field
    if not len(found):
        return found, None
    opening = (np.arange(len(found)) & 1).astype(bool) == inside
    good = np.where(opening, around[array[found]], around[array[np.minimum(found + 2, len(array) - 1)]])
    good[-1] |= not opening[-1] and found[-1] + 2 >= len(array)  # what follows it is in the next block
    wrong = np.flatnonzero(~good)
    return found, int(found[wrong[0]]) if len(wrong) else None


def _line_ends(block: bytes, end: int, quotes: Places, inside: bool) -> Places:
    """Places behind line ends of ``block[:end]`` that are outside quotes."""
    found = np.flatnonzero(np.frombuffer(block, np.uint8, end) == _LF)
    outside = (np.searchsorted(quotes, found) & 1).astype(bool) == inside
    places: Places = found[outside] + 1
    return places


def _count_lines(before: bytes, data: bytes) -> int:
    """Line ends in `data`, which follows the byte `before`; a CR and an LF together are one."""
    lines = data.count(b"\n") - (before == b"\r" and data.startswith(b"\n"))
    alone = data.count(b"\r")
    return lines + (alone - data.count(b"\r\n") if alone else 0)
