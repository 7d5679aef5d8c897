"""Have a shard in the cache, verified, whoever brings it there and however long there is no room for it.

    lock of the file ─► trusted, or good as it lies there ─► nothing to do
                   └──► its compressed form lies there ────► decompress it
                   └──► else ──────────────────────────────► download it (`download.py`)

What goes wrong meanwhile is waited for: another process that fetches the same file, a folder that is removed
under it, a cache or a disk that is full. A reader that stands still waits for room and takes what it needs; a
prefetch gives up.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace

from datasync.errors import CorruptError, NotFoundError
from datasync.storage.local import LocalStore
from datasync.streaming.attempt import Cancelled, Wanted, checks
from datasync.streaming.cache import Place, too_small
from datasync.streaming.download import Downloader, Watch
from datasync.streaming.flight import Flight
from datasync.streaming.memory import MemoryPlace
from datasync.streaming.process import Process, RoomPatience
from datasync.streaming.replicas import Replicas
from datasync.streaming.room import Need, NoRoom, is_full
from datasync.streaming.stamps import Item
from datasync.streaming.stats import Stats
from shards.index import ShardInfo

_VANISHED_TRIES = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Bringer:
    """Brings shards for one process.

    Args:
        own (Process): The process's part of the source.
        stats (Stats): What to count in.
        limit (int | None): Most bytes of the cache.
        retry (int): Rounds over all replicas after the first has failed.
        timeout (float): Seconds without a byte after which a read is given up, and the least time for which
            failures that can pass are tried again.
    """

    own: Process
    stats: Stats
    limit: int | None
    retry: int
    timeout: float

    def bring(self, wanted: Wanted, flight: Flight, *, urgent: bool) -> None:
        """Have the shard in the cache. Runs on a thread of this process.

        Waits for room if `urgent`, and leaves the open file in the flight; else raises NoRoom.
        """
        own = self.own
        self._check_limit(wanted)
        patience = RoomPatience(self.timeout, own.closing)
        vanished = 0
        while True:
            plan = dict(own.plan)
            need = Need(urgent=urgent, plan=plan, place=plan.get(wanted.raw.name, len(plan)))
            try:
                self._bring_once(wanted, need, flight)
                return
            except FileNotFoundError:
                # Somebody removed the cache folder under us; it is made again.
                vanished += 1
                if vanished > _VANISHED_TRIES:
                    raise
            except (NoRoom, OSError) as error:
                if isinstance(error, OSError) and not is_full(error):
                    raise
                if not urgent:
                    raise NoRoom(str(error)) from error
                own.release()
                flight.watch.text = str(error)
                if not isinstance(error, NoRoom) or error.written:
                    with contextlib.suppress(NoRoom, FileNotFoundError):
                        own.cache.room.make_room(wanted.raw.bytes, need)
                patience.wait(error)

    def read_into_memory(self, wanted: Wanted) -> memoryview:
        """The shard in anonymous memory, for a cache that cannot be written."""
        place = MemoryPlace(self.own.cache.root)
        self._downloader(place).fetch(replace(wanted, keep=False), Need(), Watch())
        return place.taken()

    def _bring_once(self, wanted: Wanted, need: Need, flight: Flight) -> None:
        """Under the lock of this file: take what lies there, else decompress or download it."""
        raw, watch, cache = wanted.raw, flight.watch, self.own.cache

        def go_on(seconds: float) -> bool:
            watch.text = f"another process that fetches it ({seconds:.0f} s)"
            if self.own.closing.is_set():
                raise Cancelled
            return not cache.trusted(raw) and seconds < 2 * self.timeout

        with cache.fetching(raw.name, wait=go_on):
            if not (cache.trusted(raw) or cache.adopt(raw)):
                self._place(wanted, need, watch)
            if need.urgent:
                flight.mapped = cache.open(raw)

    def _place(self, wanted: Wanted, need: Need, watch: Watch) -> None:
        """Decompress the file that lies in the cache, or download it."""
        path = self.own.cache.path(wanted.stored.name)
        if wanted.compression is not None and os.path.exists(path):
            if self._unpack(wanted, need, watch):
                return
        elif not self.own.replicas:
            raise NotFoundError(
                f"{path} does not exist, and there is no remote",
                mend="name a remote to fetch it from, or restore the file",
            )
        self._downloader(self.own.cache).fetch(wanted, need, watch)

    def _unpack(self, wanted: Wanted, need: Need, watch: Watch) -> bool:
        """Decompress a compressed file that lies in the cache; False if it is bad and out of the way."""
        cache = self.own.cache
        aside = Stats()  # decompressing is no download
        downloader = Downloader(
            replicas=Replicas([LocalStore(cache.root)], aside),
            place=cache,
            stats=aside,
            retry=0,
            timeout=self.timeout,
            closing=self.own.closing,
        )
        try:
            downloader.fetch(replace(wanted, keep=False), need, watch)
        except CorruptError:
            if not self.own.replicas:
                raise
            cache.quarantine(wanted.stored, {})
            return False
        return True

    def _downloader(self, place: Place) -> Downloader:
        return Downloader(
            replicas=self.own.replicas,
            place=place,
            stats=self.stats,
            retry=self.retry,
            timeout=self.timeout,
            closing=self.own.closing,
            identity=self.own.identity,
        )

    def _check_limit(self, wanted: Wanted) -> None:
        needed = wanted.raw.bytes + (wanted.stored.bytes if wanted.keep and wanted.compression else 0)
        if self.own.replicas and self.limit is not None and needed > self.limit:
            raise too_small(self.limit, needed, wanted.stored.name)


def wanted_of(info: ShardInfo, *, prefix: str, validate_hash: str | None, keep: bool) -> Wanted:
    """What to bring for a shard.

    Args:
        info (ShardInfo): Its entry in the index.
        prefix (str): Folder of the split, with its slash.
        validate_hash (str | None): Which of the digests to verify; None for the cheapest.
        keep (bool): Keep the compressed form in the cache too.
    """
    origin = info.zip.hashes if info.zip is not None else {}
    raw = Item(
        name=prefix + info.raw.basename,
        bytes=info.raw.bytes,
        hashes=info.raw.hashes,
        check=checks(info.raw.hashes, validate_hash),
        origin=origin,
    )
    stored = raw
    if info.zip is not None:
        stored = Item(
            name=prefix + info.zip.basename,
            bytes=info.zip.bytes,
            hashes=origin,
            check=checks(origin, validate_hash),
        )
    return Wanted(key=stored.name, stored=stored, raw=raw, compression=info.compression, keep=keep)
