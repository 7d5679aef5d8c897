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
from datasync.storage.retry import one_thing

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_SECONDS = 120.0
_FIRST, _LONGEST = 0.2, 15.0


class Stopped(Exception):
    """The run was asked to stop (deadline, signal, lost lease)."""


def retrying(
    operation: Callable[[], T], *, seconds: float | None = None, stop: threading.Event | None = None
) -> T:
    """Run `operation` until it succeeds or fails for good.

    Args:
        operation (Callable[[], T]): Safe to run again.
        seconds (float | None): How long to go on after the first failure; not longer than this thread is
            patient (`storage.retry.patient`). Default: as long as that, else ``120``.
        stop (threading.Event | None): Ends the pauses early. Default: ``None``.

    Raises:
        TransientError: It still failed after `seconds`.
        Stopped: `stop` was set between two tries.
    """
    failed_at: float | None = None
    pause = _FIRST
    with one_thing(seconds, stop, default=RETRY_SECONDS) as patience:
        while True:
            try:
                return operation()
            except TransientError as error:
                if stop is not None and stop.is_set():
                    raise Stopped from error
                patience.failed()
                now = time.monotonic()
                failed_at = now if failed_at is None else failed_at
                if now - failed_at + pause > patience.seconds or not patience.allows(pause):
                    raise
                log.info("trying again in %.1f s: %s", pause, error.message)
            patience.sleep(pause * random.uniform(0.5, 1.0))
            if stop is not None and stop.is_set():
                raise Stopped
            pause = min(pause * 2, _LONGEST)
