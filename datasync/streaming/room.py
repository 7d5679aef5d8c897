"""Room in a cache folder: a limit that holds, a disk that may be full, and what goes when something must.

Every file that is being written has its bytes reserved by its name before the first one is written, so the
limit bounds files and reservations together, over all processes and over all folders that share it. Room is
made by one process at a time, under a lock in each of those folders.

What goes first: quarantined files; then files that the plan does not name, the one opened longest ago first;
then those whose next use is farthest away. A file that a process has open is locked (shared) by it and is
passed over; only for a reader that stands still may one go, since an open file stays readable without a name.
A prefetch never removes what is used before the thing it fetches. On a disk that others fill, something is
left free for them until a reader stands still for it; nothing goes where that could not help.

Only files with a stamp in `placed/` are counted or removed (invariant 7).
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from datasync.streaming.filelock import file_lock, held, try_lock
from datasync.streaming.stamps import FOLDER, Stamps, encoded
from datasync.streaming.stats import Stats

_FULL = {errno.ENOSPC, errno.EDQUOT}
_SPARE_BYTES = 16 << 20  # most that is left free on the disk for stamps, checkpoints and logs
_SPARE_SHARE = 20  # and not more than this part of the disk: one in so many
_NEVER = 1 << 62
_ABANDONED_SECONDS = 3600.0  # without locks, a file being written is abandoned after an hour without a change


class NoRoom(Exception):
    """The limit or the disk leaves no room now; says which in words.

    Args:
        message (str): Which.
        written (bool): Found by a write, after there seemed to be room. Default: ``False``.
    """

    def __init__(self, message: str, *, written: bool = False) -> None:
        super().__init__(message)
        self.written = written


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
class Victim:
    root: Path
    path: str
    name: str
    bytes: int
    used: float


class Room:
    """The room of one cache folder.

    Args:
        root (Path): The folder.
        limit (int | None): Most bytes of placed files; None for no limit.
        evict (bool): Whether files can be fetched again, and may be removed.
        stats (Stats): Where eviction is counted.
        roots (Sequence[Path]): All cache folders that share the limit. Default: this one.
    """

    def __init__(
        self, root: Path, *, limit: int | None, evict: bool, stats: Stats, roots: Sequence[Path] = ()
    ) -> None:
        self.root = root
        self.limit = limit
        self._evict = evict
        self._stats = stats
        self._own = os.path.join(root, FOLDER)
        self._roots = sorted({*map(Path, roots), root})
        self._swept = False
        self._threads = threading.Lock()

    @contextlib.contextmanager
    def reserve(self, bytes: int, need: Need) -> Iterator[Temp]:
        """An empty file for `bytes` bytes, after room was made for them; gone afterwards unless placed.

        Raises:
            NoRoom: Nothing more may be removed for it.
        """
        folder = os.path.join(self._own, "tmp")
        os.makedirs(folder, exist_ok=True)
        if not self._swept:
            self._swept = True
            sum(_live_temps(folder))
        path = os.path.join(folder, f"{uuid.uuid4().hex}.{bytes}")
        if self.limit is None and self._excess(bytes, spare=True) <= 0:
            fd = _locked_file(path)
        else:
            with self._limit_locks():
                self._make_room(bytes, need)
                fd = _locked_file(path)
        with held(fd):
            try:
                yield Temp(fd=fd, path=path)
            finally:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    os.unlink(path)

    def make_room(self, bytes: int, need: Need) -> None:
        """Remove what may go until `bytes` bytes fit, for a write that found the disk full.

        Raises:
            NoRoom: Nothing more may be removed.
        """
        with self._limit_locks():
            self._make_room(bytes, need, full=True)

    def used_bytes(self) -> int:
        """Bytes that count against the limit now."""
        return sum(_used(root) for root in self._roots)

    def _make_room(self, bytes: int, need: Need, *, full: bool = False) -> None:
        over = self._excess(bytes, spare=not need.urgent)
        over = max(over, bytes) if full else over
        wanted = max(over, self._excess(bytes, spare=True))
        if wanted <= 0:
            return
        victims = list(self._victims(need)) if self._evict else []
        reachable = sum(victim.bytes for victim, in_use in victims if not in_use)
        if over > reachable:
            raise NoRoom(self._why(bytes))
        if wanted > reachable:
            wanted = over
        for victim, in_use in victims:
            if (over if in_use else wanted) > 0 and self._remove(victim, in_use=in_use):
                over, wanted = over - victim.bytes, wanted - victim.bytes
        if over > 0:
            raise NoRoom(self._why(bytes))

    def _excess(self, bytes: int, *, spare: bool) -> int:
        """How many bytes have to go before `bytes` more fit; if `spare`, beside what is left to others."""
        free, disk = self._disk()
        over = bytes + (min(_SPARE_BYTES, disk // _SPARE_SHARE) if spare else 0) - free
        if self.limit is not None:
            over = max(over, self.used_bytes() + bytes - self.limit)
        return over

    def _disk(self) -> tuple[int, int]:
        """Bytes that are free on the disk, and all that it has."""
        status = os.statvfs(self._own)
        return status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize

    def _why(self, bytes: int) -> str:
        limit = "no limit" if self.limit is None else f"limit {self.limit:,} bytes"
        return (
            f"no room for {bytes:,} bytes in the cache {self.root}: {limit}, {self.used_bytes():,} used, "
            f"{self._disk()[0]:,} free on the disk"
        )

    def _victims(self, need: Need) -> Iterator[tuple[Victim, bool]]:
        """What may be removed, best first, and whether it may be removed although a process has it open."""
        rotten = [victim for root in self._roots for victim in quarantined(root)]
        for victim in rotten:
            yield victim, False
        placed = [victim for root in self._roots for victim in _placed(root)]

        def next_use(victim: Victim) -> int:
            return need.plan.get(victim.name, _NEVER) if victim.root == self.root else _NEVER

        placed.sort(key=lambda victim: (-next_use(victim), victim.used))
        if not need.urgent:
            placed = [victim for victim in placed if next_use(victim) > need.place]
        for victim in placed:
            yield victim, False
        if need.urgent:
            for victim in rotten + placed:
                yield victim, True

    def _remove(self, victim: Victim, *, in_use: bool) -> bool:
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

    @contextlib.contextmanager
    def _limit_locks(self) -> Iterator[None]:
        """The locks of all folders that share the limit, in one order; threads of a process queue first."""
        with self._threads, contextlib.ExitStack() as stack:
            for root in self._roots:
                folder = os.path.join(root, FOLDER)
                os.makedirs(folder, exist_ok=True)
                stack.enter_context(file_lock(os.path.join(folder, "limit.lock")))
            yield


def _locked_file(path: str) -> int:
    """A new file whose lock is ours; one that was swept before we had its lock is made again."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if try_lock(fd) and os.fstat(fd).st_nlink:
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def is_full(error: OSError) -> bool:
    """Whether a write failed because the disk, or the user's share of it, is full."""
    return error.errno in _FULL


