"""The files of a corpus: listed once, sorted, with what tells that one of them has changed.

A million files must fit: names are kept as one list of strings, sizes and versions as arrays.

What is left out, everywhere and by rule: names that begin with a dot (also the `._name` that macOS leaves),
`__MACOSX`, marker files of other writers (`_SUCCESS`), pipes, sockets and devices. A link to a folder is
followed, unless it leads to a folder that it lies in; a link to nothing is a file that cannot be read.
"""

from __future__ import annotations

import glob as globbing
import os
import posixpath
import stat as modes
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

from shards.errors import DatasyncError, UsageError
from shards.sources.base import changed, content_error

COMPRESSED = (".gz", ".bz2", ".zst", ".zstd", ".xz")
_MARKERS = frozenset({"__MACOSX", "_SUCCESS", "_datasync"})
_PACKED_TARS = frozenset({".tgz", ".tbz", ".tbz2", ".txz", ".tzst"})
_UNREADABLE = -1
_READS_AT_ONCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class FileList:
    """Files below one root, sorted by name.

    Args:
        root (str): A local folder, or a URL that fsspec can open, without a slash at the end.
        names (Sequence[str]): Names relative to the root, '/'-separated.
        sizes (numpy.ndarray): Bytes of each, int64; -1 for one that cannot be read.
        versions (numpy.ndarray): A number for each that differs when the file has changed, uint64.
        storage_options (Mapping[str, Any]): What fsspec needs to reach the root. Never written anywhere.
        notes (tuple[str, ...]): What was left out.
    """

    root: str
    names: Sequence[str]
    sizes: np.ndarray[Any, np.dtype[np.int64]]
    versions: np.ndarray[Any, np.dtype[np.uint64]]
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = ()
    _suffixes: list[str] = field(default_factory=list, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def remote(self) -> bool:
        """Whether the root is a URL."""
        return "://" in self.root

    @property
    def total_bytes(self) -> int:
        """Bytes of all files together."""
        return int(np.maximum(self.sizes, 0).sum())

    def path(self, number: int) -> str:
        """Where file `number` is."""
        root = "" if self.root == "/" else self.root
        return f"{root}/{self.names[number]}" if self.root else self.names[number]

    def suffix(self, number: int) -> str:
        """Extension in lower case, with what is below a compression: ``.jsonl`` for ``a.jsonl.gz``."""
        if not self._suffixes:
            self._suffixes.extend(map(suffix, self.names))
        return self._suffixes[number]

    def select(self, numbers: Iterable[int]) -> FileList:
        """A list of only these files, in this order."""
        chosen = np.fromiter(numbers, dtype=np.int64)
        names = self.names
        return FileList(
            root=self.root,
            names=[names[number] for number in chosen],
            sizes=self.sizes[chosen],
            versions=self.versions[chosen],
            storage_options=self.storage_options,
            notes=self.notes,
        )

    def slice(self, numbers: range) -> FileList:
        """A list of a run of consecutive files."""
        return FileList(
            root=self.root,
            names=self.names[numbers.start : numbers.stop],
            sizes=self.sizes[numbers.start : numbers.stop],
            versions=self.versions[numbers.start : numbers.stop],
            storage_options=self.storage_options,
        )

    def index(self) -> dict[str, int]:
        """Name -> number."""
        return {name: number for number, name in enumerate(self.names)}

    def read(self, number: int, *, limit: int | None = None) -> bytes:
        """All bytes of a file, which must be those that were listed.

        Raises:
            ChangedError: It is not the file that was listed.
            ValueError: It is longer than `limit`.
            OSError: It cannot be read.
        """
        size = int(self.sizes[number])
        if limit is not None and size > limit:
            raise ValueError(f"{size:,} bytes, more than the {limit:,} that a row may have")
        if self.remote:
            with self.open(number) as file:
                data = file.read()
            if len(data) != size:
                raise changed(self.names[number])
            return bytes(data)
        with open(self.path(number), "rb", buffering=0) as file:
            data = file.read(size + 1) if size >= 0 else file.read()
            while len(data) < size and (more := file.read(size - len(data) + 1)):
                data += more
            if len(data) != size or _version(os.fstat(file.fileno())) != int(self.versions[number]):
                raise changed(self.names[number])
        return data

    def read_each(self, *, limit: int | None = None) -> Iterator[tuple[int, bytes | Exception]]:
        """All bytes of every file in order, or why they cannot be had; several at a time where remote."""
        if not self.remote:
            for number in range(len(self)):
                yield number, self._attempt(number, limit)
            return
        with ThreadPoolExecutor(_READS_AT_ONCE) as pool:
            waiting: deque[Future[bytes | Exception]] = deque()
            for number in range(len(self) + _READS_AT_ONCE):
                if number < len(self):
                    waiting.append(pool.submit(self._attempt, number, limit))
                if number >= _READS_AT_ONCE and waiting:
                    yield number - _READS_AT_ONCE, waiting.popleft().result()

    def _attempt(self, number: int, limit: int | None) -> bytes | Exception:
        try:
            return self.read(number, limit=limit)
        except Exception as error:
            if not content_error(error):
                raise
            return error

    def open(self, number: int) -> BinaryIO:
        """Open a file for reading."""
        if not self.remote:
            return open(self.path(number), "rb")
        filesystem, path = self.filesystem(number)
        file: BinaryIO = filesystem.open(path, "rb")
        return file

    def filesystem(self, number: int) -> tuple[Any, str]:
        """The fsspec file system of a file, and the path there."""
        return open_filesystem(self.path(number), self.storage_options)

    def check_unchanged(self, number: int) -> None:
        """Raise `ChangedError` if a file is no longer what was listed."""
        if self.remote:
            filesystem, path = self.filesystem(number)
            filesystem.invalidate_cache(posixpath.dirname(path))
            info = filesystem.info(path)
            same = _remote_version(info) == int(self.versions[number])
        else:
            same = _version(os.stat(self.path(number))) == int(self.versions[number])
        if not same:
            raise changed(self.names[number])


def suffix(name: str) -> str:
    """Extension in lower case; of a compressed file, the extension below: ``.jsonl`` for ``a.jsonl.gz``."""
    base = name[name.rfind("/") + 1 :]
    at = base.rfind(".")
    if at <= 0:
        return ""
    last = base[at:].lower()
    if last in COMPRESSED:
        return suffix(base[:at]) or last
    return sys.intern(".tar" if last in _PACKED_TARS else last)


def hidden(name: str) -> bool:
    """Whether one part of a path is left out by rule."""
    return name.startswith(".") or name in _MARKERS


def list_files(sources: str | Sequence[str], *, storage_options: Mapping[str, Any] | None = None) -> FileList:
    """List a corpus: a file, a folder, a glob, a URL, ``@FILE`` with one of these a line, or several of them.

    Raises:
        UsageError: A source does not exist or holds no files.
    """
    asked = [sources] if isinstance(sources, str) else sources
    wanted = [source.removeprefix("file://") for source in _expand(asked)]
    options = dict(storage_options or {})
    if any("://" in source for source in wanted):
        found, notes = _list_remote(wanted, options)
    else:
        found, notes = _list_local(wanted)
    if not found:
        raise UsageError(
            f"{', '.join(wanted or asked)} holds no files", mend="name a folder or files that hold a corpus"
        )
    found.sort(key=lambda entry: os.fsencode(entry[0]))
    names = [entry[0] for entry in found]
    root, names = _relative(names, wanted)
    sizes = np.fromiter((entry[1] for entry in found), dtype=np.int64, count=len(found))
    versions = np.fromiter((entry[2] for entry in found), dtype=np.uint64, count=len(found))
    return FileList(
        root=root, names=names, sizes=sizes, versions=versions, storage_options=options, notes=tuple(notes)
    )


Found = list[tuple[str, int, int]]

# What is left out, and one of it.
_ONE = {
    "hidden files and markers": "hidden file or marker",
    "links to a folder above them": "link to a folder above it",
    "pipes, sockets and devices": "pipe, socket or device",
}


def _expand(sources: Iterable[str]) -> Iterator[str]:
    """Sources with ``@FILE`` replaced by what the file lists."""
    for source in sources:
        if not source.startswith("@"):
            yield source
            continue
        try:
            with open(source[1:], encoding="utf-8") as lines:
                yield from (line.strip() for line in lines if line.strip())
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"cannot read the list {source[1:]}: {error}", mend="give one path or URL a line"
            ) from error


