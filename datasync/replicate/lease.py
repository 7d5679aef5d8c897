"""The lease of a destination: one run at a time works on a dataset there.

    free ──acquire──► held(token n) ──renew──► held(token n) ──release──► free(token n)
                          │
                          └─ not renewed for its time to live, or its process is gone ──acquire──► held(n + 1)

The lease is one small object, changed by conditional writes only, so of several contenders one wins. The
token grows with every holder and is never reused, which is why a released lease is kept rather than deleted:
a holder that was suspended and comes back finds a larger token and stops; a receipt with a smaller token than
the one in place is refused (`ops.receipts`).

Time is the store's own where it tells time: whether a lease has run out is judged by how much later the store
dates a fresh object than the lease, so a wrong clock at either end takes nothing from a holder. A holder on
this host whose process no longer exists is replaced at once, without waiting.

A store without conditional writes gets the fallback: write, wait a moment longer than a write takes, read
back; whoever reads their own name goes on. That is exact unless two contenders' writes are further apart than
the wait.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from datasync.errors import BusyError, ConflictError, FormatError, NotFoundError, StoreError, TransientError
from datasync.ops.receipts import now
from datasync.replicate.layout import LEASE
from datasync.storage.base import ObjectInfo, Store
from datasync.storage.retry import inheriting

log = logging.getLogger(__name__)

TTL_SECONDS = 60.0
_SETTLE_SECONDS = 2.0
_RACES = 5

_held: set[str] = set()  # the runs of this process that hold a lease


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process, in a way that tells it from a later one with the same number.

    Args:
        host (str): Host name.
        boot (str): Boot and process-number namespace, so that a pid means something.
        pid (int): Process number.
        born (str): When the kernel started it.
        run (str): Random, one a lease.
        command (str): What it does, for people.
    """

    host: str
    boot: str
    pid: int
    born: str
    run: str
    command: str

    @classmethod
    def here(cls, command: str) -> Holder:
        """This process."""
        pid = os.getpid()
        return cls(
            host=socket.gethostname(),
            boot=_boot(),
            pid=pid,
            born=_born(pid),
            run=uuid.uuid4().hex,
            command=command,
        )

    def is_gone(self) -> bool:
        """Whether this is a process of this host that no longer runs, or a run of this process that ended
        without giving its lease back, say on a full disk. Unknown counts as running."""
        if not self.boot or (self.host, self.boot) != (socket.gethostname(), _boot()):
            return False
        if (self.pid, self.born) == (os.getpid(), _born(os.getpid())):
            return self.run not in _held
        return _born(self.pid) != self.born

    def __str__(self) -> str:
        return f"{self.host} (pid {self.pid}, {self.command})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What the lease object says.

    Args:
        holder (Holder | None): Who has it; None when it is free.
        token (int): Fencing token: grows by one with every holder.
        ttl (float): Seconds without renewal after which it is lost.
        acquired (str): ISO 8601, by the holder's clock.
        renewed (float): Seconds since the epoch, by the holder's clock.
    """

    holder: Holder | None
    token: int
    ttl: float
    acquired: str
    renewed: float

    def dumps(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode() + b"\n"

    @classmethod
    def parse(cls, data: bytes, *, where: str) -> Record:
        try:
            raw = json.loads(data)
            holder = raw.pop("holder")
            found = cls(holder=Holder(**holder) if holder else None, **raw)
            if not isinstance(found.token, int) or not isinstance(found.ttl, int | float):
                raise ValueError("its token or its time to live is no number")
            return found
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise FormatError(
                f"{where} is not a lease: it is damaged", mend="remove it when no run is under way"
            ) from error


def may_take(record: Record | None, *, idle: float) -> bool:
    """Whether a contender may take the lease: it is free, `idle` for too long, or its holder is gone."""
    if record is None or record.holder is None:
        return True
    return idle > record.ttl or record.holder.is_gone()


def successor(record: Record | None, holder: Holder, *, ttl: float) -> Record:
    """The record of the next holder."""
    token = 1 if record is None else record.token + 1
    return Record(holder=holder, token=token, ttl=ttl, acquired=now(), renewed=time.time())


class Lease:
    """A lease that is held and renewed in the background until `release`.

    Args:
        store (Store): The destination.
        command (str): What the run does, shown to whoever finds the place busy.
        ttl (float): Seconds without renewal after which others may take it. Default: ``60``.
    """

    def __init__(
        self,
        store: Store,
        command: str,
        *,
        ttl: float = TTL_SECONDS,
    ) -> None:
        self.store = store
        self.command = command
        self.ttl = ttl
        self._on_lost: Callable[[], None] | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._record: Record | None = None
        self._etag: str | None = None
        self.lost = False
        self._unrenewed: StoreError | None = None

    @property
    def token(self) -> int:
        assert self._record is not None, "the lease was never acquired"
        return self._record.token

    def acquire(self) -> None:
        """Take the lease and begin to renew it.

        Raises:
            BusyError: Somebody else has it; the message says who.
        """
        conditional = self.store.abilities().if_absent and self.store.abilities().if_match
        for _ in range(_RACES):
            record, info = self._look()
            if record is not None and not may_take(record, idle=self._idle(record, info)):
                raise self._busy(record)
            mine = successor(record, Holder.here(self.command), ttl=self.ttl)
            assert mine.holder is not None
            with contextlib.suppress(ConflictError):
                _held.add(mine.holder.run)
                try:
                    self._take(mine, info, conditional=conditional)
                except BaseException:
                    _held.discard(mine.holder.run)
                    raise
                renew = inheriting(self._renew_loop)
                self._thread = threading.Thread(target=renew, name="lease", daemon=True)
                self._thread.start()
                return
            time.sleep(random.uniform(0.05, 0.3))
        raise BusyError(
            f"{self.store.url}: other runs took the lease {_RACES} times in a row", mend="run again later"
        )

    def check(self) -> None:
        """Prove, by renewing, that the lease is still held; done before anything is published.

        Raises:
            BusyError: It was lost.
        """
        if not self._renew():
            raise self.lost_error()

    def when_lost(self, action: Callable[[], None]) -> None:
        """Have `action` called once, from the renewing thread, if the lease is lost."""
        self._on_lost = action
        if self.lost:
            action()

    def lost_error(self) -> StoreError | BusyError:
        """What to tell when the lease is lost: that it was taken, or that the place did not answer."""
        if self._unrenewed is not None:
            return StoreError(
                f"{self.store.url}: the lease of this run could not be renewed in time, and others may take"
                f" it: {self._unrenewed.message}",
                mend=self._unrenewed.mend or "run again",
            )
        return BusyError(
            f"{self.store.url}: the lease of this run was taken over by {self._who()}",
            mend="let that run finish; then run again",
        )

    def release(self) -> None:
        """Give the lease back, keeping its token. Safe to call twice."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._lock:
            if self._record is None or self._record.holder is None:
                return
            run = self._record.holder.run
            if self.lost:
                _held.discard(run)
                return
            freed = replace(self._record, holder=None, renewed=time.time())
            try:
                self._put(freed)
            except StoreError as error:
                log.warning(
                    "the lease at %s could not be given back and runs out by itself: %s",
                    self.store.url,
                    error,
                )
            self._record = freed
            _held.discard(run)

    def _look(self) -> tuple[Record | None, ObjectInfo | None]:
        for _ in range(_RACES):
            try:
                info = self.store.stat(LEASE)
                data = self.store.read(LEASE, etag=info.etag)
                try:
                    return Record.parse(data, where=f"{self.store.url}/{LEASE}"), info
                except FormatError as error:
                    return self._unreadable(error), info
            except NotFoundError:
                return None, None
            except ConflictError:
                continue  # renewed between the two calls
        raise TransientError(f"{self.store.url}/{LEASE} changes as fast as it is read", mend="run again")

    def _unreadable(self, error: FormatError) -> Record:
        """What stands for a damaged lease: somebody's, for as long as it was renewed within its time."""
        from datasync.ops import receipts

        log.warning("%s", error.message)
        newest, _ = receipts.recovered(self.store)
        nobody = Holder(host="somebody", boot="", pid=0, born="", run="", command=error.message)
        token = 0 if newest is None else newest.token
        return Record(holder=nobody, token=token, ttl=TTL_SECONDS, acquired="some time", renewed=0.0)

    def _idle(self, record: Record, info: ObjectInfo | None) -> float:
        """Seconds since the lease was written, by the store's clock, else by this host's."""
        if record.holder is None or info is None or record.holder.is_gone():
            return 0.0
        if info.mtime is None:
            return time.time() - record.renewed
        probe = f"_datasync/clock/{uuid.uuid4().hex}"
        try:
            self.store.write(probe, b"")
            fresh = self.store.stat(probe).mtime
        finally:
            self.store.delete([probe])
        return (fresh if fresh is not None else time.time()) - info.mtime

    def _take(self, mine: Record, info: ObjectInfo | None, *, conditional: bool) -> None:
        self._record = mine
        if conditional:
            found = (
                self.store.write(LEASE, mine.dumps(), if_absent=True)
                if info is None
                else self.store.write(LEASE, mine.dumps(), if_match=info.etag)
            )
            self._etag = found.etag
            return
        self.store.write(LEASE, mine.dumps())
        time.sleep(_SETTLE_SECONDS + random.uniform(0, 0.5))
        if not self._is_mine(self._look()[0]):
            raise ConflictError(f"{self.store.url}: another run was faster")

    def _put(self, record: Record) -> None:
        """Write over our own record."""
        if self._etag is not None:
            self._etag = self.store.write(LEASE, record.dumps(), if_match=self._etag).etag
        elif self._is_mine(self._look()[0]):
            self.store.write(LEASE, record.dumps())
        else:
            raise ConflictError(f"{self.store.url}: the lease was taken over")

    def _renew(self) -> bool:
        with self._lock:
            if self.lost or self._record is None or self._record.holder is None:
                return False
            try:
                fresh = replace(self._record, renewed=time.time())
                try:
                    self._put(fresh)
                except (ConflictError, NotFoundError):
                    # A write that was answered by a broken connection may have happened all the same.
                    record, info = self._look()
                    if not self._is_mine(record):
                        self.lost = True
                        return False
                    self._etag = info.etag if info is not None and self._etag is not None else None
                    self._put(fresh)
                self._record = fresh
                return True
            except ConflictError:
                self.lost = True
                return False

    def _is_mine(self, record: Record | None) -> bool:
        if record is None or record.holder is None or self._record is None or self._record.holder is None:
            return False
        return record.holder.run == self._record.holder.run

    def _renew_loop(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(self.ttl / 4 * random.uniform(0.8, 1.2)):
            try:
                renewed, self._unrenewed = self._renew(), None
                if renewed:
                    last = time.monotonic()
            except StoreError as error:
                log.warning("the lease at %s could not be renewed: %s", self.store.url, error)
                # Others may take it from here on; this run must have stopped by then.
                self.lost = time.monotonic() - last > self.ttl * 0.8
                self._unrenewed = error
            if self.lost:
                log.warning("the lease at %s is lost", self.store.url)
                if self._on_lost is not None:
                    self._on_lost()
                return

    def _who(self) -> str:
        with contextlib.suppress(StoreError, FormatError):
            record = self._look()[0]
            if record is not None and record.holder is not None:
                return str(record.holder)
        return "another run"

    def _busy(self, record: Record) -> BusyError:
        return BusyError(
            f"{self.store.url} is busy: {record.holder} has held the lease since {record.acquired}"
            f" (token {record.token})",
            mend=f"let it finish; a run that died loses its lease {record.ttl:.0f} s after its last renewal",
        )


@contextlib.contextmanager
def held(store: Store, command: str, *, ttl: float = TTL_SECONDS) -> Iterator[Lease]:
    """A lease for the length of a block."""
    lease = Lease(store, command, ttl=ttl)
    lease.acquire()
    try:
        yield lease
    finally:
        lease.release()


def _boot() -> str:
    """This boot of this machine and this namespace of process numbers; empty where that is not told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _born(pid: int) -> str:
    """When the kernel started a process, or an empty string when there is none."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    state, born = after_name[0], after_name[19]
    return "" if state in "ZX" else born
