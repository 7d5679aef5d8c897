"""CSV and TSV: a header, then one row a record; fields may be quoted and hold line ends.

The separator is what the header holds most of, out of comma, semicolon, tab and bar. A column of whole
numbers becomes `int`, of numbers `float64`, anything else stays text; an empty field is a null in a column of
numbers.

What is refused: a record with more or fewer fields than the header; the rest of a file behind a quote that
never closes; a file that is not in the character set that it should be.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import BinaryIO

from shards.sources.base import Bad, Item, Row, Source, Task, content_error, group, reason
from shards.sources.files import FileList
from shards.sources.streams import open_stream

_SEPARATORS = ",;\t|"
_HEAD = 1 << 16


class Delimited(Source):
    """CSV and TSV files. A payload is a list of files; a file is never cut: it may be inside quotes there."""

    name = "csv"
    summary = "CSV and TSV (.csv .tsv .tab), also gz, bz2, zst, xz"
    extensions = frozenset({".csv", ".tsv", ".tab"})
    textual = True

    def tasks(self) -> Iterator[Task]:
        files = self.mine()
        for numbers, size in group(files, self.options.target_bytes):
            yield Task(payload=files.slice(numbers), bytes=size)

    def read(self, payload: FileList) -> Iterator[Item]:
        csv.field_size_limit(self.options.max_line_bytes)
        for number, name in enumerate(payload.names):
            try:
                with open_stream(payload, number) as stream:
                    yield from self._records(stream, name)
            except Exception as error:
                if not content_error(error) and not isinstance(error, csv.Error):
                    raise
                yield Bad(_why(error), name)

    def _records(self, stream: BinaryIO, name: str) -> Iterator[Item]:
        text = io.TextIOWrapper(stream, encoding=self.options.encoding or "utf-8-sig", newline="")
        head = text.readline(_HEAD)
        separator = self.options.delimiter or _separator(head, name)
        reader = csv.reader(_again(head, text), delimiter=separator, strict=True)
        header = next(reader, None)
        if header is None:
            return
        if len(set(header)) != len(header):
            raise ValueError(f"the header names a column twice: {', '.join(header)}")
        for fields in reader:
            if not fields:
                continue
            if len(fields) != len(header):
                shown = separator.join(fields)[:4096].encode(errors="replace")
                yield Bad(f"{len(fields)} fields, the header has {len(header)}", name, reader.line_num, shown)
            else:
                yield Row(dict(zip(header, fields, strict=True)), name, reader.line_num)


def _separator(head: str, name: str) -> str:
    if name.lower().split(".")[1:2] in (["tsv"], ["tab"]):
        return "\t"
    outside = "".join(head.split('"')[::2])  # what is not in quotes
    return max(_SEPARATORS, key=outside.count)


def _again(head: str, rest: Iterator[str]) -> Iterator[str]:
    """The lines of a file whose first line was read."""
    if head:
        yield head
    yield from rest


def _why(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not {error.encoding}: {error.reason} at byte {error.start} (try --encoding)"
    if "unexpected end of data" in str(error):
        return "a quote never closes"
    return reason(error)
