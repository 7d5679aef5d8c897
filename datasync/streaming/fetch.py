"""`ShardSource`: the shards of one stream, verified, from wherever they are.

    open(shard) ─► held open here? ─► trusted in the cache? ─► fetched by another thread, process or prefetch?
                                                         └───► brought there (`bring.py`)

A shard that is returned is the one of the index, byte for byte (invariant 8), whatever failed on the way; if
that cannot be had there is an error that names shard, replica and digests. `prefetch` tells what will be used
next: those are fetched in the background, and those are the last that the cache gives up.

A source pickles, survives `fork`, and can be used again after `close`: threads, locks, open files and clients
belong to a process and are made when first needed. Processes meet only in the cache folder (`cache.py`).

Where there is no replica, the folder is the dataset: it is read and verified, nothing in it is moved or
removed, and something is written only where shards have to be decompressed.
"""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import stat
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from datasync.errors import CorruptError, NotFoundError, StoreError, UsageError
from datasync.storage.base import Store
from datasync.streaming.attempt import Cancelled, Wanted
from datasync.streaming.bring import Bringer, wanted_of
from datasync.streaming.cache import Cache, is_read_only
from datasync.streaming.flight import Patience
from datasync.streaming.identity import Identity
from datasync.streaming.indexes import index_key, load_index, read_local, within
from datasync.streaming.process import Process
from datasync.streaming.replicas import Replica, Replicas
from datasync.streaming.stats import Stats
from shards.digests import check_algorithm
from shards.index import BASENAME, Index, check_basename
from shards.mds import Shard

_DESCRIPTIONS = 4096
_GONE_TRIES = 50


