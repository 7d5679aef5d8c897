"""Ending a run cleanly: on SIGTERM or SIGINT, and at a deadline.

What is being written is finished, the journal is written, the lease is given back. A second SIGINT ends at
once; even then a later run goes on where this one was.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasync.replicate.run import Stop


@contextlib.contextmanager
def stop_on_signals(stop: Stop) -> Iterator[None]:
    """Turn SIGTERM and the first SIGINT into a request to stop, within the block. Main thread only."""

    def ask(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and stop.event.is_set():
            raise KeyboardInterrupt
        stop.ask(f"by {signal.Signals(number).name}", 128 + number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def stop_after(stop: Stop, seconds: float | None) -> Iterator[None]:
    """Ask to stop after so many seconds; None is never."""
    if seconds is None:
        yield
        return
    timer = threading.Timer(seconds, lambda: stop.ask(f"after {seconds:g} s (--max-runtime)", 4))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
