"""One attempt to bring one file from one replica into the cache, verified.

    store ─► digest of what was sent ─► decompress, bounded ─► digest of that ─► temporary file ─► place
                      └─► temporary file of the compressed form, where it is kept

Everything flows in pieces of at most 512 KiB, so an attempt holds a few MiB whatever the size of the shard.
They are checked as they pass, and the file gets its name only when all of it was right (invariants 2 and 8).

An attempt runs on a thread of its own and reports to a queue: whoever waits can start a second one elsewhere,
or give up on a connection that says nothing, without being stuck in its read.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, cast

import zstandard

from datasync.errors import CorruptError, StoreError, TransientError
from datasync.storage.base import Buffer
from datasync.streaming.buffers import Buffers
from datasync.streaming.cache import Place
from datasync.streaming.identity import Identity
from datasync.streaming.replicas import Replica
from datasync.streaming.room import Need, NoRoom, is_full
from datasync.streaming.stamps import Item
from shards.compression import Decompressor, parse
from shards.digests import Digest, cheapest, check_size, compare

_CHUNK = 512 << 10  # of what is sent, read at a time
_PIECE = 256 << 10  # decompressed, digested and written while the CPU still has it at hand
_ALWAYS = "xxh3_64"  # recorded in the stamp even where the index has no digest, to adopt the file later


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A file to bring into the cache.

    Args:
        key (str): The object at each replica.
        stored (Item): What the object must be, named as a file in the cache.
        raw (Item): What has to lie in the cache in the end; `stored` itself if it is not compressed.
        compression (str | None): How the object is compressed.
        keep (bool): Keep the compressed form beside it.
    """

    key: str
    stored: Item
    raw: Item
    compression: str | None
    keep: bool = False


_buffers = Buffers()
_decompressors: deque[zstandard.ZstdDecompressor] = deque(maxlen=8)


class Cancelled(Exception):
    """The attempt was given up by who started it."""


@dataclass(slots=True)
class Race:
    """Attempts at one file: the first to finish places it, the others stop."""

    results: queue.SimpleQueue[Attempt] = field(default_factory=queue.SimpleQueue)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _won: bool = False

    @contextlib.contextmanager
    def finish(self) -> Iterator[None]:
        """Place the file, unless another attempt did."""
        with self._lock:
            if self._won:
                raise Cancelled
            yield
            self._won = True


class Attempt(threading.Thread):
    """Download `wanted` from `replica`; afterwards `error` says how it went, None for success.

    Args:
        wanted (Wanted): What to bring.
        replica (Replica): From where.
        place (Place): Into which cache.
        need (Need): Why room is needed.
        race (Race): What it takes part in.
        closing (threading.Event): Set when the whole source is being closed.
    """

    def __init__(
        self,
        *,
        wanted: Wanted,
        replica: Replica,
        place: Place,
        need: Need,
        race: Race,
        closing: threading.Event,
        identity: Identity | None = None,
    ) -> None:
        super().__init__(name=f"datasync-fetch-{wanted.stored.name}", daemon=True)
        self.replica = replica
        self.error: BaseException | None = None
        self.received = 0  # bytes so far
        self.began: float | None = None  # when the read began, after room was made
        self.moved = time.monotonic()  # when the last bytes came
        self.seconds = 0.0
        self._wanted = wanted
        self._place = place
        self._need = need
        self._race = race
        self._closing = closing
        self._identity = identity
        self._cancelled = False

    def cancel(self) -> None:
        """Stop at the next piece."""
        self._cancelled = True

    def run(self) -> None:
        try:
            self._fetch()
        except (StoreError, CorruptError, Cancelled, NoRoom) as error:
            self.error = error
        except _LocalFailure as failure:
            self.error = self._local(failure.error)
        except (ConnectionError, TimeoutError) as error:
            self.error = TransientError(f"{self.replica.name}: {error}", mend="check that store")
        except OSError as error:
            self.error = self._local(error)
        except BaseException as error:  # noqa: BLE001  handed to the waiting thread, which raises it
            self.error = error
        self._race.results.put(self)

    def _local(self, error: OSError) -> BaseException:
        return NoRoom(f"{self._place.root}: {error.strerror}", written=True) if is_full(error) else error

    def describe(self) -> str:
        """Where it is and how far it got."""
        total = self._wanted.stored.bytes
        return f"{self.replica.name} ({self.received:,} of {total:,} bytes)"

    def _fetch(self) -> None:
        wanted = self._wanted
        if self._identity is not None:
            self.began = self.moved = time.monotonic()
            self._identity.check(self.replica, wanted.key)
        with contextlib.ExitStack() as stack:
            temp = stack.enter_context(self._place.reserve(wanted.raw.bytes, self._need))
            keep = None
            if wanted.keep and wanted.compression is not None:
                keep = stack.enter_context(self._place.reserve(wanted.stored.bytes, self._need))
            self.began = self.moved = time.monotonic()
            digests = self._copy(temp.fd, keep.fd if keep is not None else None)
            self.seconds = time.monotonic() - self.began
            with self._race.finish():
                if keep is not None:
                    self._place.place(keep, wanted.stored, digests["stored"])
                self._place.place(temp, wanted.raw, digests["raw"])

    def _copy(self, fd: int, keep_fd: int | None) -> dict[str, Mapping[str, str]]:
        """Stream the object into the open files and check it; digests of what was sent and what came out."""
        wanted = self._wanted
        where = f"{wanted.key} on {self.replica.name}"
        raw_digest = Digest({_ALWAYS, *wanted.raw.check} if wanted.compression else ())
        out = 0
        with self.replica.store.stream(wanted.key, chunk=_CHUNK) as chunks:
            source = _Source(self, chunks, keep_fd, where)
            try:
                for piece in _pieces(source, wanted.compression, limit=wanted.raw.bytes, where=where):
                    out += len(piece)
                    raw_digest.update(piece)
                    _write_all(fd, piece)
            except CorruptError:
                # What was sent says more about the damage than the decompressor does.
                source.drain()
                source.check()
                raise
            source.drain()
        source.check()
        if wanted.compression is None:
            return {"stored": source.digest.hexdigests(), "raw": source.digest.hexdigests()}
        check_size(out, size=wanted.raw.bytes, where=f"{where}, decompressed,")
        compare(wanted.raw.hashes, raw_digest.hexdigests(), where=f"{where}, decompressed,")
        return {"stored": source.digest.hexdigests(), "raw": raw_digest.hexdigests()}

    def take(self, count: int) -> None:
        """Record progress, or stop."""
        self.received += count
        self.moved = time.monotonic()
        if self._cancelled or self._closing.is_set():
            raise Cancelled


