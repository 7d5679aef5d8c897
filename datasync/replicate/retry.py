"""The one place where an operation on a store is tried again, and why.

Again, after a growing pause with jitter, until a deadline since the first failure: `TransientError` (resets,
timeouts, 5xx, short bodies) and `ThrottledError` (503 SlowDown, 429). The deadline counts from the first
failure and not from the start, so a long transfer that keeps moving is never cut off.

Not again: everything else. A refusal, a missing object, a wrong digest or a changed object has a caller that
knows better.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from datasync.errors import TransientError

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_SECONDS = 120.0
_FIRST, _LONGEST = 0.2, 15.0


class Stopped(Exception):
    """The run was asked to stop (deadline, signal, lost lease)."""


def retrying(
    operation: Callable[[], T], *, seconds: float = RETRY_SECONDS, stop: threading.Event | None = None
) -> T:
    """Run `operation` until it succeeds or fails for good.

    Args:
        operation (Callable[[], T]): Safe to run again.
        seconds (float): How long to go on after the first failure. Default: ``120``.
        stop (threading.Event | None): Ends the pauses early. Default: ``None``.

    Raises:
        TransientError: It still failed after `seconds`.
        Stopped: `stop` was set between two tries.
    """
    failed_at: float | None = None
    pause = _FIRST
    while True:
        try:
            return operation()
        except TransientError as error:
            now = time.monotonic()
            failed_at = now if failed_at is None else failed_at
            if now - failed_at + pause > seconds:
                raise
            log.info("trying again in %.1f s: %s", pause, error.message)
        wait = pause * random.uniform(0.5, 1.0)
        if stop is None:
            time.sleep(wait)
        elif stop.wait(wait):
            raise Stopped
        pause = min(pause * 2, _LONGEST)
