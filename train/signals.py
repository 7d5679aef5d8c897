"""Stop when asked, at a step's end, with everything saved.

The first SIGTERM, SIGINT or SIGUSR1 is noted; at the next vote all ranks learn of it, save together and exit
with 128 + its number, which schedulers take as "run me again". A second one is obeyed at once, unless it
comes within a second of the first: a terminal and a launcher that both pass on one Ctrl-C are one request.
DataLoader workers ignore all three: whoever signals the whole group must not take the data away from a rank
that is still to save.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

KINDS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
ECHO_S = 1.0
"""Signals this soon after the first are echoes of it."""


class StopRequest:
    """Whether somebody asked this process to stop; `votes` is one number for each kind of signal."""

    def __init__(self) -> None:
        self.votes = [0] * len(KINDS)
        self._first = 0.0
        self._before = {kind: signal.signal(kind, self._note) for kind in KINDS}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if any(self.votes):
            if time.monotonic() - self._first > ECHO_S:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        self._first = time.monotonic()
        self.votes[KINDS.index(signal.Signals(number))] = 1

    def restore(self) -> None:
        """Put back what handled these signals before."""
        for kind, handler in self._before.items():
            signal.signal(kind, handler)


def agreed(votes: list[int]) -> signal.Signals | None:
    """The signal that any rank received, from the summed votes."""
    return next((kind for kind, count in zip(KINDS, votes, strict=True) if count), None)


def ignore_in_worker(worker: int) -> None:
    """`worker_init_fn` of the DataLoader."""
    for kind in KINDS:
        signal.signal(kind, signal.SIG_IGN)
