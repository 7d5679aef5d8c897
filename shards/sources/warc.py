"""WARC files of web crawls, plain or gzipped: one row a record that has content.

    url  date  record_type  record_id  status  content_type  content

`response` records give the body of the HTTP response, with its chunks joined and its compression undone;
`resource` and `conversion` records (WET) give their block. `status` is 0 where there is no HTTP. Records
about the crawl itself (`warcinfo`, `request`, `metadata`, `revisit`) are passed over.

A record that is damaged inside is refused; behind one whose length is wrong nothing can be found any more,
and the rest of the file is refused. A large plain local file is cut between its records.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from shards.sources.base import Bad, Item, Row, Source, SourceOptions, Task, content_error, reason
from shards.sources.files import FileList
from shards.sources.ranges import Edge, Part, open_part, part_tasks

_KEPT = frozenset({"response", "resource", "conversion"})
_MAX_LINE = 1 << 16
_MAX_RECORD = 1 << 30
_MAX_INFLATED = 1 << 28


class Warc(Source):
    """WARC files. A payload is a `Part`."""

    name = "warc"
    summary = "WARC and WET crawls (.warc .wet, also .gz)"
    extensions = frozenset({".warc", ".wet"})

    def __init__(self, files: FileList, options: SourceOptions) -> None:
        super().__init__(files, options)
        self._edges: dict[str, list[Edge]] = {}

    def tasks(self) -> Iterator[Task]:
        yield from part_tasks(self.mine(), self.options.target_bytes, self._find_edges)

    def _find_edges(self, file: FileList) -> list[Edge]:
        (name,) = file.names
        if name not in self._edges:
            self._edges[name] = _record_edges(file, self.options.target_bytes)
        return self._edges[name]

    def columns(self) -> dict[str, str]:
        texts = ("url", "date", "record_type", "record_id", "content_type")
        return {**dict.fromkeys(texts, "str"), "status": "int32", "content": "bytes"}

    def read(self, payload: Part) -> Iterator[Item]:
        for number, name in enumerate(payload.files.names):
            try:
                with open_part(payload, number) as stream:
                    yield from _records(stream, name, payload.begin.first)
            except Exception as error:
                if not content_error(error):
                    raise
                yield Bad(reason(error), name)


def _records(stream: BinaryIO, name: str, number: int) -> Iterator[Item]:
    """The rows of a stream that stands behind record `number` of its file."""
    while (found := _next(stream, number + 1)) is not None:
        number += 1
        headers, length = found
        block = _exactly(stream, length)
        if headers.get("warc-type") in _KEPT:
            yield _row(headers, block, name, number)


def _next(stream: BinaryIO, number: int) -> tuple[dict[str, str], int] | None:
    """The headers and the length of the next record, which is record `number`; None at the end."""
    while (version := _line(stream)) is not None:
        if not version:
            continue  # the blank lines between records
        if not version.startswith(b"WARC/"):
            raise ValueError(f"no WARC record where one should begin: {version[:40]!r}")
        headers = _headers(stream)
        length = headers.get("content-length", "")
        if not length.isdecimal() or int(length) > _MAX_RECORD:
            raise ValueError(f"record {number} has the length {length!r}")
        return headers, int(length)
    return None


def _record_edges(file: FileList, target_bytes: int) -> list[Edge]:
    """Where records begin, about every `target_bytes`, as far as the file is sound."""
    edges: list[Edge] = []
    number, wanted = 0, target_bytes
    with file.open(0) as stream:
        try:
            while (found := _next(stream, number + 1)) is not None:
                number += 1
                end = stream.seek(found[1], io.SEEK_CUR)
                if wanted <= end < int(file.sizes[0]):
                    edges.append(Edge(end, number))
                    wanted = end + target_bytes
        except (ValueError, EOFError):
            pass  # the last range holds what is wrong, and its reader says so
    return edges


def _row(headers: dict[str, str], block: bytes, name: str, number: int) -> Item:
    kind = headers["warc-type"]
    status, content_type, content = 0, headers.get("content-type", ""), block
    try:
        if content_type.replace(" ", "").startswith("application/http"):
            status, content_type, content = _response(block)
    except (ValueError, EOFError, OSError, zlib.error) as error:
        return Bad(reason(error), name, number, block[:256])
    record_id = headers.get("warc-record-id", "").strip("<>")
    values = {
        "url": headers.get("warc-target-uri", "").strip("<>"),
        "date": headers.get("warc-date", ""),
        "record_type": kind,
        "record_id": record_id,
        "status": status,
        "content_type": content_type,
        "content": content,
    }
    return Row(values, name, number, record_id or None)


def _response(block: bytes) -> tuple[int, str, bytes]:
    """Status, content type and body of an HTTP response."""
    head, separator, body = block.partition(b"\r\n\r\n")
    if not separator:
        head, separator, body = block.partition(b"\n\n")
    first, *rest = head.split(b"\n")
    parts = first.split()
    if not first.startswith(b"HTTP/") or len(parts) < 2 or not parts[1].isdigit():
        raise ValueError(f"no HTTP response: {first[:40]!r}")
    headers = _parse(rest)
    if "chunked" in headers.get("transfer-encoding", "").lower():
        body = _join_chunks(body)
    return int(parts[1]), headers.get("content-type", ""), _inflate(body, headers.get("content-encoding", ""))


def _join_chunks(body: bytes) -> bytes:
    """The body of a chunked response; as it is where some proxy has joined it already."""
    pieces: list[bytes] = []
    at = 0
    while True:
        end = body.find(b"\r\n", at)
        size = body[at:end].split(b";")[0].strip() if end >= 0 else b""
        try:
            length = int(size, 16)
        except ValueError:
            if not pieces:
                return body
            raise ValueError("a chunk of the response has no length") from None
        if not length:
            return b"".join(pieces)
        pieces.append(body[end + 2 : end + 2 + length])
        if len(pieces[-1]) < length:
            raise ValueError("the response ends inside a chunk")
        at = end + 2 + length + 2


def _inflate(body: bytes, encoding: str) -> bytes:
    """The body without its gzip or deflate compression, if it has one; at most `_MAX_INFLATED` bytes."""
    kind = encoding.strip().lower()
    if kind in ("gzip", "x-gzip") and body[:2] == b"\x1f\x8b":
        out = zlib.decompressobj(31)
    elif kind == "deflate" and body:
        out = zlib.decompressobj(15 if body[0] & 0x0F == 8 else -15)
    else:
        return body
    data = out.decompress(body, _MAX_INFLATED)
    if out.unconsumed_tail:
        raise ValueError(f"the response grows beyond {_MAX_INFLATED:,} bytes")
    if not out.eof:
        raise EOFError("the compressed response ends early")
    return data


def _headers(stream: BinaryIO) -> dict[str, str]:
    lines = []
    while (line := _line(stream)) is not None and line:
        lines.append(line)
    if line is None:
        raise EOFError("the file ends inside the headers of a record")
    return _parse(lines)


def _parse(lines: list[bytes]) -> dict[str, str]:
    """Header lines, names in lower case; a line that begins with white space goes on with the one before."""
    headers: dict[str, str] = {}
    last = ""
    for line in lines:
        text = line.decode("utf-8", "replace").rstrip("\r")
        if text[:1] in (" ", "\t") and last:
            headers[last] += " " + text.strip()
            continue
        name, colon, value = text.partition(":")
        if colon:
            last = name.strip().lower()
            headers[last] = value.strip()
    return headers


def _line(stream: BinaryIO) -> bytes | None:
    line = stream.readline(_MAX_LINE)
    if len(line) == _MAX_LINE:
        raise ValueError("a header line has no end")
    return line.rstrip(b"\r\n") if line else None


def _exactly(stream: BinaryIO, length: int) -> bytes:
    data = stream.read(length)
    while len(data) < length and (more := stream.read(length - len(data))):
        data += more
    if len(data) < length:
        raise EOFError("the file ends inside a record")
    return data
