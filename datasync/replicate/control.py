"""Ending a run cleanly: on SIGTERM or SIGINT, and at a deadline.

What is being written is finished, the journal is written, the lease is given back. A second SIGINT ends at
once. A server that stays silent is not waited for longer than `LAST_SECONDS`, and whatever else does not end,
say a dead mount, not longer than `GRACE_SECONDS`: a run may be killed at any instant, so then it ends itself.
Even so a later run goes on where this one was.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

from datasync.replicate.retry import RETRY_SECONDS
from datasync.storage.retry import LAST_SECONDS, patient

if TYPE_CHECKING:
    from datasync.replicate.options import Stop

GRACE_SECONDS = 30.0
_LOOK_SECONDS = 0.5


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
        from datasync.storage.http1 import cut_silent

        until = time.monotonic() + GRACE_SECONDS
        while not ended.wait(_LOOK_SECONDS):
            cut_silent(LAST_SECONDS)
            if time.monotonic() > until:
                _end_now(stop, last_words)

    threading.Thread(target=watch, name="grace", daemon=True).start()

    def ask(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and stop.event.is_set():
            raise KeyboardInterrupt
        stop.ask(f"by {signal.Signals(number).name}", 128 + number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with patient(RETRY_SECONDS, stop.event):
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
