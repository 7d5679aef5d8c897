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

Room. `limit` bounds the bytes of the files that datasync placed, and of those being written. What is removed
first: quarantined files, files that no plan needs, oldest use first, then those whose next use is farthest
away. A file that some process has open is locked (shared) by it and is passed over; only a reader that stands
still may remove one, because open files stay readable after they lose their name. Only files with a stamp
in `placed/` are ever removed (invariant 7), and none where there is no replica to fetch it from again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import struct
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from datasync.errors import CorruptError, DatasyncError, UsageError
from datasync.streaming.filelock import file_lock, held, try_lock
from datasync.streaming.stamps import FOLDER, Item, Stamp, Stamps, encoded
from datasync.streaming.stats import Stats
from shards.digests import cheapest, compare, digest_file
from shards.version import __version__

_FULL = {errno.ENOSPC, errno.EDQUOT}
_SPARE_BYTES = 16 << 20  # left free on the disk for stamps, checkpoints and logs
_QUARANTINED = 4
_NEVER = 1 << 62
_ABANDONED_SECONDS = 3600.0  # without locks, a file being written is abandoned after an hour without a change


class NoRoom(Exception):
    """The limit or the disk leaves no room now; says which in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Temp:
    """A file being written: its bytes are reserved, and it is swept when its process dies."""

    fd: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Why room is needed, to decide what must not go for it.

    Args:
        urgent (bool): A reader stands still until the file is there.
        plan (Mapping[str, int]): File -> its place in the order of next use.
        place (int): The place of the file that needs the room.
    """

    urgent: bool = True
    plan: Mapping[str, int] = field(default_factory=dict)
    place: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Victim:
    root: Path
    path: str
    name: str
    bytes: int
    used: float


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
        self.limit = limit
        self.evict = evict
        self._stats = stats
        self._own = os.path.join(root, FOLDER)
        self._roots = sorted({*map(Path, roots), root})
        self._swept = False
        self.stamps = Stamps(root)

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
        """Map a trusted file; None if it is not here any more.

        The map holds a shared lock on the file for as long as it lives, so that nobody evicts it.
        """
        try:
            fd = os.open(self.path(item.name), os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            # No lock: it is being evicted. No link: it has been.
            if not try_lock(fd, shared=True) or not os.fstat(fd).st_nlink:
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
        folder = os.path.join(self._own, "tmp")
        self._mark()
        os.makedirs(folder, exist_ok=True)
        with self._limit_locks():
            if not self._swept:
                self._swept = True
                sum(_live_temps(folder))
            self._make_room(bytes, need)
            path = os.path.join(folder, f"{uuid.uuid4().hex}.{bytes}")
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try_lock(fd)
        with held(fd):
            try:
                yield Temp(fd=fd, path=path)
            finally:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    os.unlink(path)

    def place(self, temp: Temp, item: Item, digests: Mapping[str, str]) -> None:
        """Give a written and verified file its name."""
        final = self.path(item.name)
        os.makedirs(os.path.dirname(final), exist_ok=True)
        self.stamps.announce(item)
        os.rename(temp.path, final)
        self.stamps.write(Stamp.of(item, os.fstat(temp.fd), digests, ()), placed=True)

    def make_room(self, bytes: int, need: Need) -> None:
        """Remove what may go until `bytes` bytes fit, for a write that found the disk full.

        Raises:
            NoRoom: Nothing more may be removed.
        """
        with self._limit_locks():
            self._make_room(bytes, need, full=True)

    def used_bytes(self) -> int:
        """Bytes that count against the limit now."""
        return sum(Cache._used(root) for root in self._roots)

    # Room

    def _make_room(self, bytes: int, need: Need, *, full: bool = False) -> None:
        if self.limit is None and not full and self._free_bytes() >= bytes + _SPARE_BYTES:
            return
        over = self._excess(bytes)
        if over <= 0 and not full:
            return
        over = max(over, bytes if full else 0)
        if self.evict:
            for victim, in_use in self._victims(need):
                if over <= 0:
                    return
                if self._remove(victim, in_use=in_use):
                    over -= victim.bytes
        if over > 0:
            raise NoRoom(self._why(bytes))

    def _excess(self, bytes: int) -> int:
        """How many bytes have to go before `bytes` more fit."""
        over = bytes + _SPARE_BYTES - self._free_bytes()
        if self.limit is not None:
            over = max(over, self.used_bytes() + bytes - self.limit)
        return over

    def _free_bytes(self) -> int:
        status = os.statvfs(self._own)
        return status.f_bavail * status.f_frsize

    def _why(self, bytes: int) -> str:
        limit = "no limit" if self.limit is None else f"limit {self.limit:,} bytes"
        return (
            f"no room for {bytes:,} bytes in the cache {self.root}: {limit}, {self.used_bytes():,} used, "
            f"{self._free_bytes():,} free on the disk"
        )

    @staticmethod
    def _used(root: Path) -> int:
        # Files being written first: one that is placed meanwhile is counted twice rather than not at all.
        total = sum(_live_temps(os.path.join(root, FOLDER, "tmp")))
        total += sum(victim.bytes for victim in _placed(root))
        return total + sum(victim.bytes for victim in _quarantined(root))

    def _victims(self, need: Need) -> Iterator[tuple[_Victim, bool]]:
        """What may be removed, best first, and whether it may be removed although a process has it open."""
        for root in self._roots:
            for victim in _quarantined(root):
                yield victim, True
        placed = [victim for root in self._roots for victim in _placed(root)]

        def next_use(victim: _Victim) -> int:
            return need.plan.get(victim.name, _NEVER) if victim.path == self.path(victim.name) else _NEVER

        placed.sort(key=lambda victim: (-next_use(victim), victim.used))
        if not need.urgent:
            placed = [victim for victim in placed if next_use(victim) > need.place]
        for victim in placed:
            yield victim, False
        if need.urgent:
            for victim in placed:
                yield victim, True

    def _remove(self, victim: _Victim, *, in_use: bool) -> bool:
        """Remove a file and its stamp; False if it is open and `in_use` is not set, or is being fetched."""
        locks = os.path.join(victim.root, FOLDER, "locks")
        os.makedirs(locks, exist_ok=True)
        lock = file_lock(os.path.join(locks, encoded(victim.name)), wait=lambda seconds: False, remove=True)
        with lock as mine:
            if not mine:
                return False
            try:
                fd = os.open(victim.path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return False
            try:
                if not try_lock(fd) and not in_use:
                    return False
                os.unlink(victim.path)
            except FileNotFoundError:
                return False
            finally:
                os.close(fd)
            Stamps(victim.root).remove(victim.name)
        self._stats.add(evicted=1, bytes_evicted=victim.bytes)
        return True

    # Housekeeping

    @contextlib.contextmanager
    def _limit_locks(self) -> Iterator[None]:
        """The locks of all folders that share the limit, in one order."""
        with contextlib.ExitStack() as stack:
            for root in self._roots:
                folder = os.path.join(root, FOLDER)
                os.makedirs(folder, exist_ok=True)
                stack.enter_context(file_lock(os.path.join(folder, "limit.lock")))
            yield

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
        kind = "placed" if placed else "found"
        target = os.path.join(folder, f"{time.time_ns()}.{kind}.{encoded(name)[-_QUARANTINE_NAME:]}")
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, target)
        self.stamps.remove(name)
        for victim in _quarantined(self.root)[:-_QUARANTINED]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(victim.path)


_QUARANTINE_NAME = 200


def is_full(error: OSError) -> bool:
    """Whether a write failed because the disk, or the user's share of it, is full."""
    return error.errno in _FULL


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


def _placed(root: Path) -> list[_Victim]:
    """Files that datasync placed and that are still there."""
    found = []
    for name, used in Stamps(root).placed():
        path = os.path.join(root, name)
        with contextlib.suppress(OSError):
            found.append(_Victim(root=root, path=path, name=name, bytes=os.stat(path).st_size, used=used))
    return found


def _quarantined(root: Path) -> list[_Victim]:
    """Files of our own in quarantine, oldest first."""
    folder = os.path.join(root, FOLDER, "quarantine")
    try:
        names = sorted(name for name in os.listdir(folder) if ".placed." in name)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = []
    for name in names:
        path = os.path.join(folder, name)
        with contextlib.suppress(OSError):
            found.append(_Victim(root=root, path=path, name=name, bytes=os.stat(path).st_size, used=0.0))
    return found


def _live_temps(folder: str) -> Iterator[int]:
    """Bytes reserved by each file being written; those of dead processes are removed on the way."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        path = os.path.join(folder, name)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            old = time.time() - os.fstat(fd).st_mtime > _ABANDONED_SECONDS
            if try_lock(fd, without=old):
                os.unlink(path)
                continue
        except FileNotFoundError:
            continue
        finally:
            os.close(fd)
        yield int(name.rpartition(".")[2])
