"""Plain text and Markdown: one row a file, or (`--lines`) one row a line.

The columns are `text` and `file_name`. Text is UTF-8, or what its byte order mark or `--encoding` says; a
file or a line that is not is refused, never guessed at. Line ends inside a file stay as they are; a line ends
at \\n or \\r\\n alone, not at the other characters that some tools also break at. With `--lines`, a large
plain file is cut into ranges, each taking the lines that begin in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from shards.sources.base import Bad, Item, Row, Source, Task, content_error, group, reason
from shards.sources.files import FileList
from shards.sources.ranges import Edge, Part, part_tasks
from shards.sources.streams import (
    AsUtf8,
    Line,
    extends_ascii,
    lines,
    marked_encoding,
    open_stream,
    peek,
    seek_line,
)


class Text(Source):
    """Text files. A payload is a `Part`."""

    name = "text"
    summary = "plain text and Markdown (.txt .md .text .rst), also compressed"
    extensions = frozenset({".txt", ".md", ".text", ".rst", ".markdown"})
    takes = frozenset({"encoding", "lines"})

    def tasks(self) -> Iterator[Task]:
        files, target = self.mine(), self.options.target_bytes
        if not self.options.whole_files:
            yield from part_tasks(files, target, self._edges, passes_over=False)
            return
        for numbers, size in group(files, target, size=lambda n: max(int(files.sizes[n]), 0) + 64):
            yield Task(payload=Part(files.slice(numbers)), bytes=size)

    def _edges(self, file: FileList) -> list[Edge]:
        """Where ranges of equal length begin; each takes the lines that begin in it."""
        with file.open(0) as stream:
            encoding = self._encoding(stream.read(8))
        if not extends_ascii(encoding):
            return []
        size, target = int(file.sizes[0]), self.options.target_bytes
        count = -(-size // target)
        return [Edge(size * part // count, 0) for part in range(1, count)]

    def read(self, payload: Part) -> Iterator[Item]:
        for number, name in enumerate(payload.files.names):
            try:
                yield from self._file(payload, number, name)
            except Exception as error:
                if not content_error(error):
                    raise
                yield Bad(reason(error), name)

    def _file(self, part: Part, number: int, name: str) -> Iterator[Item]:
        limit = self.options.max_line_bytes
        with open_stream(part.files, number) as stream:
            if self.options.whole_files:
                data = stream.read(limit + 1)
                if len(data) > limit:
                    raise ValueError(f"more than {limit:,} bytes of text")
                yield self._row(data, self._encoding(data[:4]), name, "")
                return
            encoding = self._encoding(peek(stream))
            if extends_ascii(encoding):
                found = _ranged(stream, limit, part)
            else:
                found, encoding = lines(AsUtf8(stream, encoding), limit=limit), "utf-8"
            for line in found:
                at = line.number if part.begin.offset == 0 else f"byte {line.offset}"
                if line.too_long:
                    yield Bad(f"the line is longer than {limit:,} bytes", name, at)
                elif line.data:
                    own = "utf-8" if line.offset and encoding == "utf-8-sig" else encoding
                    yield self._row(line.data, own, name, at)

    def _encoding(self, head: bytes) -> str:
        return self.options.encoding or marked_encoding(head) or "utf-8"

    def _row(self, data: bytes, encoding: str, name: str, at: str | int) -> Item:
        try:
            text = data.decode(encoding)
        except UnicodeDecodeError as error:
            why = f"not {encoding}: {error.reason} at byte {error.start} (try --encoding)"
            return Bad(why, name, at, data[:4096])
        return Row({"text": text, "file_name": name}, name, at, name if at == "" else None)


def _ranged(stream: BinaryIO, limit: int, part: Part) -> Iterator[Line]:
    """The lines that begin in a range."""
    offset = seek_line(stream, part.begin.offset)
    if part.end is not None and offset >= part.end:
        return
    yield from lines(stream, limit=limit, offset=offset, end=part.end)