class _Source:
    """The object as it comes: counted, digested, kept where asked, and never longer than the index says."""

    def __init__(self, attempt: Attempt, chunks: Iterator[Buffer], keep_fd: int | None, where: str) -> None:
        self._attempt = attempt
        self._item = attempt._wanted.stored
        self._chunks = chunks
        self._keep_fd = keep_fd
        self._where = where
        self.digest = Digest({_ALWAYS, *self._item.check})

    def read(self, size: int = -1) -> Buffer:
        """The next piece, of any size; empty at the end."""
        chunk = next(self._chunks, b"")
        self._attempt.take(len(chunk))
        self.digest.update(chunk)
        if self.digest.bytes > self._item.bytes:
            check_size(self.digest.bytes, size=self._item.bytes, where=self._where)
        if self._keep_fd is not None:
            _write_all(self._keep_fd, chunk)
        return chunk

    def drain(self) -> None:
        """Read what the decompressor left."""
        while self.digest.bytes < self._item.bytes and self.read():
            pass

    def check(self) -> None:
        """Raise CorruptError unless this was the object of the index."""
        check_size(self.digest.bytes, size=self._item.bytes, where=self._where)
        compare(self._item.hashes, self.digest.hexdigests(), where=self._where)


def _pieces(source: _Source, compression: str | None, *, limit: int, where: str) -> Iterator[Buffer]:
    """What comes out of the decompressor, in pieces, never more than `limit` bytes and one piece."""
    if compression is None:
        while chunk := source.read():
            yield chunk
    elif parse(compression)[0] == "zstd":
        yield from _zstd_pieces(source, limit=limit, where=where)
    else:
        decompressor = Decompressor(compression, limit=limit, where=where)
        while chunk := source.read():
            yield from decompressor.feed(chunk)
        yield decompressor.finish()


def _zstd_pieces(source: _Source, *, limit: int, where: str) -> Iterator[memoryview]:
    """zstd pulls: a piece is asked for at a time, so a bomb yields no more than that beyond the limit."""
    view = _buffers.take((_PIECE,)).data
    out = 0
    try:
        readable = cast(IO[bytes], source)  # it only ever calls read
        with (
            _decompressor() as decompressor,
            decompressor.stream_reader(readable, read_across_frames=True) as reader,
        ):
            while count := reader.readinto(view):
                out += count
                if out > limit:
                    check_size(out, size=limit, where=f"{where}, decompressed,")
                yield view[:count]
    except zstandard.ZstdError as error:
        raise CorruptError(
            f"{where} is damaged: {error}", mend="fetch it again from a good replica (datasync repair)"
        ) from error


@contextlib.contextmanager
def _decompressor() -> Iterator[zstandard.ZstdDecompressor]:
    """One that nobody uses now: its window, some megabytes, is used again."""
    try:
        decompressor = _decompressors.pop()
    except IndexError:
        decompressor = zstandard.ZstdDecompressor()
    try:
        yield decompressor
    finally:
        _decompressors.append(decompressor)


def _write_all(fd: int, data: Buffer) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except OSError as error:
        raise _LocalFailure(error) from error


class _LocalFailure(Exception):
    """A write to the cache failed; wrapped, lest the store being read takes it for its own failure."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


def checks(hashes: Mapping[str, str], validate_hash: str | None) -> tuple[str, ...]:
    """Which of an index's digests to verify: the one asked for, else the cheapest."""
    name = validate_hash if validate_hash in hashes else cheapest(hashes)
    return (name,) if name is not None else ()


def stalled(attempt: Attempt, seconds: float) -> TransientError:
    """The error for an attempt that has said nothing for `seconds` seconds."""
    return TransientError(
        f"{attempt.describe()} sent nothing for {seconds:.0f} s",
        mend="check that store; a longer download_timeout waits longer",
    )