def _list_local(sources: Sequence[str]) -> tuple[Found, list[str]]:
    found: Found = []
    left_out: dict[str, int] = {}
    for source in sources:
        path = os.path.abspath(source)
        matches = (
            [path] if os.path.lexists(path) else sorted(globbing.glob(path, recursive=True), key=os.fsencode)
        )
        if not matches:
            raise UsageError(
                f"there is no {source}", mend="check the path; quote a glob so that the shell leaves it"
            )
        for match in matches:
            if os.path.isdir(match):
                _walk(match, found, left_out, _identities(match))
            else:
                _add(match, found, left_out)
    if len(sources) > 1 or any(globbing.has_magic(source) for source in sources):
        found = list({entry[0]: entry for entry in found}.values())
    return found, [
        f"{count:,} {_ONE[what] if count == 1 else what} left out" for what, count in sorted(left_out.items())
    ]


def _walk(folder: str, found: Found, left_out: dict[str, int], above: frozenset[tuple[int, int]]) -> None:
    """Add the files below `folder`; `above` identifies the folders that it lies in, and itself."""
    with _scan(folder) as entries:
        for entry in entries:
            if hidden(entry.name):
                _count(left_out, "hidden files and markers")
                continue
            try:
                is_folder = entry.is_dir()
            except OSError:
                is_folder = False
            if not is_folder:
                _add(entry.path, found, left_out, entry)
                continue
            status = entry.stat()
            identity = (status.st_dev, status.st_ino)
            if identity in above:
                _count(left_out, "links to a folder above them")
            else:
                _walk(entry.path, found, left_out, above | {identity})


