"""CSV and TSV: a header, then one row a record; fields may be quoted and hold line ends.

The separator is what the header holds most of, out of comma, semicolon, tab and bar. A column of whole
numbers becomes `int`, of numbers `float64`, anything else stays text; an empty field is a null in a column of
numbers. Text is UTF-8, or what its byte order mark or `--encoding` says.

What is refused: a record with more or fewer fields than the header, or with bytes that are no text; the rest
of a file behind a quote that never closes; a file whose header is not in the character set that it should be.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any, BinaryIO

from shards.sources.base import Bad, Item, Row, Source, SourceOptions, Task, content_error, reason
from shards.sources.files import FileList, suffix
from shards.sources.ranges import Edge, Part, open_part, part_tasks, record_edges
from shards.sources.streams import extends_ascii, marked_encoding, open_stream, peek

_SEPARATORS = ",;\t|"
_HEAD = 1 << 16
_ERRORS = "surrogateescape"  # so that a record that is no text is refused alone


class Delimited(Source):
    """CSV and TSV files. A payload is a `Part`: a large local file is cut between its records."""

    name = "csv"
    summary = "CSV and TSV (.csv .tsv .tab), also gz, bz2, zst, xz"
    extensions = frozenset({".csv", ".tsv", ".tab"})
    textual = True
    takes = frozenset({"delimiter", "encoding"})

    def __init__(self, files: FileList, options: SourceOptions) -> None:
        super().__init__(files, options)
        self._edges: dict[str, list[Edge]] = {}
        self._odd = False

    def tasks(self) -> Iterator[Task]:
        yield from part_tasks(self.mine(), self.options.target_bytes, self._find_edges)

    def _find_edges(self, file: FileList) -> list[Edge]:
        (name,) = file.names
        if name not in self._edges:
            with file.open(0) as stream:
                head = stream.read(_HEAD)
            encoding = self._encoding(head)
            text = head.removeprefix(b"\xef\xbb\xbf").decode("latin-1").lstrip("\r\n")
            separator = self.options.delimiter or _separator(text.partition("\n")[0], name)
            cut = extends_ascii(encoding) and separator.isascii()
            self._edges[name] = record_edges(file, separator, self.options.target_bytes) if cut else []
        return self._edges[name]

    def _encoding(self, head: bytes) -> str:
        return self.options.encoding or marked_encoding(head) or "utf-8"

    def read(self, payload: Part) -> Iterator[Item]:
        csv.field_size_limit(self.options.max_line_bytes)
        for number, name in enumerate(payload.files.names):
            try:
                yield from self._file(payload, number, name)
            except Exception as error:
                if not content_error(error) and not isinstance(error, csv.Error):
                    raise
                yield Bad(_why(error), name)

    def _file(self, part: Part, number: int, name: str) -> Iterator[Item]:
        with open_stream(part.files, number) as stream:
            text, head = self._text(stream)
            separator = self.options.delimiter or _separator(head.lstrip("\r\n"), name)
            lines = chain(io.StringIO(head, newline=""), self._lines(text))
            reader = csv.reader(lines, delimiter=separator, strict=True)
            header = _header(reader)
            if header is None:
                return
            bad = _undecoded(header)
            if bad:
                raise ValueError(f"not {text.encoding.removesuffix('-sig')}: {bad} (try --encoding)")
            if len(set(header)) != len(header):
                raise ValueError(f"the header names a column twice: {', '.join(header)}")
            encoding = text.encoding
            if part.begin.offset == 0 and part.end is None:
                yield from self._records(reader, header, name, separator, encoding, 0)
                return
        with open_part(part, number) as stream:
            if part.begin.offset:
                encoding = encoding.removesuffix("-sig")
            text = io.TextIOWrapper(stream, encoding, errors=_ERRORS, newline="")
            reader = csv.reader(self._lines(text), delimiter=separator, strict=True)
            if part.begin.offset == 0:
                _header(reader)
            yield from self._records(reader, header, name, separator, encoding, part.begin.first)

    def _text(self, stream: BinaryIO) -> tuple[io.TextIOWrapper, str]:
        """The text of a file, and what of it has been read: its first line that is not empty."""
        encoding = self._encoding(peek(stream))
        if encoding.lower() in ("utf-8", "utf8"):
            encoding = "utf-8-sig"
        text = io.TextIOWrapper(stream, encoding, errors=_ERRORS, newline="")
        head = ""
        for line in self._lines(text):
            head += line
            if line.strip("\r\n"):
                break
        return text, head

    def _lines(self, text: io.TextIOWrapper) -> Iterator[str]:
        """The lines of `text`, none held that is longer than a row may be."""
        limit = self.options.max_line_bytes
        while line := text.readline(limit + 1):
            if len(line) > limit:
                raise ValueError(f"a line is longer than {limit:,} bytes")
            if not line.isascii():
                self._odd = True
            yield line

    def _records(
        self, reader: Any, header: list[str], name: str, separator: str, encoding: str, first: int
    ) -> Iterator[Item]:
        """The records that `reader` has left; `first` lines stand before those that it reads."""
        self._odd = True  # whether the record at hand may hold what is no text
        for fields in reader:
            if not fields:
                continue
            at = first + reader.line_num
            if len(fields) != len(header):
                why = f"{len(fields)} fields, the header has {len(header)}"
            elif self._odd and (bad := _undecoded(fields)):
                why = f"not {encoding.removesuffix('-sig')}: {bad} (try --encoding)"
            else:
                self._odd = False
                yield Row(dict(zip(header, fields, strict=True)), name, at)
                continue
            yield Bad(why, name, at, separator.join(fields)[:4096].encode(errors="surrogateescape"))


def _undecoded(fields: list[str]) -> str:
    """What in a record is no text; empty if all of it is."""
    text = "".join(fields)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"the byte 0x{ord(text[error.start]) & 0xFF:02x} is no text"
    return ""


def _header(reader: Iterator[list[str]]) -> list[str] | None:
    """The names of the columns; what spreadsheets write before them, ``sep=;``, is passed over."""
    records = filter(None, reader)
    first = next(records, None)
    return next(records, None) if first == ["sep=", ""] else first


def _separator(head: str, name: str) -> str:
    said = re.fullmatch(r"sep=(.)\r?\n?", head)
    if said is not None:
        return said[1]
    if suffix(name) in (".tsv", ".tab"):
        return "\t"
    outside = "".join(head.split('"')[::2])  # what is not in quotes
    return max(_SEPARATORS, key=outside.count)


def _why(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not {error.encoding}: {error.reason} (try --encoding)"
    if "unexpected end of data" in str(error):
        return "a quote never closes"
    return reason(error)
