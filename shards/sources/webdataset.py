"""WebDataset: tar files in which neighbouring members with one key are a sample; also gz, bz2, zst, xz.

A member `dir/0001.seg.png` belongs to the sample `dir/0001` and is its column `seg.png`. The key is in the
column `__key__`. Values are bytes, but for `txt` and `text` (text), `cls` and `index` (a whole number) and
`json`.

Nothing is ever written to disk. A large plain local tar is cut between its samples. What is refused: members
of one key that are not neighbours, a column twice in a sample, links, names that leave the archive; the rest
of a tar behind a header or a member that is damaged. What an operating system left (`._x`, `__MACOSX`) is
passed over.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from shards.sources.base import Bad, Item, Row, Source, SourceOptions, Task, content_error, reason
from shards.sources.files import FileList, hidden
from shards.sources.ranges import Edge, Part, open_part, part_tasks

_MAX_MEMBER = (1 << 32) - 1
_MAX_HEADER = 1 << 20
_PAX = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
_SMALL_MEMBER = 1 << 27
_GROWTH = 200  # times the whole compressed archive; no media, and no array worth having, is packed better


class WebDataset(Source):
    """Tar files. A payload is a `Part`."""

    name = "webdataset"
    summary = "WebDataset tars (.tar .tar.gz .tgz .tar.zst)"
    extensions = frozenset({".tar"})

    def __init__(self, files: FileList, options: SourceOptions) -> None:
        super().__init__(files, options)
        self._edges: dict[str, list[Edge]] = {}

    def tasks(self) -> Iterator[Task]:
        yield from part_tasks(self.mine(), self.options.target_bytes, self._find_edges)

    def _find_edges(self, file: FileList) -> list[Edge]:
        (name,) = file.names
        if name not in self._edges:
            self._edges[name] = _sample_edges(file, self.options.target_bytes)
        return self._edges[name]

    def read(self, payload: Part) -> Iterator[Item]:
        for number, name in enumerate(payload.files.names):
            try:
                with open_part(payload, number, text=False) as stream:
                    limit = max(_SMALL_MEMBER, _GROWTH * int(payload.files.sizes[number]))
                    yield from _samples(stream, name, payload.begin, min(limit, _MAX_MEMBER))
            except Exception as error:
                if not content_error(error) and not isinstance(error, tarfile.TarError):
                    raise
                yield Bad(reason(error), name)


def _samples(stream: BinaryIO, name: str, begin: Edge, limit: int) -> Iterator[Item]:
    """The samples of one tar, or of a range of it."""
    seen = set(begin.known)
    key, problem = "", ""
    values: dict[str, Any] = {}
    for member, data in _members(stream, begin.offset, limit):
        if isinstance(data, str):
            yield Bad(data, name, member)
            continue
        own, field = _key(member)
        if not own:
            yield Bad("the member has no key or no extension", name, member)
            continue
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


def _key(member: str) -> tuple[str, str]:
    """The key of a member and its column; empty where it has none."""
    folder, slash, base = member.rpartition("/")
    stem, dot, field = base.partition(".")
    return (f"{folder}{slash}{stem}", field) if dot and stem else ("", "")


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


def _members(stream: BinaryIO, begins: int, limit: int) -> Iterator[tuple[str, bytes | str]]:
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
    archive.begins = begins  # type: ignore[attr-defined]  # for what `_Member` says
    with archive:
        for member in _headers(archive, counted):
            name, problem = _check(member, limit)
            if problem:
                yield name, problem
            elif name:
                content = archive.extractfile(member)
                assert content is not None
                yield name, content.read()


def _check(member: tarfile.TarInfo, limit: int = _MAX_MEMBER) -> tuple[str, str]:
    """The name of a member, empty if it is passed over, and why it is refused, if it is."""
    name = member.name.removeprefix("./")
    parts = name.split("/")
    if member.isdir() or any(hidden(part) for part in parts if part != ".."):
        return "", ""
    if name.startswith("/") or ".." in parts:
        return name, "the name leaves the archive"
    if not member.isfile():
        return name, "the member is a link or a device"
    if member.size > _MAX_MEMBER:
        return name, f"the member has {member.size:,} bytes, more than a row may have"
    if member.size > limit:
        return name, f"the member has {member.size:,} bytes, far more than the archive that holds it"
    return name, ""


def _sample_edges(file: FileList, target_bytes: int) -> list[Edge]:
    """Where samples begin, about every `target_bytes`, as far as the archive is sound."""
    offsets: list[int] = []
    known: list[set[str]] = []
    seen: dict[str, int] = {}  # key -> number of the range that it was in last
    last, wanted = "", target_bytes
    with file.open(0) as stream:
        try:
            archive = tarfile.open(  # noqa: SIM115  closes nothing: the file is ours
                fileobj=stream, mode="r:", tarinfo=_Member, errors="surrogateescape"
            )
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # it would hold every header
                if archive.pax_headers:
                    return []  # they are for all members behind them
                name, problem = _check(member)
                key = _key(name)[0] if not problem else ""
                if not key or key == last:
                    continue
                last = key
                if member.offset >= wanted:
                    offsets.append(member.offset)
                    known.append(set())
                    wanted = member.offset + target_bytes
                if seen.get(key, len(offsets)) != len(offsets):
                    known[-1].add(key)
                seen[key] = len(offsets)
        except (tarfile.TarError, ValueError, EOFError):
            pass  # the last range holds what is wrong, and its reader says so
    return [Edge(offset, 0, frozenset(keys)) for offset, keys in zip(offsets, known, strict=True)]


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
            left = counted.bytes - archive.offset
            if 0 < left < tarfile.BLOCKSIZE and counted.last[-left:].strip(b"\0"):
                raise EOFError("the archive ends inside a header")
            return
        yield member
        last = member


class _Counted:
    """A stream that knows how many bytes were read of it, and the last of them."""

    def __init__(self, stream: BinaryIO) -> None:
        # read1 gives what there is before it meets the end of a file that is cut, read would lose it.
        self._read = getattr(stream, "read1", stream.read)
        self.bytes = 0
        self.last = b""

    def read(self, size: int) -> bytes:
        data: bytes = self._read(size)
        self.bytes += len(data)
        self.last = data[-tarfile.BLOCKSIZE :] or self.last
        return data


class _Member(tarfile.TarInfo):
    """A member whose header must be sound.

    `tarfile` would take a damaged one for the end of the archive, hold a long name of any length, and read a
    member of less than no bytes again and again.
    """

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        name_or_pax = self.type in (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK) or self.type in _PAX
        if self.size < 0 or (name_or_pax and self.size > _MAX_HEADER):
            raise ValueError(f"a header with the size {self.size:,}")
        found: tarfile.TarInfo = super()._proc_member(archive)  # type: ignore[misc]  # not in the stubs
        return found

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> _Member:
        from tarfile import InvalidHeaderError  # type: ignore[attr-defined]  # not in the stubs

        try:
            return super().fromtarfile(tarfile)
        except InvalidHeaderError as error:
            at = tarfile.offset + getattr(tarfile, "begins", 0)
            raise ValueError(f"a damaged header at byte {at:,}") from error