def _scan(folder: str) -> AbstractContextManager[Iterator[os.DirEntry[str]]]:
    try:
        return os.scandir(folder)
    except OSError as error:
        raise DatasyncError(
            f"cannot list {folder}: {error.strerror}", mend="check its permissions"
        ) from error


def _add(path: str, found: Found, left_out: dict[str, int], entry: os.DirEntry[str] | None = None) -> None:
    try:
        status = entry.stat() if entry is not None else os.stat(path)
    except OSError:
        found.append((path, _UNREADABLE, 0))
        return
    if modes.S_ISREG(status.st_mode):
        found.append((path, status.st_size, _version(status)))
    else:
        _count(left_out, "pipes, sockets and devices")


def _count(left_out: dict[str, int], what: str) -> None:
    left_out[what] = left_out.get(what, 0) + 1


def _identities(folder: str) -> frozenset[tuple[int, int]]:
    """Device and inode of `folder` and of every folder it really lies in."""
    real = os.path.realpath(folder)
    chain = []
    while True:
        status = os.stat(real)
        chain.append((status.st_dev, status.st_ino))
        if os.path.dirname(real) == real:
            return frozenset(chain)
        real = os.path.dirname(real)


def _version(status: os.stat_result) -> int:
    """Changes when a local file is written to."""
    return status.st_mtime_ns & 0xFFFF_FFFF_FFFF_FFFF


def open_filesystem(url: str, storage_options: Mapping[str, Any]) -> tuple[Any, str]:
    """The fsspec file system of `url` and the path in it; a scheme that is not known is a `UsageError`."""
    import fsspec

    try:
        filesystem, path = fsspec.core.url_to_fs(url, **storage_options)
    except (ImportError, ValueError) as error:
        raise UsageError(
            f"cannot open {url}: {error}", mend="install the fsspec package for this kind of URL"
        ) from error
    return filesystem, path


