"""Where `ShardWriter` puts files: a local folder, or any place that fsspec can reach.

Invariant 2 is kept here: a file under its name is complete. In a folder it is written under a unique
temporary name, synced and renamed; on an object store one PUT does the same.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from pathlib import Path
from typing import Any, Protocol

from shards.digests import Buffer
from shards.errors import DatasyncError, UsageError

_log = logging.getLogger(__name__)

# Object stores have no folders to make, and making one there may create the bucket that a typo names.
_FLAT = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "ocilake", "oss", "hf"})
_CHECK = "check the URL, the credentials and whether the store can be reached"


class Place(Protocol):
    """A folder of files, by names relative to it."""

    url: str

    def read(self, name: str) -> bytes | None:
        """A small file's bytes; None if there is no such file."""

    def write(self, name: str, data: Buffer) -> None:
        """Store a file whole, replacing one of that name."""

    def delete(self, name: str) -> None:
        """Remove a file; one that does not exist is no error."""

    def undo(self) -> None:
        """Remove the files that were new when they were written here, where that can be known."""


class Folder:
    """A local folder.

    Args:
        path (str | Path): Made when the first file is written.
    """

    def __init__(self, path: str | Path) -> None:
        self._root = Path(path).expanduser()
        self.url = str(self._root)
        self._new: set[Path] = set()
        if self._root.exists() and not self._root.is_dir():
            raise UsageError(f"{self._root} is no folder", mend="give the folder of the dataset")

    def occupied(self) -> bool:
        """Whether anything is in it."""
        return self._root.is_dir() and any(self._root.iterdir())

    def read(self, name: str) -> bytes | None:
        try:
            return (self._root / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise DatasyncError(
                f"{self._root / name} cannot be read: {error.strerror or error}", mend="check its permissions"
            ) from error

    def write(self, name: str, data: Buffer) -> None:
        path = self._root / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            new = not path.exists()
            _replace(path, data)
        except OSError as error:
            raise DatasyncError(
                f"{path} cannot be written: {error.strerror or error}",
                mend="check free space and permissions, then write again",
            ) from error
        if new:
            self._new.add(path)

    def delete(self, name: str) -> None:
        (self._root / name).unlink(missing_ok=True)

    def undo(self) -> None:
        for path in self._new:
            path.unlink(missing_ok=True)
        for folder in {path.parent for path in self._new}:
            if folder != self._root and not any(folder.iterdir()):
                folder.rmdir()
        self._new.clear()


class Remote:
    """A folder on a store, by fsspec.

    Args:
        url (str): Its URL.
        fs (Any): The file system.
        path (str): Its path there.
        retry (int): How often a failed write is tried again.
    """

    def __init__(self, url: str, fs: Any, path: str, *, retry: int) -> None:
        self.url = url.rstrip("/")
        self._fs = fs
        self._path = path.rstrip("/")
        self._retry = max(retry, 0)
        self._flat = bool(_FLAT & set(_protocols(fs)))

    def read(self, name: str) -> bytes | None:
        try:
            return bytes(self._fs.cat_file(f"{self._path}/{name}"))
        except FileNotFoundError:
            return None
        except Exception as error:  # each store has its own class
            raise DatasyncError(f"{self.url}/{name} cannot be read: {error}", mend=_CHECK) from error

    def write(self, name: str, data: Buffer) -> None:
        path = f"{self._path}/{name}"
        for attempt in range(self._retry + 1):
            try:
                if not self._flat:
                    self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
                self._fs.pipe_file(path, bytes(data))
                return
            except Exception as error:
                if attempt == self._retry:
                    raise DatasyncError(
                        f"{self.url}/{name} cannot be written: {error}", mend=_CHECK
                    ) from error
                _log.warning("%s/%s: %s; trying again", self.url, name, error)
                time.sleep(min(2.0**attempt / 2, 10.0))

    def delete(self, name: str) -> None:
        try:
            self._fs.rm_file(f"{self._path}/{name}")
        except FileNotFoundError:
            return

    def undo(self) -> None:
        """Nothing: a shard of that name may be another dataset's, and one too many harms nobody."""


def open_place(url: str, *, retry: int = 0) -> Folder | Remote:
    """The place at `url`; a local path or ``file://`` is a `Folder`."""
    if "://" not in url:
        return Folder(url)
    import fsspec

    try:
        fs, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UsageError(
            f"{url} cannot be opened: {error}", mend="check the scheme; install its package"
        ) from error
    if "file" in _protocols(fs):
        return Folder(path)
    # A listing kept from before would hide what others have written since.
    fs.invalidate_cache()
    return Remote(url, fs, path, retry=retry)


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _replace(path: Path, data: Buffer) -> None:
    """Write a file so that it is there whole and durable, or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
