"""Ending a run cleanly: on SIGTERM or SIGINT, and at a deadline.

What is being written is finished, the journal is written, the lease is given back. A second SIGINT ends at
once, and a place that stays silent is not waited for longer than `GRACE_SECONDS`: a run may be killed at any
instant, so then it ends itself. Even so a later run goes on where this one was.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasync.replicate.run import Stop

GRACE_SECONDS = 30.0


@contextlib.contextmanager
def stop_on_signals(stop: Stop, *, last_words: Callable[[], None] | None = None) -> Iterator[None]:
    """Turn SIGTERM and the first SIGINT into a request to stop, within the block. Main thread only.

    Args:
        stop (Stop): What the run looks at.
        last_words (Callable | None): Called before the process is ended, if the run does not end by itself.
    """
    ended = threading.Event()

    def watch() -> None:
        while not stop.event.wait(0.5):
            if ended.is_set():
                return
        if not ended.wait(GRACE_SECONDS):
            _end_now(stop, last_words)

    threading.Thread(target=watch, name="grace", daemon=True).start()

    def ask(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and stop.event.is_set():
            raise KeyboardInterrupt
        stop.ask(f"by {signal.Signals(number).name}", 128 + number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        ended.set()
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_now(stop: Stop, last_words: Callable[[], None] | None) -> None:
    """End the process as SIGKILL would, but with a word and the code of the stop."""
    sys.stderr.write(
        f"stopped: {stop.reason}; after {GRACE_SECONDS:.0f} s what was under way had still not ended and was"
        " left as it is: a place is silent or slow; run the same command again to continue\n"
    )
    sys.stderr.flush()
    try:
        if last_words is not None:
            last_words()
    finally:
        os._exit(stop.exit_code)


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
