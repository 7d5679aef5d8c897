"""A worker process: takes a job, then task after task, over a pipe; says how it goes.

    to the worker      ("job", Job) once, then ("task", number, Task) each time, None to end
    from the worker    ("rows", number, (rows, bytes)), ("made", number, None) when it can take the next task,
                       then ("done", number, record) or ("failed", number, error) when all of it is stored

It is a fresh interpreter and not a fork, so that threads, locks and clients of the parent cannot follow it,
and the user's main program is not run again. It ends when its parent does, however that ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

_ENVIRONMENT = {
    # Each shard takes as much memory as the one before: giving it back in between costs page faults.
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),  # Python and zstd, by glibc
    "MIMALLOC_PURGE_DELAY": "-1",  # Arrow
    # There is a worker for each CPU: threads of its own for NumPy would only take turns.
    "OPENBLAS_NUM_THREADS": "1",
}

_CODE = "import sys; sys.path[:] = {path!r}; from shards.worker import main; main({task}, {life})"


class Worker:
    """A worker as its parent sees it."""

    def __init__(self) -> None:
        # Tasks and answers share one duplex pipe; the other exists so that the worker sees the parent die.
        from multiprocessing import Pipe

        self.connection, theirs = Pipe()
        read_end, self._life = os.pipe()
        code = _CODE.format(path=sys.path, task=theirs.fileno(), life=read_end)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            pass_fds=(theirs.fileno(), read_end),
            stdin=subprocess.DEVNULL,
            env=_ENVIRONMENT | os.environ,
        )
        theirs.close()
        os.close(read_end)
        self.number: int | None = None  # the task that it makes
        self.storing: set[int] = set()  # the tasks that it has made and not stored yet

    def send(self, message: Any) -> bool:
        """Send a message; False if the worker is gone."""
        try:
            self.connection.send(message)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def stop(self) -> None:
        """End it now."""
        self.process.kill()
        self.process.wait()
        self.connection.close()
        os.close(self._life)


def main(task_handle: int, life_handle: int) -> None:
    """What the worker process runs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent decides
    threading.Thread(target=_watch, args=(life_handle,), daemon=True).start()
    connection = Connection(task_handle)
    from shards.storing import Storing
    from shards.task import make_task

    told = threading.Lock()

    def tell(what: str, number: int, value: Any) -> None:
        with told:
            connection.send((what, number, value))

    def tell_rows(number: int, rows: int, size: int) -> None:
        tell("rows", number, (rows, size))

    def tell_outcome(number: int, outcome: Future[dict[str, Any]]) -> None:
        error = outcome.exception()
        if error is None:
            tell("done", number, outcome.result())
        else:
            tell("failed", number, _portable(error))

    job = None
    storing = Storing()
    while (message := _receive(connection)) is not None:
        if message[0] == "job":
            job = message[1]
            continue
        _, number, task = message
        assert job is not None
        try:
            outcome = make_task(job, number, task, storing, partial(tell_rows, number))
        except BaseException as error:  # noqa: BLE001  the parent raises it
            tell("failed", number, _portable(error))
            continue
        tell("made", number, None)
        outcome.add_done_callback(partial(tell_outcome, number))


def _receive(connection: Connection) -> Any:
    try:
        return connection.recv()
    except EOFError:
        return None


def _portable(error: BaseException) -> BaseException:
    """An error that the parent can unpickle, with its trace as a note."""
    import pickle
    import traceback

    from shards.errors import DatasyncError

    if isinstance(error, DatasyncError):
        return error
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  any error class may fail to pickle in its own way
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note("".join(traceback.format_exception(error)))
    return error


def _watch(handle: int) -> None:
    """Wait until the parent's end of the pipe closes, which it does when the parent ends, and end too."""
    os.read(handle, 1)
    os._exit(1)
