"""Moving objects: each is read once, proven, and handed to every lane that wants it.

    items ──readers──► read, hash, compare ──► lane b: write, crc32c checked by the store
                                           └─► lane c: write, …

No byte is written under its name before its digest was compared. Memory is bounded by the lanes' windows,
whatever the size and number of objects; nothing passes through the disk. Large objects go in parts
(`large.py`). Where an object cannot be read well at the first source, the next one is asked.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from datasync.errors import ConflictError, CorruptError, DatasyncError, NotFoundError, StoreError
from datasync.replicate.buffers import Buffers, Loan
from datasync.replicate.catalog import etag_of, tag_of
from datasync.replicate.journal import Done
from datasync.replicate.lane import Lane
from datasync.replicate.limits import concurrency_of
from datasync.replicate.plan import Item
from datasync.replicate.reading import algorithms, is_proven, read_again
from datasync.replicate.retry import RETRY_SECONDS, Stopped, retrying
from datasync.storage.base import Filled, Store
from datasync.storage.retry import inheriting
from shards.digests import Digest

log = logging.getLogger(__name__)

LARGE_BYTES = 64 << 20
_READERS = 16
_LARGE_AT_ONCE = 4
_READINGS = 3
_DEAD_AFTER = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Digests of bytes that were read and found right."""

    sha256: str
    crc32c: int


