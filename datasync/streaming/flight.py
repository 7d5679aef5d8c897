"""One fetch at a time for each shard in a process, and readers that wait for it.

A flight is the bringing of one shard. Prefetch threads fly in their own thread; a reader that needs a shard
which nobody is bringing starts a thread for it and waits beside it, so that it can be interrupted, and can
say in the log what it waits for (the shard and the replica) when that takes long.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from datasync.streaming.download import Watch
from datasync.streaming.stats import Stats

log = logging.getLogger("datasync.streaming")


@dataclass(slots=True)
class Flight:
    """The bringing of one shard.

    Args:
        shard (int): Its number.
        watch (Watch): What is being done for it.
        done (threading.Event): Set at the end.
        error (BaseException | None): How it ended.
        mapped (mmap.mmap | None): The file, open, if a reader asked for it: what is open is not evicted, and
            between bringing and opening others may need the room.
    """

    shard: int
    watch: Watch = field(default_factory=Watch)
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    mapped: mmap.mmap | None = None


class Flights:
    """The flights of one source in one process. Thread-safe."""

    def __init__(self) -> None:
        self._flights: dict[int, Flight] = {}
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()

    def join(self, shard: int) -> tuple[Flight, bool]:
        """The flight of a shard, and whether it is new, so that the caller has to fly it."""
        with self._lock:
            flight = self._flights.get(shard)
            if flight is not None:
                return flight, False
            flight = self._flights[shard] = Flight(shard)
            return flight, True

    def run(self, flight: Flight, work: Callable[[], None]) -> None:
        """Fly in this thread; what goes wrong is left in `flight.error`."""
        try:
            work()
        except BaseException as error:  # noqa: BLE001  raised by those who wait
            flight.error = error
        finally:
            with self._lock:
                self._flights.pop(flight.shard, None)
            flight.done.set()

    def start(self, flight: Flight, work: Callable[[], None]) -> None:
        """Fly in a thread of its own."""

        def fly() -> None:
            self.run(flight, work)
            with self._lock:
                self._threads.discard(thread)

        thread = threading.Thread(target=fly, name=f"datasync-bring-{flight.shard}", daemon=True)
        with self._lock:
            self._threads.add(thread)
        thread.start()

    def close(self, deadline: float) -> None:
        """Wait for the threads that were started here, until this monotonic time."""
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))


class Patience:
    """A reader's wait for one shard: counted, and logged when it is long.

    Args:
        name (str): The file of the shard.
        stats (Stats): What to count in.
        stall_seconds (float): When to log first; then each time the wait has doubled.
    """

    def __init__(self, name: str, stats: Stats, stall_seconds: float) -> None:
        self._name = name
        self._stats = stats
        self._started = time.monotonic()
        self._waited = False
        self._stalled = False
        self._next = stall_seconds

    def wait(self, flight: Flight) -> None:
        """Until the flight is over."""
        self._waited = True
        while not flight.done.wait(min(self._next, 1.0)):
            seconds = time.monotonic() - self._started
            if seconds >= self._next:
                if not self._stalled:
                    self._stats.add(stalls=1)
                    self._stalled = True
                log.warning("waiting for %s for %.0f s: %s", self._name, seconds, flight.watch.text)
                self._next = seconds * 2

    def sleep(self, seconds: float) -> None:
        """A pause that counts as waiting."""
        self._waited = True
        time.sleep(seconds)

    def over(self) -> None:
        """Count the wait, or that there was none."""
        if self._waited:
            self._stats.add(misses=1, wait_seconds=time.monotonic() - self._started)
        else:
            self._stats.add(hits=1)
