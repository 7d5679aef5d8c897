"""The cache folder: verified files, shared by every rank, worker, dataset and job that names it.

    <cache>/[split/]<basename>                the files, where MosaicML Streaming's LocalDataset reads them
    <cache>/.datasync-cache/owner.json        says that datasync keeps a cache here
                            placed/ adopted/  stamps: what was put here, what was verified (`stamps.py`)
                            tmp/<id>.<bytes>  files being written; the name reserves the bytes
                            locks/<name>      held by the process that fetches this file
                            limit.lock        held while room is made
                            quarantine/       files that did not verify

All that processes share is in these files (invariant 6): no shared memory, no barrier, no server, and every
lock ends with the process that holds it. A file in its place is complete (invariant 2): it was written under
a temporary name, verified, and renamed. There is no fsync: a cache may be lost, and `stamps.py` makes sure
that what a power loss damaged is not trusted.

How much may lie here, and what goes when there is no room, is in `room.py`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import struct
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from datasync.errors import CorruptError, DatasyncError, UsageError
from datasync.streaming.filelock import file_lock, try_lock
from datasync.streaming.room import Need, Room, Temp, quarantine_name, quarantined
from datasync.streaming.stamps import FOLDER, Item, Stamp, Stamps, encoded
from datasync.streaming.stats import Stats
from shards.digests import cheapest, compare, digest_file
from shards.version import __version__

_QUARANTINED = 4


class Place(Protocol):
    """Where downloads go: the cache, or memory in its stead."""

    root: Path

    def reserve(self, bytes: int, need: Need) -> AbstractContextManager[Temp]:
        """An empty file for so many bytes; gone afterwards unless placed."""

    def place(self, temp: Temp, item: Item, digests: Mapping[str, str]) -> None:
        """Keep a written and verified file."""


class Cache:
    """One cache folder.

    Args:
        root (Path): The folder; made when needed.
        limit (int | None): Most bytes of placed files; None for no limit.
        evict (bool): Whether files can be fetched again, and may be removed.
        stats (Stats): Where adoption, quarantine and eviction are counted.
        roots (Sequence[Path]): All cache folders that share the limit. Default: this one.
    """

    def __init__(
        self, root: Path, *, limit: int | None, evict: bool, stats: Stats, roots: Sequence[Path] = ()
    ) -> None:
        self.root = root
        self.evict = evict
        self.stamps = Stamps(root)
        self.room = Room(root, limit=limit, evict=evict, stats=stats, roots=roots)
        self._stats = stats
        self._own = os.path.join(root, FOLDER)

    # Reading

    def path(self, name: str) -> str:
        """Where a file lies, or would lie."""
        return os.path.join(self.root, name)

    def trusted(self, item: Item) -> bool:
        """Whether the file is here and known to be good, without reading it."""
        try:
            status = os.stat(self.path(item.name))
        except (FileNotFoundError, NotADirectoryError):
            return False
        stamp = self.stamps.read(item.name)
        return stamp is not None and stamp.vouches_for(item, status)

    def adopt(self, item: Item) -> bool:
        """Check a file that lies here without a stamp that vouches for it; the caller holds its lock.

        Args:
            item (Item): What it should be.

        Returns:
            bool: Whether it is good and now trusted. If not, it is out of the way.

        Raises:
            CorruptError: It is bad, and the only copy: there is nowhere to fetch it from.
        """
        path = self.path(item.name)
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        stamp = self.stamps.read(item.name)
        placed = self.stamps.is_placed(item.name)
        if stamp is not None and stamp.inode and stamp.unchanged(status) and not stamp.agrees(item):
            self._stats.log_once(
                f"shared {self.root}",
                "%s holds another version or dataset's %s, which is fetched again; give each its own folder",
                self.root,
                item.name,
            )
            self._set_aside(item.name, path, placed=placed)
            return False
        expected = item.hashes or (stamp.digests if stamp is not None and stamp.bytes == item.bytes else {})
        check = set(item.check) or {name for name in [cheapest(expected)] if name}
        got = digest_file(path, check) if status.st_size == item.bytes else {}
        good = status.st_size == item.bytes and all(expected[name].lower() == got[name] for name in check)
        if good and not check:
            good = _plausible(path)
        if not good and not placed and not self.evict:
            raise _only_copy(item, path, got)
        if not good:
            self.quarantine(item, got)
            return False
        boots = stamp.boots if stamp is not None and stamp.unchanged(status) else ()
        with contextlib.suppress(PermissionError):
            self._mark()
            self.stamps.write(Stamp.of(item, status, got, boots), placed=placed)
        self._stats.add(adopted=1)
        return True

    def quarantine(self, item: Item, got: Mapping[str, str]) -> None:
        """Move a file that is not what the index says out of the way."""
        self._stats.add(quarantined=1)
        try:
            compare(item.hashes, got, where=self.path(item.name))
            what = f"{self.path(item.name)} is not {item.bytes:,} bytes of a whole shard"
        except CorruptError as error:
            what = error.message
        self._stats.log_once(f"quarantine {self.root}", "%s; quarantined and fetched again", what)
        self._set_aside(item.name, self.path(item.name), placed=self.stamps.is_placed(item.name))

    def open(self, item: Item) -> mmap.mmap | None:
        """Map a file that is known to be good; None if there is none.

        What is judged is the open file, not its name, which may be given to another file at any time. The map
        holds a shared lock on it for as long as it lives, so that nobody evicts it.
        """
        try:
            fd = os.open(self.path(item.name), os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            # No lock: it is being evicted. No link: it has been.
            if not try_lock(fd, shared=True):
                return None
            status, stamp = os.fstat(fd), self.stamps.read(item.name)
            if not status.st_nlink or stamp is None or not stamp.vouches_for(item, status):
                return None
            # The map keeps a duplicate of the descriptor, and with it the lock.
            return mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(fd)

    # Writing

    @contextlib.contextmanager
    def fetching(self, name: str, *, wait: Callable[[float], bool]) -> Iterator[bool]:
        """Be the only process that fetches this file; False if `wait` gave up on another one that does."""
        folder = os.path.join(self._own, "locks")
        self._mark()
        os.makedirs(folder, exist_ok=True)
        with file_lock(os.path.join(folder, encoded(name)), wait=wait, remove=True) as mine:
            yield mine

    @contextlib.contextmanager
    def reserve(self, bytes: int, need: Need) -> Iterator[Temp]:
        """An empty file for `bytes` bytes, after room was made for them; gone afterwards unless placed.

        Raises:
            NoRoom: Nothing more may be removed for it.
        """
        self._mark()
        with self.room.reserve(bytes, need) as temp:
            yield temp

    def place(self, temp: Temp, item: Item, digests: Mapping[str, str]) -> None:
        """Give a written and verified file its name."""
        final = self.path(item.name)
        os.makedirs(os.path.dirname(final), exist_ok=True)
        self.stamps.announce(item)
        os.rename(temp.path, final)
        self.stamps.write(Stamp.of(item, os.fstat(temp.fd), digests, ()), placed=True)

    # Housekeeping

    def _mark(self) -> None:
        """Make the folder, and say whose it is."""
        marker = os.path.join(self._own, "owner.json")
        if os.path.exists(marker):
            return
        os.makedirs(self._own, exist_ok=True)
        text = json.dumps(
            {
                "format": 1,
                "created_by": f"datasync {__version__}",
                "note": "a cache: files with a stamp in placed/ may be removed, they are fetched again",
            }
        )
        temporary = f"{marker}.{uuid.uuid4().hex}"
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
        os.rename(temporary, marker)

    def _set_aside(self, name: str, path: str, *, placed: bool) -> None:
        """Into the quarantine: of our own files only the last few are kept there, of a user's every one."""
        folder = os.path.join(self._own, "quarantine")
        os.makedirs(folder, exist_ok=True)
        target = os.path.join(folder, quarantine_name(name, placed=placed))
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, target)
        self.stamps.remove(name)
        for victim in quarantined(self.root)[:-_QUARANTINED]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(victim.path)