def quarantine_name(name: str, *, placed: bool) -> str:
    """What a file is called in the quarantine: when it came there, and whether datasync had placed it."""
    return f"{time.time_ns()}.{'placed' if placed else 'found'}.{encoded(name)[-200:]}"


def _used(root: Path) -> int:
    # Files being written first: one that is placed meanwhile is counted twice rather than not at all.
    total = sum(_live_temps(os.path.join(root, FOLDER, "tmp")))
    total += sum(victim.bytes for victim in _placed(root))
    return total + sum(victim.bytes for victim in quarantined(root))


def _placed(root: Path) -> list[Victim]:
    """Files that datasync placed and that are still there."""
    found = []
    for name, used in Stamps(root).placed():
        path = os.path.join(root, name)
        with contextlib.suppress(OSError):
            found.append(Victim(root=root, path=path, name=name, bytes=os.stat(path).st_size, used=used))
    return found


def quarantined(root: Path) -> list[Victim]:
    """Files of our own in quarantine, oldest first."""
    folder = os.path.join(root, FOLDER, "quarantine")
    try:
        names = sorted(name for name in os.listdir(folder) if name.split(".", 2)[1:2] == ["placed"])
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = []
    for name in names:
        path = os.path.join(folder, name)
        with contextlib.suppress(OSError):
            found.append(Victim(root=root, path=path, name=name, bytes=os.stat(path).st_size, used=0.0))
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