class Mover:
    """Reads from the sources and feeds the lanes.

    Args:
        sources (Sequence[Store]): Places that should have the objects, best first.
        turn (threading.Condition): Shared with the lanes.
        stop (threading.Event): Ends the work between two objects or parts.
        retry_seconds (float): How long a failing source is tried. Default: ``120``.
    """

    def __init__(
        self,
        sources: Sequence[Store],
        *,
        turn: threading.Condition,
        stop: threading.Event,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self.sources = list(sources)
        self.turn = turn
        self.stop = stop
        self.retry_seconds = retry_seconds
        self.read_bytes = 0
        self.read_objects = 0
        self.error: DatasyncError | None = None
        self.found: dict[int, Proof] = {}  # row -> digests that were not known before
        self.tags: dict[int, tuple[str | None, int]] = {}  # row -> tag and size of an object that changed
        self.buffers = Buffers()
        self._large = threading.Semaphore(_LARGE_AT_ONCE)
        self._in_a_row = 0

    def move(self, work: Iterable[tuple[Item, Sequence[Lane]]]) -> None:
        """Hand every item to its lanes; returns when all are read, not when all are stored."""
        feed, lock = iter(work), threading.Lock()

        def reader() -> None:
            while not self.stop.is_set() and self.error is None:
                with lock:
                    item, lanes = next(feed, (None, ()))
                if item is None:
                    return
                try:
                    self._move(item, [lane for lane in lanes if lane.alive])
                except Stopped:
                    return

        with ThreadPoolExecutor(_READERS, thread_name_prefix="reader") as pool:
            for future in [pool.submit(inheriting(reader)) for _ in range(_READERS)]:
                future.result()

    def _move(self, item: Item, lanes: list[Lane]) -> None:
        """One object, to whichever of `lanes` still need it."""
        if item.sha256 is not None:
            lanes = [lane for lane in lanes if not self._settled(item, lane)]
        errors: list[DatasyncError] = []
        for source in self.sources:
            for _ in range(_READINGS):
                if not lanes or self.stop.is_set():
                    return
                try:
                    self._send(source, item, lanes)
                    self._in_a_row = 0
                    if errors and source is not self.sources[0]:
                        log.warning("taken from %s instead: %s", source.url, errors[0].message)
                    return
                except ConflictError:
                    # It changed while it was read: that object starts again, as it is now.
                    fresh = self._again(source, item, errors)
                    if fresh is None:
                        break
                    item = fresh
                except CorruptError as error:
                    log.info("read again: %s", error.message)
                    errors.append(error)
                except StoreError as error:
                    errors.append(error)
                    break
                lanes = [lane for lane in lanes if lane.alive]
        self._give_up(item, lanes, errors)

    def _settled(self, item: Item, lane: Lane) -> bool:
        """Whether a lane gets the object without reading it from a source."""
        assert item.sha256 is not None
        try:
            if lane.adopt(item, sha256=item.sha256, crc32c=item.crc32c):
                done = Done(bytes=item.bytes, sha256=item.sha256, crc32c=item.crc32c, tag=item.tag)
                lane.finished(item, done, adopted=True)
                return True
            return lane.copy_inside(self.sources[0], item)
        except Stopped:
            if self.stop.is_set():
                raise
            return True  # the lane was given up meanwhile; the others go on
        except DatasyncError as error:
            lane.fail_object(item, error)
            return True

    def _send(self, source: Store, item: Item, lanes: list[Lane]) -> None:
        """Read an object, prove it, queue it at the lanes."""
        if item.bytes > LARGE_BYTES:
            from datasync.replicate.large import send_large

            with self._large:
                send_large(self, source, item, lanes)
            return
        ready = self.reserve(item, lanes)
        if not ready:
            return
        handed = 0
        loan = self.buffers.take(item.bytes)
        try:
            filled = self.read(source, item, 0, loan.view)
            digests = _digests(filled, loan.view, algorithms(item))
            proof = self.proven(source, item, digests, filled.crc32c, checked=filled.checked)
            for lane in ready:
                loan.share(1)
                lane.submit(_Put(lane, item, loan, proof), item, item.bytes)
                handed += 1
        finally:
            loan.release()
            for lane in ready[handed:]:
                lane.give_back(item.bytes)

    def read(self, source: Store, item: Item, start: int, buffer: memoryview) -> Filled:
        """Fill `buffer` with the object, hashed by SHA-256 as it comes, or with a range of it."""
        slots, length = concurrency_of(source), len(buffer)
        whole = start == 0 and length == item.bytes
        part = None if whole else start

        def attempt() -> Filled:
            with slots.slot(length, source.url):
                return source.read_into(item.key, buffer, start=part, etag=etag_of(item.tag), sha256=whole)

        filled = retrying(attempt, seconds=self.retry_seconds, stop=self.stop)
        with self.turn:
            self.read_bytes += min(filled.bytes, length)
            self.read_objects += start == 0
        if filled.bytes != length:
            if item.tag is not None:
                raise ConflictError(f"{item.key} at {source.url} has another size than when it was listed")
            raise CorruptError(
                f"{item.key} at {source.url} has {filled.bytes:,} bytes, expected {length:,}",
                mend="repair the source (datasync repair), or copy from another cluster (--from)",
            )
        return filled

    def proven(
        self, source: Store, item: Item, digests: dict[str, str], crc: int, *, checked: bool = False
    ) -> Proof:
        """The proof, or `CorruptError` naming the object, the place and both digests."""
        expected = dict(item.hashes)
        if item.sha256 is not None:
            expected["sha256"] = item.sha256
        for name, want in expected.items():
            if digests[name] != want.lower():
                raise CorruptError(
                    f"{item.key} on {source.url} does not match its digest\n"
                    f"  expected {name} {want}  got {digests[name]}",
                    mend="repair the source (datasync repair), or copy from another cluster (--from)",
                )
        proof = Proof(sha256=digests["sha256"], crc32c=crc)
        if not is_proven(source, item, digests, checked=checked):
            self._read_again(source, item, proof)
        if item.sha256 is None or item.crc32c is None:
            with self.turn:
                self.found[item.row] = proof
        return proof

    def _read_again(self, source: Store, item: Item, proof: Proof) -> None:
        slots = concurrency_of(source)

        def attempt() -> int:
            with slots.slot(item.bytes, source.url):
                return read_again(source, item, sha256=proof.sha256, crc32c=proof.crc32c)

        size = retrying(attempt, seconds=self.retry_seconds, stop=self.stop)
        with self.turn:
            self.read_bytes += size

    def reserve(self, item: Item, lanes: list[Lane], bytes: int | None = None) -> list[Lane]:
        """Room for an object at the lanes; one that lags while another has nothing to do gets it later."""
        need = item.bytes if bytes is None else bytes
        ready: list[Lane] = []
        with self.turn:
            while True:
                waiting = [lane for lane in lanes if lane not in ready and lane.alive]
                fitting = [lane for lane in waiting if lane.try_reserve(need)]
                ready += fitting
                lagging = [lane for lane in waiting if lane not in fitting]
                if self.stop.is_set():
                    for lane in ready:
                        lane.give_back(need)
                    raise Stopped
                if not lagging:
                    return ready
                if any(lane.idle for lane in ready):
                    for lane in lagging:
                        lane.deferred.append(item)
                    return ready
                self.turn.wait(0.5)

    def _again(self, source: Store, item: Item, errors: list[DatasyncError]) -> Item | None:
        """The object as it is now, or None where it cannot be looked at."""
        try:
            info = retrying(lambda: source.stat(item.key), seconds=self.retry_seconds, stop=self.stop)
        except StoreError as error:
            errors.append(error)
            return None
        errors.append(
            ConflictError(
                f"{item.key} at {source.url} changes while it is read",
                mend="run again when nothing writes to it",
            )
        )
        log.info("%s at %s changed while it was read; it starts again", item.key, source.url)
        if item.tag is None:
            return item  # it is named by its content: whatever is there now must be that
        with self.turn:
            self.tags[item.row] = tag_of(source, info), info.bytes
        return replace(item, bytes=info.bytes, tag=tag_of(source, info), sha256=None, crc32c=None)

    def _give_up(self, item: Item, lanes: list[Lane], errors: list[DatasyncError]) -> None:
        error = errors[0] if errors else StoreError(f"{item.key}: there is no source to read it from")
        if isinstance(error, NotFoundError):
            error = NotFoundError(
                f"{item.key} is named by the source but is not at {self.sources[0].url}",
                mend="if the source changed meanwhile, run again; else repair the source (datasync repair)",
            )
        with self.turn:
            self._in_a_row += 1
            if self._in_a_row >= _DEAD_AFTER and self.error is None:
                self.error = error
        for lane in lanes:
            lane.fail_object(item, error, at_source=True)


def _digests(filled: Filled, data: memoryview, others: set[str]) -> dict[str, str]:
    """SHA-256 and the others that are asked for, in hex."""
    assert filled.sha256 is not None
    found = {"sha256": filled.sha256}
    if others:
        digest = Digest(others - {"sha256"})
        digest.update(data)
        found |= digest.hexdigests()
    return found


class _Put:
    """One object on its way to one lane."""

    __slots__ = ("item", "lane", "loan", "proof")

    def __init__(self, lane: Lane, item: Item, loan: Loan, proof: Proof) -> None:
        self.lane, self.item, self.loan, self.proof = lane, item, loan, proof

    def __call__(self) -> None:
        lane, item, proof = self.lane, self.item, self.proof
        if item.sha256 is None and lane.adopt(item, sha256=proof.sha256, crc32c=proof.crc32c):
            done = Done(bytes=item.bytes, sha256=proof.sha256, crc32c=proof.crc32c, tag=item.tag)
            lane.finished(item, done, adopted=True)
            return
        lane.put(item, self.loan.view, sha256=proof.sha256, crc32c=proof.crc32c)

    def ended(self) -> None:
        self.loan.release()
