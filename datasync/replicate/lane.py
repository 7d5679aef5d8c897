"""A lane: one destination of a run, with its own queue, memory and fate.

Every object is read once and handed to all lanes that want it. A lane may hold a window of bytes that it has
not stored yet; when it is full and another lane has nothing to do, the reader goes on without it and the
object is read again for it later. So a slow destination costs a second reading, and never the others' time;
a dead one is given up with its error while the others finish.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from datasync.errors import (
    CorruptError,
    DatasyncError,
    DeniedError,
    NotFoundError,
    StoreError,
    TransientError,
)
from datasync.replicate.journal import Begun, Done, Journal
from datasync.replicate.layout import quarantine_key
from datasync.replicate.limits import concurrency_of, endpoint_of
from datasync.replicate.plan import Item
from datasync.replicate.retry import RETRY_SECONDS, Stopped, retrying
from datasync.storage.base import Buffer, Store
from datasync.storage.retry import inheriting

log = logging.getLogger(__name__)

WINDOW_BYTES = 160 << 20
_WORKERS = 16
_FAILURES_IN_A_ROW = 10
_FAILURES_KEPT = 1000
_SENDS = 3


@dataclass(slots=True)
class Tally:
    """What a lane has done.

    Args:
        copied (int): Objects written by this run.
        copied_bytes (int): Their bytes.
        adopted (list[str]): Objects found in place and proven good without sending them.
        server_copied (int): Of the copied, those that never passed through this machine.
        resumed_bytes (int): Bytes of parts that an earlier run had sent.
        checked_sha256 (int): Objects whose SHA-256 was checked before they became visible.
        checked_crc32c (int): Objects whose CRC the store checked while writing.
        read_back (int): Objects read again from the destination and compared.
        failed (int): Objects given up.
        failures (list): The first of them, with their errors.
    """

    copied: int = 0
    copied_bytes: int = 0
    adopted: list[str] = field(default_factory=list)
    server_copied: int = 0
    resumed_bytes: int = 0
    checked_sha256: int = 0
    checked_crc32c: int = 0
    read_back: int = 0
    failed: int = 0
    failures: list[tuple[str, DatasyncError]] = field(default_factory=list)


class Lane:
    """One destination.

    Args:
        name (str): For people: the cluster's name or the URL.
        store (Store): The dataset's root there.
        journal (Journal): Where finished work is recorded.
        turn (threading.Condition): Shared by all lanes of a run; notified when one has room again.
        stop (threading.Event): Set when the run is to end.
        read_back (bool): Read every object again after writing it. Default: ``False``.
        retry_seconds (float): How long a failing destination is tried. Default: ``120``.
    """

    def __init__(
        self,
        name: str,
        store: Store,
        journal: Journal,
        *,
        turn: threading.Condition,
        stop: threading.Event,
        read_back: bool = False,
        retry_seconds: float = RETRY_SECONDS,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.name = name
        self.store = store
        self.journal = journal
        self.read_back = read_back
        self.retry_seconds = retry_seconds
        self.concurrency = concurrency_of(store)
        self.tally = Tally()
        self.error: DatasyncError | None = None
        self.deferred: list[Item] = []
        self.present: dict[str, bool] = {}  # what lies there unproven -> whether others put it there
        self.uploads: dict[str, Begun] = {}
        # Between folders every byte is read here anyway, so it is proven before it has a name.
        self.server_copy = endpoint_of(store) != "file://"
        self._turn = turn
        self._stop = stop
        self._on_progress = on_progress
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], Item, int] | None] = queue.SimpleQueue()
        self._reserved = 0
        self._busy = 0
        self._in_a_row = 0
        self._threads: list[threading.Thread] = []
        self._checks_crc = store.abilities().crc32c

    # Memory and work, all under `turn`.

    @property
    def alive(self) -> bool:
        return self.error is None and not self._stop.is_set()

    @property
    def idle(self) -> bool:
        """Nothing is being written and nothing waits to be."""
        return self._busy == 0

    def try_reserve(self, bytes: int) -> bool:
        """Take `bytes` of the window, if they fit; one object always fits an empty window."""
        if self._reserved and self._reserved + bytes > WINDOW_BYTES:
            return False
        self._reserved += bytes
        return True

    def give_back(self, bytes: int) -> None:
        with self._turn:
            self._reserved -= bytes
            self._turn.notify_all()

    def submit(self, task: Callable[[], None], item: Item, bytes: int) -> None:
        """Queue a task whose `bytes` were reserved; they are given back when it ends."""
        with self._turn:
            self._busy += 1
            if len(self._threads) < min(self._busy, _WORKERS):
                work = inheriting(self._work)
                thread = threading.Thread(target=work, name=f"lane {self.name}", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._queue.put((task, item, bytes))

    @contextlib.contextmanager
    def slot(self, bytes: int = 0) -> Iterator[None]:
        """One of the endpoint's operations.

        Raises:
            Stopped: The lane was given up while this one waited for its turn.
        """
        with self.concurrency.slot(bytes, self.store.url):
            if self.error is not None:
                raise Stopped
            yield

    def drain(self) -> None:
        """Wait until everything that was submitted has ended."""
        with self._turn:
            while self._busy:
                self._turn.wait(1.0)

    def close(self) -> None:
        """End the threads; what is queued runs first, unless the lane is dead or the run stops."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            run, item, bytes = task
            try:
                if self.alive:
                    run()
            except Stopped:
                pass
            except DatasyncError as error:
                self.fail_object(item, error)
            except BaseException as error:  # a bug must end the run, not one thread of it
                self.fail(StoreError(f"{self.name}: {type(error).__name__}: {error}"))
                raise
            finally:
                if (ended := getattr(run, "ended", None)) is not None:
                    ended()
                with self._turn:
                    self._reserved -= bytes
                    self._busy -= 1
                    self._turn.notify_all()

    # Outcomes

    def fail(self, error: DatasyncError) -> None:
        """Give this destination up."""
        with self._turn:
            if self.error is None:
                self.error = error
                log.warning("%s is given up: %s", self.name, error.message)
            self._turn.notify_all()

    def fail_object(self, item: Item, error: DatasyncError, *, at_source: bool = False) -> None:
        """Count one object as failed; a destination that fails again and again is given up."""
        with self._turn:
            self.tally.failed += 1
            if len(self.tally.failures) < _FAILURES_KEPT:
                self.tally.failures.append((item.key, error))
            self._in_a_row += not at_source
            dead = isinstance(error, TransientError | DeniedError) or self._in_a_row >= _FAILURES_IN_A_ROW
        log.warning("%s: %s", self.name, error.message)
        if dead and not at_source:
            self.fail(error)

    def drop_upload(self, begun: Begun) -> None:
        """Abort an upload of an earlier run or of bytes that proved wrong."""
        self.uploads.pop(begun.key, None)
        try:
            self.store.resume(begun.key, begun.upload_id, bytes=begun.bytes).abort()
        except NotFoundError:
            pass
        except StoreError as error:
            log.warning("the upload of %s on %s could not be aborted: %s", begun.key, self.name, error)
            return
        self.journal.dropped(begun.key, begun.upload_id)

    def finished(self, item: Item, done: Done, *, adopted: bool = False, server: bool = False) -> None:
        """Record an object as finished."""
        self.journal.done(item.key, replace(done, adopted=adopted and self.present.get(item.key, False)))
        with self._turn:
            self._in_a_row = 0
            if adopted:
                self.tally.adopted.append(item.key)
            else:
                self.tally.copied += 1
                self.tally.copied_bytes += done.bytes
                self.tally.server_copied += server
                self.tally.checked_crc32c += self._checks_crc and not server
                self.tally.checked_sha256 += not server
        if self._on_progress is not None:
            self._on_progress(done.bytes, 1)

    def add(self, tally: Tally) -> None:
        """Count what another process has done for this lane."""
        mine = self.tally
        with self._turn:
            for name in ("copied", "copied_bytes", "server_copied", "resumed_bytes", "failed"):
                setattr(mine, name, getattr(mine, name) + getattr(tally, name))
            for name in ("checked_sha256", "checked_crc32c", "read_back"):
                setattr(mine, name, getattr(mine, name) + getattr(tally, name))
            mine.adopted += tally.adopted
            mine.failures += tally.failures[: _FAILURES_KEPT - len(mine.failures)]
        if self._on_progress is not None:
            self._on_progress(tally.copied_bytes, tally.copied + len(tally.adopted))

    # Single objects

    def adopt(self, item: Item, *, sha256: str, crc32c: int | None) -> bool:
        """Whether the object that lies under this key already is the right one.

        Its CRC as the store keeps it is proof where both are known; otherwise it is read and hashed.
        """
        if item.key not in self.present:
            return False
        return self.holds(item.key, item.bytes, sha256=sha256, crc32c=crc32c)

    def holds(self, key: str, bytes: int, *, sha256: str, crc32c: int | None) -> bool:
        """Whether the store has these bytes under this key."""

        def look() -> bool:
            with self.slot(bytes):
                try:
                    info = self.store.stat(key)
                    if info.bytes != bytes:
                        return False
                    if crc32c is not None and info.crc32c is not None:
                        return info.crc32c == crc32c
                    return self._hash(key) == sha256
                except NotFoundError:
                    return False

        return retrying(look, seconds=self.retry_seconds, stop=self._stop)

    def put(self, item: Item, data: Buffer, *, sha256: str, crc32c: int) -> None:
        """Store an object whose bytes are proven; visible only when it is whole."""

        def send() -> None:
            with self.slot(len(data)):
                self.store.write(item.key, data, crc32c=crc32c)

        for attempt in range(1, _SENDS + 1):
            try:
                retrying(send, seconds=self.retry_seconds, stop=self._stop)
            except CorruptError:
                # The store saw other bytes than we sent: the way there is bad.
                if attempt == _SENDS:
                    raise
                continue
            if not self.read_back or self.proven(item, sha256=sha256):
                break
            if attempt == _SENDS:
                raise CorruptError(
                    f"{item.key} on {self.name} is not what was sent, {_SENDS} times in a row"
                    f" (expected sha256 {sha256})",
                    mend=f"check the disk or the network of {self.store.url}",
                )
        self.finished(item, Done(bytes=item.bytes, sha256=sha256, crc32c=crc32c, tag=item.tag))

    def proven(self, item: Item, *, sha256: str) -> bool:
        """Read an object back and compare; a bad one goes to quarantine."""

        def hashed() -> str:
            with self.slot(item.bytes):
                return self._hash(item.key)

        found = retrying(hashed, seconds=self.retry_seconds, stop=self._stop)
        with self._turn:
            self.tally.read_back += 1
        if found == sha256:
            return True
        log.warning("%s on %s has sha256 %s, expected %s: quarantined", item.key, self.name, found, sha256)
        quarantine(self.store, item.key)
        return False

    def copy_inside(self, source: Store, item: Item) -> bool:
        """Copy an object inside the endpoint, where this store and `source` are at the same one."""
        from datasync.errors import UnsupportedError

        if not self.server_copy or item.sha256 is None:
            return False

        def copy() -> None:
            with self.slot(item.bytes):
                self.store.copy(source, item.key, item.key)

        try:
            retrying(copy, seconds=self.retry_seconds, stop=self._stop)
        except UnsupportedError:
            self.server_copy = False
            return False
        info = retrying(lambda: self.store.stat(item.key), seconds=self.retry_seconds, stop=self._stop)
        good = info.bytes == item.bytes
        if good and item.crc32c is not None and info.crc32c is not None and not self.read_back:
            good = info.crc32c == item.crc32c
        elif good:
            good = self.proven(item, sha256=item.sha256)
        if not good:
            return False
        done = Done(bytes=item.bytes, sha256=item.sha256, crc32c=item.crc32c, tag=item.tag)
        self.finished(item, done, server=True)
        return True

    def _hash(self, key: str) -> str:
        digest = hashlib.sha256()
        with self.store.stream(key) as pieces:
            for piece in pieces:
                digest.update(piece)
        return digest.hexdigest()


def quarantine(store: Store, key: str) -> str:
    """Move an object out of the way, keeping it for whoever wants to know; returns where it went."""
    from datasync.errors import UnsupportedError

    target = quarantine_key(key)
    try:
        store.copy(store, key, target)
    except UnsupportedError:
        store.write(target, store.read(key))
    except NotFoundError:
        return target
    store.delete([key])
    return target