class ShardSource:
    """The shards of one stream.

    Args:
        replicas (Sequence[Store]): Where the dataset is, in order of preference. None that is `local` itself;
            with none left, `local` holds the dataset.
        local (Path): The cache folder; several sources, processes and jobs may share it.
        index (Index | None): The index, if it is known. Default: fetched.
        split (str | None): The folder of this split below each replica and below `local`. Default: ``None``.
        cache_limit (int | None): Most bytes that datasync keeps in `local`, if there is a replica. Default:
            ``None``, no limit.
        limit_folders (Sequence[Path]): Other cache folders that share this limit. Default: none.
        validate_hash (str | None): Which of the index's digests to verify. Default: the cheapest one.
        signed_by (str | None): The public key that must have signed the index; SHA-256 is then verified,
            since whoever can write to the store can make the cheap digests fit. Default: none.
        version (str | None): The version of the dataset, or its first 8 digits or more. Default: that of the
            first replica that answers.
        keep_zip (bool): Keep the compressed files in the cache too. Default: ``False``.
        download_retry (int): Rounds over all replicas after the first has failed. Default: ``2``.
        download_timeout (float): Seconds without a byte after which a read is given up, and the least time
            for which failures that can pass are tried again. Default: ``60``.
        allow_unsafe_types (bool): Open shards whose columns may run code. Default: ``False``.
        stats (Stats | None): What to count in. Default: its own.
        threads (int): Downloads at a time, ahead of the reader, in each process. Default: ``4``.

    Raises:
        UsageError: An argument cannot be.
    """

    stall_seconds = 10.0  # a wait of this length is logged, and again each time it has doubled

    def __init__(
        self,
        *,
        replicas: Sequence[Store],
        local: Path,
        index: Index | None = None,
        split: str | None = None,
        cache_limit: int | None = None,
        limit_folders: Sequence[Path] = (),
        validate_hash: str | None = None,
        signed_by: str | None = None,
        version: str | None = None,
        keep_zip: bool = False,
        download_retry: int = 2,
        download_timeout: float = 60.0,
        allow_unsafe_types: bool = False,
        stats: Stats | None = None,
        threads: int = 4,
    ) -> None:
        self.local = Path(os.path.abspath(local))
        _check_folder(self.local)
        self.replicas = [store for store in replicas if not _same_folder(store, self.local)]
        self.split = split.strip("/") if split else None
        if self.split:
            check_basename(self.split, where="split")
        if validate_hash is not None:
            check_algorithm(validate_hash)
        if download_retry < 0 or download_timeout <= 0:
            raise UsageError(
                f"download_retry {download_retry} and download_timeout {download_timeout} cannot be",
                mend="retries from 0, seconds above 0",
            )
        if cache_limit is not None and cache_limit <= 0:
            raise UsageError(
                f"cache_limit {cache_limit} leaves no room", mend="give bytes above 0, or no limit"
            )
        self.cache_limit = cache_limit
        self.limit_folders = [Path(os.path.abspath(folder)) for folder in limit_folders]
        self.signed_by = signed_by
        self.version = version
        self.validate_hash = validate_hash if signed_by is None else "sha256"
        self.keep_zip = keep_zip
        self.download_retry = download_retry
        self.download_timeout = download_timeout
        self.allow_unsafe_types = allow_unsafe_types
        self.stats = stats if stats is not None else Stats()
        self.threads = threads
        self._index = index
        self._index_from: int | None = None  # the number of the replica that gave it
        if index is not None:
            self._check_index(index)
        self._own: Process | None = None
        self._making = threading.Lock()
        _sources.add(self)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        del state["_own"], state["_making"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._own = None
        self._making = threading.Lock()
        _sources.add(self)

    @property
    def index(self) -> Index:
        """The index of the stream; fetched when first asked for, then fixed for this source and its copies.

        Raises:
            FormatError: What is there is no index, or one that cannot be used.
            StoreError: No replica has one that can be read.
        """
        if self._index is None:
            with self._making:
                if self._index is None:
                    index = self._load_index()
                    self._check_index(index)
                    self._index = index
        return self._index

    def _load_index(self) -> Index:
        try:
            if not self.replicas:
                return read_local(self.local, self.split, signed_by=self.signed_by, version=self.version)
            index, self._index_from = load_index(
                Replicas(self.replicas, self.stats),
                self.local,
                self.split,
                retry=self.download_retry,
                timeout=self.download_timeout,
                signed_by=self.signed_by,
                version=self.version,
            )
            return index
        except NotFoundError as error:
            splits = _splits(self.replicas, self.local)
            if not splits:
                raise
            raise NotFoundError(
                f"{error.message}; there are the splits {', '.join(splits)}",
                mend=f"name one: split={splits[0]!r}",
            ) from error

    def open(self, shard: int) -> Shard:
        """The shard of this number, waiting for it if need be.

        It stays open here for a while and is given out again: the caller does not close it.

        Raises:
            CorruptError: No replica has it as the index says.
            StoreError: No replica could be read, or there is no room.
        """
        own = self._process()
        opened = own.opened_get(shard)
        if opened is None:
            opened = self._open(own, shard)
        else:
            self.stats.add(hits=1)
        return opened

    def opened(self, shard: int) -> Shard | None:
        """The shard if it is open here, without waiting for it."""
        return self._process().opened_get(shard)

    @property
    def fetching(self) -> bool:
        """Whether something is being fetched in the background."""
        own = self._own
        return own is not None and own.prefetcher.busy

    def prefetch(self, shards: Sequence[int]) -> None:
        """Fetch these in the background, in this order, which is that of their next use.

        Replaces what was planned before. An error is left to `open`. Returns at once.
        """
        own = self._process()
        if not self.replicas or not own.plan_changed(shards):
            return
        wanted = [self._wanted(own, shard) for shard in shards]
        own.plan = {want.raw.name: i for i, want in enumerate(wanted)}
        own.prefetcher.plan([s for s, want in zip(shards, wanted, strict=True) if not own.is_here(s, want)])

    def close(self) -> None:
        """Stop the threads and let go of open shards; the cache stays."""
        with self._making:
            own, self._own = self._own, None
        if own is not None:
            own.close()

    def health(self) -> dict[str, str]:
        """Each replica's URL and what this process thinks of it."""
        return self._process().replicas.describe()

    # Opening

    def _open(self, own: Process, shard: int) -> Shard:
        wanted = self._wanted(own, shard)
        patience = Patience(wanted.stored.name, self.stats, self.stall_seconds)
        try:
            opened = self._map(own, shard, wanted, patience)
        finally:
            patience.over()
        own.opened_put(shard, opened)
        own.prefetcher.poke()
        return opened

    def _map(self, own: Process, shard: int, wanted: Wanted, patience: Patience) -> Shard:
        """Open the file of the cache, bringing it there until that succeeds."""
        info = self.index.shards[shard]
        if not self.replicas and wanted.compression is None:
            own.only_copy.check(wanted.raw)
            return Shard(own.cache.path(wanted.raw.name), info, allow_unsafe_types=self.allow_unsafe_types)
        mapped = None
        for _ in range(_GONE_TRIES):
            if mapped is None:
                mapped = own.cache.open(wanted.raw)
            if mapped is not None:
                own.cache.stamps.touch(wanted.raw.name)
                return Shard(
                    memoryview(mapped),
                    info,
                    allow_unsafe_types=self.allow_unsafe_types,
                    where=own.cache.path(wanted.raw.name),
                )
            try:
                mapped = self._wait(own, shard, wanted, patience)
            except OSError as error:
                if not is_read_only(error):
                    raise
                return self._read_only(own, shard, wanted, error)
        raise StoreError(
            f"{own.cache.path(wanted.raw.name)} is removed or changed again and again before it is opened",
            mend="raise cache_limit, or let fewer jobs share the folder",
        )

    def _wait(self, own: Process, shard: int, wanted: Wanted, patience: Patience) -> mmap.mmap | None:
        """Wait until the shard has been brought, by whoever; raises what stopped it.

        Gives the open file where it was brought for a reader.
        """
        while True:
            flight, mine = own.flights.join(shard)
            if mine:
                own.flights.start(flight, partial(self._bringer(own).bring, wanted, flight, urgent=True))
            patience.wait(flight)
            if flight.error is None:
                # Taken out: frames of errors on the way may keep the flight, and with it the blocks on disk.
                mapped, flight.mapped = flight.mapped, None
                return mapped
            if mine:
                raise flight.error
            # The prefetch failed or found no room; this reader asks for itself.

    def _read_only(self, own: Process, shard: int, wanted: Wanted, error: OSError) -> Shard:
        """Without a cache that can be written: what lies there if it is good, else in anonymous memory."""
        with contextlib.suppress(NotFoundError, CorruptError):
            own.only_copy.check(wanted.raw)
            path = own.cache.path(wanted.raw.name)
            return Shard(path, self.index.shards[shard], allow_unsafe_types=self.allow_unsafe_types)
        self.stats.add(uncached=1)
        self.stats.log_once(
            f"read-only {self.local}",
            "the cache %s cannot be written (%s): shards are read into memory, by each process for itself",
            self.local,
            error,
        )
        own.keep_few_open()
        return Shard(
            self._bringer(own).read_into_memory(wanted),
            self.index.shards[shard],
            allow_unsafe_types=self.allow_unsafe_types,
            where=f"{wanted.raw.name} (in memory)",
        )

    # Bringing

    def _prefetch_one(self, own: Process, shard: int) -> None:
        wanted = self._wanted(own, shard)
        flight, mine = own.flights.join(shard)
        if mine:
            own.flights.run(flight, partial(self._bringer(own).bring, wanted, flight, urgent=False))
            if flight.error is not None:
                raise flight.error

    def _bringer(self, own: Process) -> Bringer:
        return Bringer(
            own=own,
            stats=self.stats,
            limit=self.cache_limit,
            retry=self.download_retry,
            timeout=self.download_timeout,
        )

    def _wanted(self, own: Process, shard: int) -> Wanted:
        wanted = own.wanted.get(shard)
        if wanted is None:
            wanted = wanted_of(
                self.index.shards[shard],
                prefix=f"{self.split}/" if self.split else "",
                validate_hash=self.validate_hash,
                keep=self.keep_zip,
            )
            if len(own.wanted) >= _DESCRIPTIONS:
                own.wanted.clear()
            own.wanted[shard] = wanted
        return wanted

    def _check_index(self, index: Index) -> None:
        """Refuse a digest that the index does not have; the first shard speaks for all."""
        if self.validate_hash is None or not len(index.shards):
            return
        offered = index.shards[0].stored.hashes
        if self.validate_hash not in offered:
            raise UsageError(
                f"validate_hash {self.validate_hash!r} is not among the digests of this dataset: "
                f"{', '.join(sorted(offered)) or 'it has none'}",
                mend="use one of those, or leave validate_hash out",
            )

    # The process

    def _process(self) -> Process:
        own = self._own
        if own is None or own.pid != os.getpid():
            index = self.index
            with self._making:
                own = self._own
                if own is None or own.pid != os.getpid():
                    own = self._own = self._make_process(index)
        return own

    def _make_process(self, index: Index) -> Process:
        this = weakref.ref(self)  # threads must not keep a source alive that nobody uses
        key, timeout = index_key(self.split), self.download_timeout

        def read_index(replica: Replica) -> Index:
            data = within(timeout, lambda: replica.store.read(key))
            return Index.parse(data, where=f"{replica.name}/{key}")

        process = Process(
            replicas=Replicas(self.replicas, self.stats),
            identity=Identity(
                index=index,
                read=read_index,
                known=self._index_from,
                prefix=key.removesuffix(BASENAME),
                stats=self.stats,
            ),
            cache=Cache(
                self.local,
                limit=self.cache_limit if self.replicas else None,
                evict=bool(self.replicas),
                stats=self.stats,
                roots=self.limit_folders,
            ),
            prefetch=lambda shard: _prefetch(this, shard),
            threads=self.threads,
            sources=lambda: len(_sources),
        )
        weakref.finalize(self, process.abandon).atexit = False
        return process


_sources: weakref.WeakSet[ShardSource] = weakref.WeakSet()


def _prefetch(this: weakref.ref[ShardSource], shard: int) -> None:
    source = this()
    if source is None:
        raise Cancelled
    source._prefetch_one(source._process(), shard)


def _same_folder(store: Store, local: Path) -> bool:
    return "://" not in store.url and os.path.realpath(store.url) == os.path.realpath(local)


def _check_folder(folder: Path) -> None:
    """Refuse a cache that cannot be, since there is a file in its way, or its name is too long."""
    for place in (folder, *folder.parents):
        try:
            mode = place.stat().st_mode  # once: another rank may be making it
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise UsageError(
                f"the cache folder {folder} cannot be: {error.strerror}", mend="name another folder"
            ) from error
        if stat.S_ISDIR(mode):
            return
        raise UsageError(
            f"the cache folder {folder} cannot be: {place} is a file", mend="name another folder"
        )


def _splits(stores: Sequence[Store], local: Path) -> list[str]:
    """Folders with an index of their own below a dataset's, as far as it is on this machine."""
    roots = [Path(store.url) for store in stores if "://" not in store.url] or [local]
    return sorted({path.parent.name for root in roots for path in root.glob(f"*/{BASENAME}")})


def _close_all() -> None:
    for source in list(_sources):
        source.close()


def _forget_in_child() -> None:
    """After a fork: threads did not come along, and their locks may be held for ever."""
    for source in list(_sources):
        source._own = None
        source._making = threading.Lock()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_in_child)
