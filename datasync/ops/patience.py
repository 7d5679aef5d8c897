"""An answer within a time, or none: for commands that people and job scripts wait for.

A store itself is patient: it tries again, and gives up a connection only after a minute of silence. Who asks
whether something is there wants to hear "it does not answer" sooner.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from datasync.errors import TransientError
from datasync.storage.retry import patient

T = TypeVar("T")

ANSWER_SECONDS = 20.0


def within(seconds: float, ask: Callable[[], T], *, where: str) -> T:
    """What `ask` returns or raises, if it does within `seconds`; its thread is left behind otherwise.

    Raises:
        TransientError: There was no answer in time.
    """
    answer: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            with patient(seconds):
                answer.append(ask())
        except BaseException as error:  # noqa: BLE001  the caller raises it
            failure.append(error)

    thread = threading.Thread(target=run, name="question", daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if not answer:
        raise TransientError(
            f"{where} did not answer within {seconds:.0f} s", mend="check the network to it and the server"
        )
    return answer[0]
