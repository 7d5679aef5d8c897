"""Opening the destinations of a run side by side, so that a slow or dead one does not hold up the others."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from datasync.errors import DatasyncError, StoreError
from datasync.replicate.destination import Destination, open_destination
from datasync.replicate.options import Options
from datasync.replicate.retry import retrying
from datasync.storage.base import Store
from datasync.storage.retry import inheriting

log = logging.getLogger(__name__)

LAG_SECONDS = 1.0


class Opening:
    """The destinations of one run, until they are open.

    Args:
        name (str): Of what is replicated.
        to (Mapping[str, Store]): Name for people -> root of the copy.
        options (Options): How.
        turn (threading.Condition): Shared by all lanes of the run.
        stop (threading.Event): Set when the run is to end.
        failed (Callable): Told of a place that cannot be opened, and why.
        on_progress (Callable): Told of bytes and objects that a place has.
    """

    def __init__(
        self,
        name: str,
        to: Mapping[str, Store],
        options: Options,
        *,
        turn: threading.Condition,
        stop: threading.Event,
        failed: Callable[[str, DatasyncError], None],
        on_progress: Callable[[str, int, int], None],
    ) -> None:
        self._name, self._to, self._options = name, to, options
        self._turn, self._stop = turn, stop
        self._failed, self._on_progress = failed, on_progress
        self._asking: dict[str, threading.Thread] = {}
        self._silent: dict[str, DatasyncError] = {}

    @contextlib.contextmanager
    def asked(self) -> Iterator[None]:
        """Have the destinations asked what they can do while the block looks at the source."""

        def ask(place: str, store: Store) -> None:
            try:
                retrying(store.abilities)
            except DatasyncError as error:
                self._silent[place] = error  # told when it is opened

        for item in self._to.items():
            self._asking[item[0]] = threading.Thread(target=inheriting(ask), args=item, daemon=True)
        for thread in self._asking.values():
            thread.start()
        try:
            yield
        finally:
            for thread in self._asking.values():
                thread.join(LAG_SECONDS)

    def all(self, late: Callable[[Destination], None]) -> tuple[list[Destination], list[threading.Thread]]:
        """Every destination that can be worked at.

        One that takes much longer than the first is given to `late`, in a thread of its own; those threads
        are returned too.
        """
        opened: dict[str, Destination] = {}
        answered: set[str] = set()
        began: list[bool] = []

        def begin(place: str, store: Store) -> None:
            destination = self._open(place, store)
            with self._turn:
                answered.add(place)
                self._turn.notify_all()
                if not began:
                    if destination is not None:
                        opened[place] = destination
                    return
            if destination is not None:
                late(destination)

        threads = {
            place: threading.Thread(target=inheriting(begin), args=(place, store))
            for place, store in self._to.items()
        }
        for thread in threads.values():
            thread.start()
        until: float | None = None
        with self._turn:
            while len(answered) < len(threads) and (until is None or time.monotonic() < until):
                self._turn.wait(0.2)
                if opened and until is None:
                    until = time.monotonic() + LAG_SECONDS
            began.append(True)
        ready = [opened[place] for place in self._to if place in opened]
        return ready, [threads[place] for place in self._to if place not in answered]

    def _open(self, place: str, store: Store) -> Destination | None:
        """A destination under its lease, or None with its error told."""
        try:
            self._asking[place].join()
            if place in self._silent:
                raise self._silent[place]
            return open_destination(
                place,
                store,
                command=f"replicate {self._name}",
                turn=self._turn,
                stop=self._stop,
                read_back=self._options.verify == "full" or not store.abilities().crc32c,
                retry_seconds=self._options.retry_seconds,
                ttl=self._options.lease_seconds,
                on_progress=partial(self._on_progress, place),
            )
        except DatasyncError as error:
            self._failed(place, error)
        except Exception as error:  # a defect must not pass for success because a thread ended with it
            log.exception("%s: %s", place, self._name)
            self._failed(place, StoreError(f"{place}: {type(error).__name__}: {error}"))
        return None
