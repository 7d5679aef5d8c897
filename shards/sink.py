"""Where the shards of a job go: the write side of a store, and a folder as the simplest one.

Any `datasync.storage.Store` is a `Sink`. `LocalSink` is for programs that use this package alone. A sink
pickles, and an object under its key is always complete (invariant 2).
"""

from __future__ import annotations

import errno
import fcntl
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from shards.errors import ConflictError, NotFoundError, StoreError, UsageError

Buffer = bytes | bytearray | memoryview

_TEMPORARY = ".datasync-tmp"


class SinkInfo(Protocol):
    """One object as its store describes it."""

    @property
    def key(self) -> str: ...

    @property
    def bytes(self) -> int: ...

    @property
    def etag(self) -> str | None: ...


class Sink(Protocol):
    """What a job needs of its destination; the semantics are those of `datasync.storage.Store`."""

    @property
    def url(self) -> str:
        """The destination, without secrets."""

    def stat(self, key: str) -> SinkInfo:
        """Describe an object; `NotFoundError` if there is none."""

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[SinkInfo]:
        """Every object whose key starts with `prefix`, sorted."""

    def read(self, key: str, *, start: int = 0, length: int | None = None, etag: str | None = None) -> bytes:
        """The bytes of an object or of a range of it."""

    def write(
        self,
        key: str,
        data: Buffer,
        *,
        crc32c: int | None = None,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> SinkInfo:
        """Store an object whole; a condition that does not hold is a `ConflictError`."""

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; one that does not exist is no error."""


@dataclass(frozen=True, slots=True)
class LocalInfo:
    """A file of a `LocalSink`."""

    key: str
    bytes: int
    etag: str | None


class LocalSink:
    """A local folder.

    Args:
        root (str | Path): Made by the first write.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).expanduser().absolute()
        if os.path.exists(self.root) and not os.path.isdir(self.root):
            raise UsageError(f"{self.root} is a file", mend="give the folder of the dataset")

    @property
    def url(self) -> str:
        return str(self.root)

    def stat(self, key: str) -> LocalInfo:
        with self._told("looked at", key):
            return _info(key, os.stat(self.root / key))

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[LocalInfo]:
        folder = self.root / prefix.rpartition("/")[0]
        keys = []
        for path, folders, names in os.walk(folder, onerror=_raise_unless_gone):
            folders[:] = [name for name in folders if name != _TEMPORARY]
            base = Path(path).relative_to(self.root).as_posix()
            keys += [name if base == "." else f"{base}/{name}" for name in names]
        for key in sorted(keys, key=os.fsencode):
            if key.startswith(prefix) and os.fsencode(key) > os.fsencode(after):
                with suppress(NotFoundError):  # another run has removed it since
                    yield self.stat(key)

    def read(self, key: str, *, start: int = 0, length: int | None = None, etag: str | None = None) -> bytes:
        with self._told("read", key), open(self.root / key, "rb") as file:
            if etag is not None and _etag(os.fstat(file.fileno())) != etag:
                raise ConflictError(f"{key} in {self.root} has changed")
            file.seek(start)
            return file.read() if length is None else file.read(length)

    @contextmanager
    def _told(self, what: str, key: str) -> Iterator[None]:
        """Give an error of the file system the words of a store."""
        try:
            yield
        except (FileNotFoundError, NotADirectoryError):
            raise NotFoundError(f"no {key} in {self.root}") from None
        except OSError as error:
            raise StoreError(
                f"{self.root / key} cannot be {what}: {error.strerror or error}", mend="check its permissions"
            ) from error

    def write(
        self,
        key: str,
        data: Buffer,
        *,
        crc32c: int | None = None,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> LocalInfo:
        path = self.root / key
        temporary = self.root / _TEMPORARY / f"{os.getpid()}-{uuid.uuid4().hex}"
        try:
            with _create(temporary) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                path.parent.mkdir(parents=True, exist_ok=True)
                self._place(temporary, path, key, if_absent, if_match)
            _sync(path.parent)
            return self.stat(key)
        except OSError as error:
            raise StoreError(
                f"{path} cannot be written: {error.strerror or error}",
                mend="check free space and permissions",
            ) from error
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
                _sweep(temporary.parent)

    def _place(self, temporary: Path, path: Path, key: str, if_absent: bool, if_match: str | None) -> None:
        if if_absent:
            try:
                os.link(temporary, path)
            except FileExistsError:
                raise ConflictError(f"{key} exists in {self.root}") from None
            return
        with _locked(path.parent):
            if if_match is not None and (not path.exists() or _etag(os.stat(path)) != if_match):
                raise ConflictError(f"{key} in {self.root} has changed")
            os.replace(temporary, path)

    def delete(self, keys: Iterable[str]) -> None:
        folders = set()
        for key in keys:
            (self.root / key).unlink(missing_ok=True)
            folders.add((self.root / key).parent)
        for folder in folders:
            while folder != self.root and self.root in folder.parents and _remove_empty(folder):
                folder = folder.parent


def _raise_unless_gone(error: OSError) -> None:
    """What `os.walk` cannot list it leaves out; a listing with a gap is none."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return
    raise StoreError(
        f"{error.filename} cannot be listed: {error.strerror or error}", mend="check its permissions"
    ) from error


def _create(path: Path) -> IO[bytes]:
    """Make a file, locked while its writer lives, and its folder, which others remove when it is empty."""
    for _ in range(100):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(path, "xb")  # noqa: SIM115  it is what is returned
        except (FileNotFoundError, FileExistsError):
            continue
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # swept away before it was locked
    raise FileNotFoundError(errno.ENOENT, "the folder is removed again and again")


def _sweep(folder: Path) -> None:
    """Remove the folder of temporary files, and those in it whose writers are dead: nobody locks them."""
    if _remove_empty(folder):
        return
    with suppress(OSError):
        for path in folder.iterdir():
            with suppress(OSError), open(path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
    _remove_empty(folder)


def _etag(status: os.stat_result) -> str:
    return f"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"


def _info(key: str, status: os.stat_result) -> LocalInfo:
    return LocalInfo(key, status.st_size, _etag(status))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock on `folder` that ends with the process at the latest (invariant 6)."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_empty(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError:
        return False
    return True
