"""Bring a file into the cache whatever the replicas do: retry, fail over, hedge.

One file, in this order:

  1. the best replica; if it is slower than 95 % of recent reads, a second one too: the first to finish wins
  2. corrupt: once more from the same replica; then, as for any failure, the next one
  3. when every replica has failed: a pause that grows, with jitter, and from the beginning
  4. an error: at once if all say missing or denied; after `retry` more rounds if what is left is corrupt;
     after those and `timeout` seconds where something may come back (down, throttled, silent). It names the
     file, the replicas and what each did

Which replica served a file makes no difference to anything but the counters.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from datasync.errors import (
    CorruptError,
    DatasyncError,
    DeniedError,
    NotFoundError,
    StoreError,
    TransientError,
)
from datasync.streaming.attempt import Attempt, Cancelled, Race, Wanted, stalled
from datasync.streaming.cache import Place
from datasync.streaming.identity import Identity
from datasync.streaming.replicas import Replica, Replicas, SlowReplica
from datasync.streaming.room import Need, NoRoom
from datasync.streaming.stats import Stats

_TICK = 0.5
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 10.0


@dataclass(slots=True)
class Watch:
    """What a download is doing now, in words, for whoever waits for it."""

    text: str = "about to begin"


@dataclass(slots=True, kw_only=True)
class Downloader:
    """Downloads for one source.

    Args:
        replicas (Replicas): Where from.
        place (Place): Where to.
        stats (Stats): What to count in.
        retry (int): Rounds over all replicas after the first one.
        timeout (float): Seconds without a byte after which a read is given up; and the least time for which
            failures that can pass are tried again.
        closing (threading.Event): Set when the source is being closed.
        identity (Identity | None): Knows which replicas hold the dataset. Default: all of them do.
    """

    replicas: Replicas
    place: Place
    stats: Stats
    retry: int
    timeout: float
    closing: threading.Event
    identity: Identity | None = None

    def fetch(self, wanted: Wanted, need: Need, watch: Watch) -> None:
        """Place `wanted` in the cache, verified.

        Raises:
            NoRoom: It does not fit now.
            CorruptError: Every replica that has it has it wrong.
            StoreError: No replica could be read; the class is the one that all of them share.
        """
        deadline = time.monotonic() + self.timeout
        failures: dict[int, BaseException] = {}
        rounds = 0
        while True:
            tried: list[int] = []
            while (replica := self.replicas.pick(tried)) is not None:
                tried.append(replica.number)
                if rounds:
                    self.stats.add(retries=1)
                elif failures:
                    self.stats.add(failovers=1)
                errors = self._read(wanted, replica, tried, need, watch)
                if not errors:
                    return
                failures.update(errors)
            late = rounds >= self.retry
            if any(_can_pass(error) for error in failures.values()):
                late = late and time.monotonic() >= deadline
            elif not any(isinstance(error, CorruptError) for error in failures.values()):
                late = True  # missing or denied everywhere: asking again changes nothing
            if late:
                raise self._verdict(wanted, failures)
            pause = min(_FIRST_PAUSE * 2**rounds, _LONGEST_PAUSE) * random.uniform(0.5, 1.0)
            watch.text = f"a pause of {pause:.1f} s after " + "; ".join(map(_first_line, failures.values()))
            rounds += 1
            if self.closing.wait(pause):
                raise Cancelled

    def _read(
        self, wanted: Wanted, replica: Replica, tried: list[int], need: Need, watch: Watch
    ) -> dict[int, BaseException]:
        """Read from `replica`, and once more if that was corrupt; the errors, none if the file is placed."""
        errors = self._race(wanted, replica, tried, need, watch)
        if isinstance(errors.get(replica.number), CorruptError):
            self.stats.add(retries=1)
            again = self._race(wanted, replica, tried, need, watch)
            return errors | again if again else {}
        return errors

    def _race(
        self, wanted: Wanted, replica: Replica, tried: list[int], need: Need, watch: Watch
    ) -> dict[int, BaseException]:
        """Read from `replica`, and from another one if that is slow; errors by replica, none on success."""
        race = Race()
        attempts: list[Attempt] = []

        def start(where: Replica) -> None:
            attempt = Attempt(
                wanted=wanted,
                replica=where,
                place=self.place,
                need=need,
                race=race,
                closing=self.closing,
                identity=self.identity,
            )
            attempts.append(attempt)
            attempt.start()

        errors: dict[int, BaseException] = {}
        start(replica)
        try:
            while len(errors) < len(attempts):
                running = [attempt for attempt in attempts if attempt.replica.number not in errors]
                watch.text = " and ".join(attempt.describe() for attempt in running)
                try:
                    done = race.results.get(timeout=self._patience(attempts, wanted))
                except queue.Empty:
                    self._look_after(attempts, tried, wanted, errors, start)
                    continue
                if done.replica.number in errors:
                    continue  # it had been given up already
                if isinstance(done.error, Cancelled) and not self.closing.is_set():
                    continue  # the winner's report is behind it
                if done.error is None:
                    self._won(done, attempts, wanted)
                    return {}
                if isinstance(done.error, NoRoom) and len(running) > 1:
                    errors[done.replica.number] = done.error  # a hedge that found no room is no failure
                    continue
                self._lost(done, errors)
            return {number: error for number, error in errors.items() if not isinstance(error, NoRoom)}
        finally:
            for attempt in attempts:
                attempt.cancel()

    def _patience(self, attempts: list[Attempt], wanted: Wanted) -> float:
        """Seconds until there may be something to do about these attempts."""
        if len(attempts) > 1 or len(self.replicas) == 1:
            return _TICK
        return min(_TICK, self.replicas.hedge_after(wanted.stored.bytes) / 4)

    def _look_after(
        self,
        attempts: list[Attempt],
        tried: list[int],
        wanted: Wanted,
        errors: dict[int, BaseException],
        start: Callable[[Replica], None],
    ) -> None:
        """Give up attempts that are silent; hedge one that is slow."""
        now = time.monotonic()
        if self.closing.is_set():
            raise Cancelled
        for attempt in attempts:
            silent = now - attempt.moved
            if attempt.replica.number not in errors and attempt.began is not None and silent > self.timeout:
                attempt.cancel()
                attempt.error = stalled(attempt, silent)
                self._lost(attempt, errors)
        first = attempts[0]
        if len(attempts) > 1 or first.began is None:
            return
        if now - first.began > self.replicas.hedge_after(wanted.stored.bytes):
            other = self.replicas.healthy({*tried, first.replica.number})
            if other is not None:
                tried.append(other.number)
                self.stats.add(hedges=1)
                start(other)

    def _won(self, winner: Attempt, attempts: list[Attempt], wanted: Wanted) -> None:
        self.replicas.good(winner.replica, bytes=wanted.stored.bytes, seconds=winner.seconds)
        self.stats.add(
            shards_fetched=1,
            bytes_fetched=wanted.stored.bytes,
            bytes_placed=wanted.raw.bytes,
            fetch_seconds=winner.seconds,
        )
        for attempt in attempts:
            if attempt is not winner:
                self.stats.add(bytes_wasted=attempt.received)
        if winner is not attempts[0]:
            self.stats.add(hedges_won=1)
            if attempts[0].error is None:
                self.replicas.bad(attempts[0].replica, SlowReplica("it was slower than another one"))

    def _lost(self, attempt: Attempt, errors: dict[int, BaseException]) -> None:
        """Record a failure; what is no replica's fault is raised at once."""
        error = attempt.error
        assert error is not None
        if not isinstance(error, StoreError | CorruptError):
            raise error
        errors[attempt.replica.number] = error
        self.stats.add(bytes_wasted=attempt.received, corrupt=isinstance(error, CorruptError))
        self.replicas.bad(attempt.replica, error)
        if self.identity is not None and isinstance(error, NotFoundError | CorruptError):
            self.identity.doubt(attempt.replica)

    def _verdict(self, wanted: Wanted, failures: dict[int, BaseException]) -> DatasyncError:
        """One error for what all replicas did."""
        errors = list(failures.values())
        kinds: list[type[DatasyncError]] = [CorruptError, DeniedError, NotFoundError]
        if any(isinstance(error, CorruptError) for error in errors):
            kind: type[DatasyncError] = CorruptError
        else:
            kind = next((k for k in kinds if all(isinstance(e, k) for e in errors)), TransientError)
        lines = [
            f"{self.replicas.all[number].name}: {getattr(error, 'message', error)}"
            for number, error in sorted(failures.items())
        ]
        mend = next((e.mend for e in errors if isinstance(e, kind) and e.mend), "")
        return kind(f"{wanted.key} could not be read from any replica\n  " + "\n  ".join(lines), mend=mend)


def _can_pass(error: BaseException) -> bool:
    return not isinstance(error, CorruptError | NotFoundError | DeniedError)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
