"""What a cache folder knows about its files: which it put there, and which have been verified as they lie.

    <cache>/.datasync-cache/placed/<name>     a stamp for a file that datasync put there and may remove
    <cache>/.datasync-cache/adopted/<name>    a stamp for a file that lay there before; never removed
    stamp's mtime                             when the file was last opened, by any process

A stamp says: this file, with this inode, size, mtime and ctime, had these digests. As long as all four are
unchanged the file is trusted without reading it; writing to it, even with its mtime set back, changes the
ctime. A stamp holds for one boot of one machine, because neither file nor stamp is fsynced: after a power
loss a file may have its size and not its bytes. After a reboot, and on another machine that mounts the same
folder, the digests are checked once and the stamp is extended. So nothing is read twice in daily use, and
nothing is trusted that was not seen whole.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

FOLDER = ".datasync-cache"
_LONGEST_NAME = 200
_MOST_BOOTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A file that a cache should hold, as the index describes it.

    Args:
        name (str): Path below the cache folder, '/'-separated.
        bytes (int): Its size.
        hashes (Mapping[str, str]): Algorithm -> digest of the file; empty where the index has none.
        check (tuple[str, ...]): Which of these have to be verified.
        origin (Mapping[str, str]): Digests of the compressed file that it came from; empty if none.
    """

    name: str
    bytes: int
    hashes: Mapping[str, str]
    check: tuple[str, ...] = ()
    origin: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """A file as it was when it had been verified.

    Args:
        name (str): Path below the cache folder.
        inode (int): 0 in a stamp that announces a file about to be placed.
        bytes (int): Size.
        mtime_ns (int): Of the file.
        ctime_ns (int): Of the file.
        boots (tuple[str, ...]): Boots of machines that have verified it.
        digests (Mapping[str, str]): Of the file.
        origin (Mapping[str, str]): Of the compressed file that it came from.
    """

    name: str
    inode: int
    bytes: int
    mtime_ns: int
    ctime_ns: int
    boots: tuple[str, ...]
    digests: Mapping[str, str]
    origin: Mapping[str, str]

    @classmethod
    def of(
        cls, item: Item, status: os.stat_result, digests: Mapping[str, str], boots: tuple[str, ...]
    ) -> Stamp:
        """The stamp of a file that has just been verified as `item`."""
        return cls(
            name=item.name,
            inode=status.st_ino,
            bytes=status.st_size,
            mtime_ns=status.st_mtime_ns,
            ctime_ns=status.st_ctime_ns,
            boots=tuple(dict.fromkeys((*boots, boot_id())))[-_MOST_BOOTS:],
            digests=dict(digests),
            origin=dict(item.origin),
        )

    def unchanged(self, status: os.stat_result) -> bool:
        """Whether the file is still the one that was stamped."""
        return (self.inode, self.bytes, self.mtime_ns, self.ctime_ns) == (
            status.st_ino,
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
        )

    def vouches_for(self, item: Item, status: os.stat_result) -> bool:
        """Whether the file needs no reading to be trusted as `item`."""
        return (
            self.unchanged(status)
            and boot_id() in self.boots
            and self.agrees(item)
            and all(name in self.digests for name in item.check)
        )

    def agrees(self, item: Item) -> bool:
        """Whether the stamped file is this item, and not another dataset's under the same name."""
        return (
            self.bytes == item.bytes
            and _consistent(self.digests, item.hashes)
            and _consistent(self.origin, item.origin)
        )


class Stamps:
    """The stamps of one cache folder.

    Args:
        root (Path): The cache folder.
    """

    def __init__(self, root: Path) -> None:
        self._placed = os.path.join(root, FOLDER, "placed")
        self._adopted = os.path.join(root, FOLDER, "adopted")

    def read(self, name: str) -> Stamp | None:
        """The stamp of a file, or None; a damaged one counts as none."""
        for folder in (self._placed, self._adopted):
            stamp = _read(os.path.join(folder, encoded(name)))
            if stamp is not None and stamp.name == name:
                return stamp
        return None

    def is_placed(self, name: str) -> bool:
        """Whether datasync put the file there."""
        return os.path.exists(os.path.join(self._placed, encoded(name)))

    def write(self, stamp: Stamp, *, placed: bool) -> None:
        """Replace the stamp of a file.

        It is written over, not renamed: a file system may flush a file to the disk when another one is
        renamed over it. Who reads a stamp half written takes it for damaged, and verifies the file itself.
        """
        folder = self._placed if placed else self._adopted
        path = os.path.join(folder, encoded(stamp.name))
        document = json.dumps({name: getattr(stamp, name) for name in Stamp.__dataclass_fields__})
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            os.makedirs(folder, exist_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            os.write(fd, document.encode().ljust(os.fstat(fd).st_size))  # spaces over the end of a longer one
        finally:
            os.close(fd)

    def announce(self, item: Item) -> None:
        """Say that the file about to appear under this name is ours, before it does."""
        nothing = Stamp(
            name=item.name, inode=0, bytes=0, mtime_ns=0, ctime_ns=0, boots=(), digests={}, origin={}
        )
        self.write(nothing, placed=True)

    def touch(self, name: str) -> None:
        """Record that the file was opened now."""
        for folder in (self._placed, self._adopted):
            with contextlib.suppress(OSError):
                os.utime(os.path.join(folder, encoded(name)))
                return

    def remove(self, name: str) -> None:
        """Forget a file."""
        for folder in (self._placed, self._adopted):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, encoded(name)))

    def placed(self) -> Iterator[tuple[str, float]]:
        """Every file that datasync put there, or announced: (name, when it was last opened)."""
        try:
            entries = list(os.scandir(self._placed))
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in entries:
            if entry.name.startswith("~"):
                continue
            try:
                used = entry.stat().st_mtime
            except FileNotFoundError:
                continue
            if entry.name.startswith("="):
                stamp = _read(entry.path)
                if stamp is not None:
                    yield stamp.name, used
            else:
                yield unquote(entry.name, errors="surrogateescape"), used


def encoded(name: str) -> str:
    """A path as one file name; a long one as a digest, marked by ``=``."""
    flat = quote(name, safe="", errors="surrogateescape")
    if len(flat) <= _LONGEST_NAME and not flat.startswith("~"):
        return flat
    return "=" + hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()


@functools.cache
def boot_id() -> str:
    """What changes when the machine is started again."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        # Without it no stamp outlives the process that wrote it; digests are checked instead.
        return f"{platform.node()}-{os.getpid()}-{uuid.uuid4().hex}"


def _read(path: str) -> Stamp | None:
    try:
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
        document["boots"] = tuple(document["boots"])
        return Stamp(**document)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _consistent(known: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return all(known.get(name, digest).lower() == digest.lower() for name, digest in wanted.items())