def is_read_only(error: OSError) -> bool:
    """Whether a folder cannot be written at all."""
    return isinstance(error, PermissionError) or error.errno == errno.EROFS


def too_small(limit: int, largest: int, name: str) -> DatasyncError:
    """The error for a limit that not even one shard fits in."""
    return UsageError(
        f"cache_limit is {limit:,} bytes, but {name} alone needs {largest:,}",
        mend=f"allow at least {largest * 2:,} bytes, or make smaller shards (size_limit)",
    )


def _plausible(path: str) -> bool:
    """Whether a file without a digest has at least the head and the end of a shard."""
    try:
        with open(path, "rb") as file:
            (count,) = struct.unpack("<I", file.read(4))
            file.seek(4 + 4 * count)
            (end,) = struct.unpack("<I", file.read(4))
            return bool(file.seek(0, os.SEEK_END) == end)
    except (OSError, struct.error):
        return False


def _only_copy(item: Item, path: str, got: Mapping[str, str]) -> CorruptError:
    mend = "name a remote to fetch it from, or restore the file"
    try:
        compare(item.hashes, got, where=path)
    except CorruptError as error:
        return CorruptError(error.message, mend=mend)
    return CorruptError(f"{path} is not {item.bytes:,} bytes of a whole shard", mend=mend)
