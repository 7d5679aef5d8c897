"""Which replica to read from next: health, cool-off and the time after which a read is slow.

Replicas come in the user's order of preference and hold the same bytes; which of them serves a shard never
changes a sample, only how long it takes. A replica that fails is left alone for a while (its cool-off) and is
then tried again with one shard. A cool-off doubles with every failure in a row:

    down        5 s … 300 s       a reset, a timeout, a 5xx
    throttled   2 s …  60 s       503 SlowDown, 429
    slow       30 s … 300 s       a hedged read elsewhere finished first
    denied    300 s               credentials do not mend themselves
    missing, corrupt              the shard alone is read elsewhere; from the third in a row, 60 s … 600 s
    a stranger 60 s … 600 s       it holds another dataset (`identity.py`)

Health is kept by each process for itself: it costs a worker one failed read to learn what another one knows,
and nothing has to be shared. Nothing here does I/O.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from datasync.errors import CorruptError, DeniedError, NotFoundError, ThrottledError
from datasync.storage.base import Store
from datasync.streaming.stats import Stats

_PROBE_SECONDS = 5.0
_FORGIVEN = 2  # missing or corrupt shards in a row that do not yet speak against the replica
_MIN_RECORDS = 8
_HEDGE_UNKNOWN = 5.0
_HEDGE_LEAST, _HEDGE_MOST = 0.25, 15.0
_COMPARABLE = 1 << 20  # below this size, a read's time is its latency and does not scale with bytes


class SlowReplica(Exception):
    """Another replica finished first."""


class Stranger(NotFoundError):
    """The replica holds another dataset."""


@dataclass(slots=True)
class _Health:
    failures: int = 0  # in a row, of the kinds that count
    doubtful: int = 0  # missing or corrupt shards in a row
    until: float = 0.0  # clock time at which the cool-off ends
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One of the places that hold the dataset.

    Args:
        number (int): Its place in the order of preference, from 0.
        store (Store): How to read it.
    """

    number: int
    store: Store

    @property
    def name(self) -> str:
        """Its URL, for messages."""
        return self.store.url


@dataclass(slots=True)
class Replicas:
    """The replicas of one stream and what this process knows about them. Thread-safe.

    Args:
        stores (Sequence[Store]): In order of preference.
        stats (Stats): Where throttling and the first sight of an event are recorded.
        clock (Callable): Seconds, monotonic. Default: ``time.monotonic``.
    """

    stores: Sequence[Store]
    stats: Stats
    clock: Callable[[], float] = time.monotonic
    all: list[Replica] = field(init=False)
    _health: list[_Health] = field(init=False)
    _records: deque[tuple[int, float]] = field(init=False)
    _lock: threading.Lock = field(init=False)

    def __post_init__(self) -> None:
        self.all = [Replica(number=i, store=store) for i, store in enumerate(self.stores)]
        self._health = [_Health() for _ in self.all]
        self._records = deque(maxlen=128)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.all)

    def pick(self, tried: Collection[int] = ()) -> Replica | None:
        """The best replica whose number is not in `tried`, or None.

        Healthy ones in order of preference; then those in cool-off, the one that ends soonest first, since a
        doubtful replica is better than none. A replica whose cool-off has just ended goes to one caller; the
        others see it as cooling until that read is over.
        """
        now = self.clock()
        with self._lock:
            left = [replica for replica in self.all if replica.number not in tried]
            for replica in left:
                health = self._health[replica.number]
                if health.until <= now:
                    if health.failures:
                        health.until = now + _PROBE_SECONDS
                    return replica
            return min(left, key=lambda replica: self._health[replica.number].until, default=None)

    def healthy(self, tried: Collection[int] = ()) -> Replica | None:
        """Like `pick`, but None rather than one in cool-off: for reads that are a luxury."""
        now = self.clock()
        with self._lock:
            for replica in self.all:
                health = self._health[replica.number]
                if replica.number not in tried and not health.failures and health.until <= now:
                    return replica
        return None

    def good(self, replica: Replica, *, bytes: int, seconds: float) -> None:
        """A read succeeded."""
        with self._lock:
            health = self._health[replica.number]
            back = health.failures > 0
            health.failures = health.doubtful = 0
            health.until = 0.0
            self._records.append((bytes, seconds))
        if back:
            self.stats.log_once(f"back {replica.number}", "replica %s answers again", replica.name)

    def bad(self, replica: Replica, error: BaseException) -> None:
        """A read failed, or lost against a hedged one."""
        first, most = _cool_off(error)
        if isinstance(error, ThrottledError):
            self.stats.add(throttled=1)
        with self._lock:
            health = self._health[replica.number]
            if isinstance(error, NotFoundError | CorruptError) and not isinstance(error, Stranger):
                health.doubtful += 1
                if health.doubtful <= _FORGIVEN:
                    return
            health.failures += 1
            seconds = min(first * 2 ** min(health.failures - 1, 16), most)
            health.until = self.clock() + seconds
            health.reason = type(error).__name__
        self.stats.log_once(
            f"bad {replica.number} {type(error).__name__}",
            "replica %s is left alone for %.0f s: %s (counted from now on, not logged)",
            replica.name,
            seconds,
            getattr(error, "message", error) or type(error).__name__,
        )

    def hedge_after(self, bytes: int) -> float:
        """Seconds after which a read of this many bytes is slow: past the 95th percentile of recent ones.

        Times of other sizes are scaled to this one. With few records, a fixed number of seconds.
        """
        with self._lock:
            records = list(self._records)
        if len(records) < _MIN_RECORDS:
            return _HEDGE_UNKNOWN
        scaled = sorted(
            seconds * max(bytes, _COMPARABLE) / max(other, _COMPARABLE) for other, seconds in records
        )
        p95 = scaled[min(int(len(scaled) * 0.95), len(scaled) - 1)]
        return min(max(1.5 * p95, _HEDGE_LEAST), _HEDGE_MOST)

    def describe(self) -> dict[str, str]:
        """The state of each replica by name: ``healthy``, or the reason and the seconds left."""
        now = self.clock()
        with self._lock:
            return {
                replica.name: f"{health.reason}, {health.until - now:.0f} s left"
                if health.until > now
                else "healthy"
                for replica, health in zip(self.all, self._health, strict=True)
            }


def _cool_off(error: BaseException) -> tuple[float, float]:
    """First and longest cool-off, in seconds, after this kind of failure."""
    if isinstance(error, ThrottledError):
        return 2.0, 60.0
    if isinstance(error, SlowReplica):
        return 30.0, 300.0
    if isinstance(error, DeniedError):
        return 300.0, 300.0
    if isinstance(error, NotFoundError | CorruptError):
        return 60.0, 600.0
    return 5.0, 300.0
