"""Temporary files of a folder, their locks, and the sweep of what killed writers left.

A temporary file is locked by its writer as long as it is open. A file that nobody on this host holds was left
by a killed process and is removed by the next writer. A file of another host (its name says so) is removed
only after an hour without a change, since not every network file system carries locks between hosts.
Folders of uploads are kept for a week: they are how a killed run goes on.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from datasync.errors import UnsupportedError

HIDDEN = ".datasync-tmp"
UPLOAD_MARK = "-upload-"

_OTHER_HOST_SECONDS = 3600.0
_UPLOAD_SECONDS = 7 * 24 * 3600.0
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL}


@dataclass(frozen=True, slots=True, kw_only=True)
class TempFile:
    """An open, locked, empty file."""

    fd: int
    path: str


class TempFolder:
    """`<root>/.datasync-tmp`, made when needed and removed when empty.

    Args:
        root (str): The root of the store.
    """

    def __init__(self, root: str) -> None:
        self.path = os.path.join(root, HIDDEN)
        self._swept = False
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def file(self) -> Iterator[TempFile]:
        """A new file for writing; gone afterwards, unless it was renamed."""
        self._sweep_once()
        temp = self._create()
        try:
            yield temp
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temp.path)
            os.close(temp.fd)
            self.tidy()

    def folder(self) -> str:
        """A new folder for the parts of an upload."""
        self._sweep_once()
        path = os.path.join(self.path, f"{_host()}{UPLOAD_MARK}{uuid.uuid4().hex}")
        while True:
            try:
                os.makedirs(path)
                return path
            except FileNotFoundError:
                continue  # the folder above was tidied away between its making and this
            except FileExistsError:
                if os.path.lexists(self.path) and not os.path.isdir(self.path):
                    raise

    def tidy(self) -> None:
        """Remove the folder itself, if nothing is in it."""
        with contextlib.suppress(OSError):
            os.rmdir(self.path)

    def _create(self) -> TempFile:
        while True:
            path = os.path.join(self.path, f"{_host()}-{uuid.uuid4().hex}")
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:
                try:
                    os.makedirs(self.path, exist_ok=True)
                except FileExistsError:
                    # Another writer made it and one tidied it away, all during the call: again.
                    if os.path.lexists(self.path) and not os.path.isdir(self.path):
                        raise
                continue
            # A sweep may have found the file between its creation and its lock.
            if not _try_lock(fd) or not os.fstat(fd).st_nlink:
                os.close(fd)
                continue
            return TempFile(fd=fd, path=path)

    def _sweep_once(self) -> None:
        with self._lock:
            if not self._swept:
                self._swept = True
                self.sweep()

    def sweep(self) -> None:
        """Remove what writers that no longer live have left."""
        try:
            names = os.listdir(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return
        for name in names:
            with contextlib.suppress(OSError):  # swept by somebody else, or not ours to remove
                _sweep_one(os.path.join(self.path, name), own=name.startswith(f"{_host()}-"))
        self.tidy()


def _sweep_one(path: str, *, own: bool) -> None:
    age = time.time() - os.stat(path).st_mtime
    if UPLOAD_MARK in os.path.basename(path):
        if age > _UPLOAD_SECONDS:
            shutil.rmtree(path)
        return
    if not own and age < _OTHER_HOST_SECONDS:
        return
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if _try_lock(fd, without=age > _OTHER_HOST_SECONDS):
            os.unlink(path)
    finally:
        os.close(fd)


def _try_lock(fd: int, *, without: bool = True) -> bool:
    """Whether the file is now ours; `without` is the answer on a file system that has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return without
        raise
    return True


@contextlib.contextmanager
def folder_lock(folder: str, *, required: bool) -> Iterator[None]:
    """Hold the lock on a folder's entries, against other processes and threads.

    Args:
        folder (str): The folder, which exists.
        required (bool): Fail where there are no locks, instead of going on without.

    Raises:
        UnsupportedError: The file system has no locks, and one is required.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            if required:
                raise UnsupportedError(
                    f"{folder}: this file system has no locks on folders, so no conditional replacement",
                    mend="let one writer at a time use it",
                ) from error
        yield
    finally:
        os.close(fd)


def _host() -> str:
    """This host as a part of a file name."""
    return "".join(c if c.isalnum() else "_" for c in socket.gethostname())[:40] or "host"
