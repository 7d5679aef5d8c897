"""A folder as a store: local NVMe, or a parallel file system that every node mounts.

An object is a file; its key is the path below the root. How a write stays invisible until it is complete
(invariant 2):

    <root>/.datasync-tmp/<host>-<uuid>     written, fsynced, locked by its writer
        rename or link  ->  <root>/<key>   then the folder is fsynced

`list` never shows `.datasync-tmp`, and the folder goes when the last write is done. A writer that was killed
leaves its file there; the next writer finds it unlocked and removes it (`temp.py`).

Conditional writes: `if_absent` links the file under its key, which one of several racing writers can do;
`if_match` compares and renames under a lock on the target's folder, which every other write and delete takes
too. Both hold between processes, and between the nodes of a file system with working locks.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat as stat_module
from collections.abc import Iterable, Iterator
from pathlib import Path

from datasync.errors import (
    ConflictError,
    CorruptError,
    NotFoundError,
    StoreError,
    TransientError,
    UnsupportedError,
)
from datasync.storage.base import Abilities, Buffer, Filled, ObjectInfo, Store, Upload, UploadInfo
from datasync.storage.keys import check_key, check_prefix, join, utf8
from datasync.storage.local_errors import translated
from datasync.storage.temp import HIDDEN, TempFolder, folder_lock

_COPY_CHUNK = 16 << 20
_PIECE_BYTES = 256 << 10
_RETRY_MKDIR = 10
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


class LocalStore:
    """Objects as files below a folder.

    Args:
        root (str | os.PathLike[str]): The folder; it is made by the first write.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.path.abspath(os.path.expanduser(os.fspath(root)))
        self._temp = TempFolder(self.root)

    @property
    def url(self) -> str:
        return self.root

    def __repr__(self) -> str:
        return f"LocalStore({self.root!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LocalStore) and other.root == self.root

    def __hash__(self) -> int:
        return hash((LocalStore, self.root))

    def __reduce__(self) -> tuple[object, ...]:
        return LocalStore, (self.root,)

    def child(self, prefix: str) -> LocalStore:
        return LocalStore(os.path.join(self.root, check_prefix(prefix, where=self.url)))

    def abilities(self) -> Abilities:
        return Abilities(
            if_absent=True, if_match=True, crc32c=True, multipart=True, server_copy=True, ranges=True
        )

    # Reading

    def path(self, key: str) -> str:
        """The file of `key`.

        Raises:
            StoreError: The key leaves the root, or no file can have that name.
        """
        check_key(key, where=self.url)
        segments = key.split("/")
        if not all(segments):
            raise StoreError(
                f"{key!r} cannot be a file below {self.root}: it has an empty segment",
                mend="keep this tree in an object store, or rename the object",
            )
        if HIDDEN in segments:
            raise StoreError(f"{key!r} below {self.root}: the name {HIDDEN} is reserved", mend="rename it")
        return os.path.join(self.root, key)

    def stat(self, key: str) -> ObjectInfo:
        path = self.path(key)
        with translated(self.url, key, reading=True):
            return self._described(key, os.stat(path))

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        try:
            if not stat_module.S_ISDIR(os.stat(self.root).st_mode):
                raise StoreError(f"{self.root} is a file, not a folder", mend="name the folder that holds it")
        except FileNotFoundError:
            raise NotFoundError(
                f"no folder {self.root}", mend="check the path, or that it is mounted"
            ) from None
        except OSError as error:
            with translated(self.url, ""):
                raise error
        # Start in the deepest folder that the prefix names, instead of walking the whole root.
        folder = prefix.rpartition("/")[0]
        path = os.path.join(self.root, check_prefix(folder, where=self.url)) if folder else self.root
        if folder and not os.path.isdir(path):
            return
        seen = (_identity(os.stat(path)),)
        yield from self._walk(path, f"{folder}/" if folder else "", utf8(prefix), utf8(after), seen)

    def _walk(
        self, path: str, base: str, prefix: bytes, after: bytes, above: tuple[tuple[int, int], ...]
    ) -> Iterator[ObjectInfo]:
        """The files below `path`, whose keys start with `base`, in the order of their keys."""
        with translated(self.url, base):
            names = []
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.name != HIDDEN:
                        names.append(utf8(entry.name + "/" if entry.is_dir() else entry.name))
        names.sort()
        start = utf8(base)
        for name in names:
            key = start + name
            is_folder = name.endswith(b"/")
            if not key.startswith(prefix) and not (is_folder and prefix.startswith(key)):
                continue
            if key <= after and not (is_folder and after.startswith(key)):
                continue
            text = key.decode("utf-8", "surrogateescape")
            full = os.path.join(self.root, text)
            try:
                with translated(self.url, text):
                    found = os.stat(full)
            except NotFoundError:
                if os.path.islink(full.rstrip("/")):
                    raise StoreError(
                        f"{full} is a link to nothing", mend="remove the link or restore what it points to"
                    ) from None
                continue  # deleted since the folder was read
            if not is_folder:
                if not stat_module.S_ISREG(found.st_mode):
                    raise StoreError(f"{full} is not a regular file", mend="move it out of the tree")
                yield self._described(text, found)
                continue
            if _identity(found) in above:
                raise StoreError(
                    f"{full.rstrip('/')} is a link to a folder above it: the tree has no end",
                    mend="remove the link",
                )
            with contextlib.suppress(NotFoundError):
                yield from self._walk(full, text, prefix, after, (*above, _identity(found)))

    def read(self, key: str, *, start: int = 0, length: int | None = None, etag: str | None = None) -> bytes:
        with self.stream(key, start=start, length=length, etag=etag, chunk=1 << 30) as pieces:
            parts = [bytes(piece) for piece in pieces]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(
        self,
        key: str,
        buffer: memoryview,
        *,
        start: int | None = None,
        etag: str | None = None,
        sha256: bool = False,
    ) -> Filled:
        from shards.digests import crc32c

        with self._opened(key, etag) as (fd, before):
            size = before.st_size if start is None else min(len(buffer), max(before.st_size - start, 0))
            if size > len(buffer):
                return Filled(bytes=size, crc32c=0)
            at, value, digest = 0, 0, hashlib.sha256()
            while at < size:
                with translated(self.url, key):
                    count = os.preadv(fd, [buffer[at : min(at + _PIECE_BYTES, size)]], (start or 0) + at)
                if not count:
                    raise self._shorter(key, size - at)
                value = crc32c(buffer[at : at + count], value)
                if sha256:
                    digest.update(buffer[at : at + count])
                at += count
            if _etag(os.fstat(fd)) != _etag(before):
                raise _changed(self.path(key))
            return Filled(bytes=size, crc32c=value, sha256=digest.hexdigest() if sha256 else None)

    @contextlib.contextmanager
    def stream(
        self,
        key: str,
        *,
        start: int = 0,
        length: int | None = None,
        etag: str | None = None,
        chunk: int = 1 << 20,
    ) -> Iterator[Iterator[Buffer]]:
        with self._opened(key, etag) as (fd, before):
            wanted = before.st_size - start if length is None else min(length, before.st_size - start)
            yield self._pieces(fd, key, start, max(wanted, 0), chunk, before)

    @contextlib.contextmanager
    def _opened(self, key: str, etag: str | None) -> Iterator[tuple[int, os.stat_result]]:
        path = self.path(key)
        with translated(self.url, key, reading=True):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with translated(self.url, key):
                before = os.fstat(fd)
            if stat_module.S_ISDIR(before.st_mode):
                raise NotFoundError(f"{path} is a folder, not an object", mend="name a file in it")
            if etag is not None and _etag(before) != etag:
                raise _changed(path)
            yield fd, before
        finally:
            os.close(fd)

    def _shorter(self, key: str, missing: int) -> TransientError:
        return TransientError(
            f"{self.path(key)} became shorter while it was read: {missing} bytes are missing",
            mend="run again when nothing writes to it",
        )

    def _pieces(
        self, fd: int, key: str, start: int, wanted: int, chunk: int, before: os.stat_result
    ) -> Iterator[Buffer]:
        offset, end = start, start + wanted
        while offset < end:
            with translated(self.url, key):
                piece = os.pread(fd, min(chunk, end - offset), offset)
            if not piece:
                raise self._shorter(key, end - offset)
            offset += len(piece)
            if offset == end and _etag(os.fstat(fd)) != _etag(before):
                raise _changed(self.path(key))
            yield piece

    # Writing

    def write(
        self,
        key: str,
        data: Buffer,
        *,
        crc32c: int | None = None,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> ObjectInfo:
        target = self.path(key)
        view = memoryview(data).cast("B")
        if crc32c is not None:
            check_crc32c(view, crc32c, where=target)
        with translated(self.url, key), self._temp.file() as temp:
            write_all(temp.fd, view)
            return self.publish(temp.fd, temp.path, key, if_absent=if_absent, if_match=if_match)

    def write_file(self, key: str, path: Path, *, if_absent: bool = False) -> ObjectInfo:
        self.path(key)
        with translated(self.url, key), self._temp.file() as temp:
            with open(path, "rb") as source:
                copy_bytes(source.fileno(), temp.fd)
            return self.publish(temp.fd, temp.path, key, if_absent=if_absent)

    def copy(self, source: Store, source_key: str, key: str) -> ObjectInfo:
        if not isinstance(source, LocalStore):
            raise UnsupportedError(
                f"{source.url} and {self.url} are not one store: bytes must pass through here"
            )
        path = source.path(source_key)
        self.path(key)
        with contextlib.ExitStack() as stack:
            with translated(source.url, source_key):
                opened = stack.enter_context(open(path, "rb"))
            before = _etag(os.fstat(opened.fileno()))
            with translated(self.url, key), self._temp.file() as temp:
                copy_bytes(opened.fileno(), temp.fd)
                if _etag(os.fstat(opened.fileno())) != before:
                    raise _changed(path)
                return self.publish(temp.fd, temp.path, key)

    def publish(
        self, fd: int, path: str, key: str, *, if_absent: bool = False, if_match: str | None = None
    ) -> ObjectInfo:
        """Give a finished temporary file, still open as `fd`, its name."""
        os.fsync(fd)
        target = self.path(key)
        folder = os.path.dirname(target)
        for _ in range(_RETRY_MKDIR):
            try:
                _make_folder(folder)
                if if_absent:
                    _link_new(path, target)
                else:
                    with folder_lock(folder, required=if_match is not None):
                        if if_match is not None:
                            _check_match(target, if_match)
                        os.rename(path, target)
            except FileNotFoundError:
                if not os.path.exists(path):
                    raise
                continue  # a concurrent delete found the folder empty and removed it
            _sync_folder(folder)
            return self._described(key, os.fstat(fd))
        raise TransientError(f"the folder {folder} is removed as fast as it is made", mend="run again")

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self.path(key)
            folder = os.path.dirname(path)
            with translated(self.url, key):
                try:
                    with folder_lock(folder, required=False):
                        os.unlink(path)
                except (FileNotFoundError, NotADirectoryError):
                    continue
                self._prune(folder)

    def _prune(self, folder: str) -> None:
        """Remove folders that a delete left empty, up to the root."""
        while folder.startswith(self.root + os.sep):
            try:
                os.rmdir(folder)
            except OSError:
                return
            folder = os.path.dirname(folder)

    # Uploads

    @property
    def temp_path(self) -> str:
        """The hidden folder of temporary files and uploads."""
        return self._temp.path

    def new_upload_folder(self) -> str:
        """A new hidden folder for the parts of an upload."""
        return self._temp.folder()

    def tidy(self) -> None:
        """Remove the hidden folder, if nothing is in it."""
        self._temp.tidy()

    def begin(self, key: str, *, bytes: int) -> Upload:
        from datasync.storage.local_upload import LocalUpload

        self.path(key)
        return LocalUpload.begin(self, key, bytes)

    def resume(self, key: str, upload_id: str, *, bytes: int) -> Upload:
        from datasync.storage.local_upload import LocalUpload

        self.path(key)
        return LocalUpload.resume(self, key, upload_id, bytes)

    def uploads(self, prefix: str = "") -> Iterator[UploadInfo]:
        from datasync.storage.local_upload import uploads

        return uploads(self, prefix)

    def _described(self, key: str, found: os.stat_result) -> ObjectInfo:
        if not stat_module.S_ISREG(found.st_mode):
            raise NotFoundError(
                f"{join(self.root, key)} is not a file", mend="name an object; a folder is not one"
            )
        return ObjectInfo(key=key, bytes=found.st_size, etag=_etag(found), mtime=found.st_mtime)


def _make_folder(folder: str) -> None:
    """Make a folder and its parents.

    Raises:
        FileNotFoundError: A delete found it empty and removed it meanwhile: try again.
        FileExistsError: A file has its name.
    """
    try:
        os.makedirs(folder, exist_ok=True)
    except FileExistsError:
        if os.path.isdir(folder) or not os.path.lexists(folder):
            # It was there, and gone a moment later, when `makedirs` looked whether it is a folder.
            raise FileNotFoundError(folder) from None
        raise


def _link_new(path: str, target: str) -> None:
    """Name a file that must not exist yet; of several writers one succeeds."""
    try:
        os.link(path, target)
        return
    except FileExistsError:
        raise _exists(target) from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    with folder_lock(os.path.dirname(target), required=True):
        if os.path.lexists(target):
            raise _exists(target)
        os.rename(path, target)


def _check_match(target: str, etag: str) -> None:
    try:
        found = _etag(os.stat(target))
    except FileNotFoundError:
        raise _changed(target) from None
    if found != etag:
        raise _changed(target)


def _sync_folder(folder: str) -> None:
    """Make the new name outlive a power failure; a folder that is gone again needs no name."""
    with contextlib.suppress(FileNotFoundError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def write_all(fd: int, view: memoryview, offset: int = 0) -> None:
    """Write a whole buffer at `offset`: one call may take less than it was given."""
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


def copy_bytes(source: int, target: int) -> None:
    """Copy a whole file inside the kernel where it can, which on some file systems shares the blocks."""
    try:
        while os.copy_file_range(source, target, _COPY_CHUNK):
            pass
        return
    except OSError:
        os.lseek(source, 0, os.SEEK_SET)
        os.lseek(target, 0, os.SEEK_SET)
        os.ftruncate(target, 0)
    while piece := os.read(source, _COPY_CHUNK):
        view = memoryview(piece)
        while view:
            view = view[os.write(target, view) :]


def check_crc32c(view: memoryview, expected: int, *, where: str) -> None:
    """Compare a CRC-32C that came with the data, as an S3 server would."""
    from shards.digests import crc32c

    found = crc32c(view)
    if found != expected:
        raise CorruptError(
            f"the bytes for {where} have crc32c {found:08x}, expected {expected:08x}; nothing was written",
            mend="read them again from the source",
        )


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _etag(found: os.stat_result) -> str:
    return f"{found.st_ino:x}-{found.st_size:x}-{found.st_mtime_ns:x}"


def _changed(path: str) -> ConflictError:
    return ConflictError(
        f"{path} has changed since it was looked at", mend="look again and start that object again"
    )


def _exists(path: str) -> ConflictError:
    return ConflictError(f"{path} exists already", mend="read it, or choose another name")