def _list_remote(sources: Sequence[str], options: Mapping[str, Any]) -> tuple[Found, list[str]]:
    if not all("://" in source for source in sources):
        raise UsageError(
            "local paths and URLs cannot be mixed in one source", mend="shard them one after the other"
        )
    found: Found = []
    for source in sources:
        filesystem, path = open_filesystem(source, options)
        scheme = source.split("://", 1)[0]
        try:
            infos = _remote_infos(filesystem, path)
        except FileNotFoundError as error:
            why = f" ({error.__cause__})" if error.__cause__ is not None else ""
            raise UsageError(
                f"there is no {source}{why}", mend="check the URL and the cluster it names"
            ) from error
        except Exception as error:  # each store has its own classes
            raise DatasyncError(
                f"cannot list {source}: {type(error).__name__}: {error}",
                mend="check the URL, the endpoint and the credentials",
            ) from error
        for name, info in infos:
            url = name if "://" in name else f"{scheme}://{name.lstrip('/')}"
            found.append((url, int(info["size"] or 0), _remote_version(info)))
    return found, []


def _remote_infos(filesystem: Any, path: str) -> list[tuple[str, dict[str, Any]]]:
    """Every object that `path` names: itself, what a glob matches, or what lies below a prefix."""
    if globbing.has_magic(path) and "://" not in path:  # in a web address, ? and [ are themselves
        listed = filesystem.glob(path, detail=True)
    else:
        listed = _below(filesystem, path)
    base = path.rstrip("/")
    infos = [
        (name, info)
        for name, info in listed.items()
        if info.get("type") == "file"
        and not name.endswith("/")
        and not any(hidden(part) for part in name[len(base) :].split("/") if name.startswith(base))
    ]
    if not infos:
        raise FileNotFoundError(path)
    return infos


def _below(filesystem: Any, path: str) -> dict[str, dict[str, Any]]:
    """The file at `path`, or what is below it."""
    if not path.endswith("/"):
        try:
            info = filesystem.info(path)
        except FileNotFoundError:
            if "://" in path:
                raise
        else:
            if info.get("type") == "file":
                return {path: info}
    listed: dict[str, dict[str, Any]] = filesystem.find(path, detail=True)
    if "://" in path:  # a page of links says no sizes
        with ThreadPoolExecutor(_READS_AT_ONCE) as pool:
            return dict(zip(listed, pool.map(filesystem.info, listed), strict=True))
    return listed


def _remote_version(info: Mapping[str, Any]) -> int:
    """Changes when a remote file is replaced, as far as its store says so."""
    import xxhash

    tag = next(
        (
            str(info[name])
            for name in (
                *("ETag", "etag", "md5Hash", "version_id", "mtime", "LastModified"),
                *("Last-Modified", "created"),
            )
            if info.get(name)
        ),
        "",
    )
    return xxhash.xxh3_64_intdigest(f"{info.get('size')} {tag}".encode())


def _relative(paths: list[str], sources: Sequence[str]) -> tuple[str, list[str]]:
    """The source itself where it is one folder, else the deepest folder that holds all sorted `paths`."""
    root = _shared_folder(paths[0], paths[-1])
    if len(sources) == 1:
        only = sources[0].rstrip("/")
        if "://" not in only:
            only = os.path.abspath(only)
        if root.startswith(f"{only}/"):
            root = only
    cut = len(root) + 1
    return root or "/", [path[cut:] for path in paths]


def _shared_folder(first: str, last: str) -> str:
    """The deepest folder of two paths; what the first and last of sorted paths share, all share."""
    shared = 0
    while shared < min(len(first), len(last)) and first[shared] == last[shared]:
        shared += 1
    return first[: first.rfind("/")] if first == last else first[: first.rfind("/", 0, shared)]
