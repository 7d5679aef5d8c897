"""What an error of the operating system means for the object that it happened to."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from datasync.errors import DeniedError, NotFoundError, StoreError, TransientError, UnsupportedError

_TRANSIENT = {
    errno.EIO,
    errno.EAGAIN,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EINTR,
    errno.EBUSY,
    errno.ENETDOWN,
}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_OTHER_KIND = {errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY}


@contextmanager
def translated(root: str, key: str, *, reading: bool = False) -> Iterator[None]:
    """Raise an `OSError` of the block as the store's own error, naming the file and the mend.

    Args:
        root (str): The folder of the store.
        key (str): The object.
        reading (bool): The object is only looked at: below a file in the store there is none. Default:
            ``False``.
    """
    try:
        yield
    except OSError as error:
        if reading and error.errno == errno.ENOTDIR and _file_above(os.path.join(root, ".")) is None:
            error = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        raise _store_error(error, os.path.join(root, key)) from error


def _store_error(error: OSError, path: str) -> StoreError:
    code = error.errno
    why = error.strerror or str(error)
    if code == errno.ENOENT:
        return NotFoundError(f"no object {path}", mend="check the name, or that the file system is mounted")
    if code in (errno.EACCES, errno.EPERM):
        return DeniedError(f"{path}: {why}", mend="give this user access to it")
    if code == errno.EROFS:
        return DeniedError(
            f"{path}: the file system is mounted read-only", mend="write elsewhere, or remount it"
        )
    if code in _FULL:
        return StoreError(
            f"{path}: no space left; nothing was written", mend="free space or quota, then run again"
        )
    if code in _OTHER_KIND:
        return StoreError(f"{_in_the_way(path)} ({why})", mend="rename or remove it, or choose another place")
    if code == errno.ENAMETOOLONG:
        return StoreError(f"{path}: the name is too long for this file system", mend="shorten it")
    if code in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
        return UnsupportedError(
            f"{path}: this file system cannot do that ({why})", mend="mount it with locks and hard links"
        )
    if code in _TRANSIENT:
        return TransientError(f"{path}: {why}", mend="run again; if it stays, look at the file system's log")
    return StoreError(f"{path}: {why}", mend="look at the file system's log")


def _in_the_way(path: str) -> str:
    """Which file or folder has a name that is needed for the other."""
    above = _file_above(path)
    if above is not None:
        return f"{above} is a file, and {path} needs a folder there"
    return f"{path} is a folder, and an object needs that name"


def _file_above(path: str) -> Path | None:
    """What stands in a path where a folder should be."""
    above = reversed(Path(os.path.dirname(path), "x").parents)
    return next((folder for folder in above if folder.exists() and not folder.is_dir()), None)
