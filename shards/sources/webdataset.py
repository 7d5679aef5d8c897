"""WebDataset: tar files in which neighbouring members with one key are a sample; also gz, bz2, zst, xz.

A member `dir/0001.seg.png` belongs to the sample `dir/0001` and is its column `seg.png`. The key is in the
column `__key__`. Values are bytes, but for `txt` and `text` (text), `cls` and `index` (a whole number) and
`json`.

Nothing is ever written to disk, and what is in a tar is found by reading it to its end. What is refused:
members of one key that are not neighbours, a column twice in a sample, links, names that leave the archive;
the rest of a tar behind a header or a member that is damaged. What an operating system left (`._x`,
`__MACOSX`) is passed over.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from shards.sources.base import Bad, Item, Row, Source, Task, content_error, group, reason
from shards.sources.files import FileList, hidden
from shards.sources.streams import open_stream

_MAX_MEMBER = (1 << 32) - 1


class WebDataset(Source):
    """Tar files. A payload is a list of them."""

    name = "webdataset"
    summary = "WebDataset tars (.tar .tar.gz .tgz .tar.zst)"
    extensions = frozenset({".tar"})

    def tasks(self) -> Iterator[Task]:
        files = self.mine()
        for numbers, size in group(files, self.options.target_bytes):
            yield Task(payload=files.slice(numbers), bytes=size)

    def read(self, payload: FileList) -> Iterator[Item]:
        for number, name in enumerate(payload.names):
            try:
                with open_stream(payload, number) as stream:
                    yield from _samples(stream, name)
            except Exception as error:
                if not content_error(error) and not isinstance(error, tarfile.TarError):
                    raise
                yield Bad(reason(error), name)


def _samples(stream: BinaryIO, name: str) -> Iterator[Item]:
    """The samples of one tar."""
    seen: set[str] = set()
    key, problem = "", ""
    values: dict[str, Any] = {}
    for member, data in _members(stream):
        if isinstance(data, str):
            yield Bad(data, name, member)
            continue
        folder, slash, base = member.rpartition("/")
        stem, dot, field = base.partition(".")
        if not dot or not stem:
            yield Bad("the member has no key or no extension", name, member)
            continue
        own = f"{folder}{slash}{stem}"
        if own != key:
            yield from _sample(key, values, problem, name)
            problem = "members of this key stand apart from each other" if own in seen else ""
            key, values = own, {}
            seen.add(own)
        if field.lower() in values:
            problem = f"the member {field!r} comes twice"
        try:
            values[field.lower()] = _decode(field.lower(), data)
        except ValueError as error:
            problem = f"{field}: {reason(error)}"
    yield from _sample(key, values, problem, name)


def _sample(key: str, values: dict[str, Any], problem: str, name: str) -> Iterator[Item]:
    if problem:
        yield Bad(problem, name, key)
    elif values:
        yield Row({"__key__": key, **values}, name, key, key)


def _decode(field: str, data: bytes) -> Any:
    kind = field.rpartition(".")[2]
    if kind in ("txt", "text", "caption"):
        return data.decode("utf-8-sig")
    if kind in ("cls", "index", "inx", "id"):
        return int(data)
    if kind == "json":
        return json.loads(data.decode())
    return data


def _members(stream: BinaryIO) -> Iterator[tuple[str, bytes | str]]:
    """Name and content of every file, or why it is refused; damage is a ValueError."""
    counted = _Counted(stream)
    try:
        archive = tarfile.open(  # noqa: SIM115  closed by the `with` below
            fileobj=cast(BinaryIO, counted), mode="r|", tarinfo=_Member, errors="surrogateescape"
        )
    except tarfile.ReadError as error:
        if "empty" in str(error):
            return
        raise
    with archive:
        for member in _headers(archive, counted):
            name = member.name.removeprefix("./")
            parts = name.split("/")
            if member.isdir() or any(hidden(part) for part in parts if part != ".."):
                continue
            if name.startswith("/") or ".." in parts:
                yield name, "the name leaves the archive"
            elif not member.isfile():
                yield name, "the member is a link or a device"
            elif member.size > _MAX_MEMBER:
                yield name, f"the member has {member.size:,} bytes, more than a row may have"
            else:
                content = archive.extractfile(member)
                assert content is not None
                yield name, content.read()


def _headers(archive: tarfile.TarFile, counted: _Counted) -> Iterator[tarfile.TarInfo]:
    """The members of an archive; one that ends right behind the bytes of its last member is whole."""
    last: tarfile.TarInfo | None = None
    while True:
        try:
            member = archive.next()
        except tarfile.ReadError:
            if last is not None and 0 <= counted.bytes - last.offset_data - last.size < tarfile.BLOCKSIZE:
                return
            raise
        if member is None:
            return
        yield member
        last = member


class _Counted:
    """A stream that knows how many bytes were read of it."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.bytes = 0

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self.bytes += len(data)
        return data


class _Member(tarfile.TarInfo):
    """A member whose damaged header is an error; `tarfile` would take it for the end of the archive."""

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> _Member:
        from tarfile import InvalidHeaderError  # type: ignore[attr-defined]  # not in the stubs

        try:
            return super().fromtarfile(tarfile)
        except InvalidHeaderError as error:
            raise ValueError(f"a damaged header at byte {tarfile.offset:,}") from error
