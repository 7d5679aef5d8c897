"""Plain text and Markdown: one row a file, or (`--lines`) one row a line.

The columns are `text` and `file_name`. Text is UTF-8, or what its byte order mark or `--encoding` says; a
file or a line that is not is refused, never guessed at. Line ends inside a file stay as they are; a line ends
at \\n or \\r\\n alone, not at the other characters that some tools also break at.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator

from shards.sources.base import Bad, Item, Row, Source, Task, content_error, group, reason
from shards.sources.files import FileList
from shards.sources.streams import lines, open_stream

_MARKS = (  # the longer first: UTF-32 begins as UTF-16 does
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


class Text(Source):
    """Text files. A payload is a list of files."""

    name = "text"
    summary = "plain text and Markdown (.txt .md .text .rst), also compressed"
    extensions = frozenset({".txt", ".md", ".text", ".rst", ".markdown"})

    def tasks(self) -> Iterator[Task]:
        files = self.mine()
        for numbers, size in group(
            files, self.options.target_bytes, size=lambda n: max(int(files.sizes[n]), 0) + 64
        ):
            yield Task(payload=files.slice(numbers), bytes=size)

    def read(self, payload: FileList) -> Iterator[Item]:
        for number, name in enumerate(payload.names):
            try:
                yield from self._file(payload, number, name)
            except Exception as error:
                if not content_error(error):
                    raise
                yield Bad(reason(error), name)

    def _file(self, files: FileList, number: int, name: str) -> Iterator[Item]:
        limit = self.options.max_line_bytes
        with open_stream(files, number) as stream:
            if self.options.whole_files:
                data = stream.read(limit + 1)
                if len(data) > limit:
                    raise ValueError(f"more than {limit:,} bytes of text")
                yield self._row(data, name, "")
                return
            for line in lines(stream, limit=limit):
                if line.too_long:
                    yield Bad(f"the line is longer than {limit:,} bytes", name, line.number)
                elif line.data:
                    yield self._row(line.data, name, line.number)

    def _row(self, data: bytes, name: str, at: str | int) -> Item:
        encoding = self.options.encoding or next(
            (kind for mark, kind in _MARKS if data.startswith(mark)), "utf-8"
        )
        try:
            text = data.decode(encoding)
        except UnicodeDecodeError as error:
            why = f"not {encoding}: {error.reason} at byte {error.start} (try --encoding)"
            return Bad(why, name, at, data[:4096])
        return Row({"text": text, "file_name": name}, name, at, name if at == "" else None)
