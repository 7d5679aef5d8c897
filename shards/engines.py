"""Where tasks run: in this process, in worker processes, on a Ray cluster; the same code, the same bytes.

An engine takes numbered tasks, runs each, and calls `on_record` with its record once that is in the journal.
A task whose process died, or whose store did not answer, is tried again, three times in all; then the job
fails with that error. An error of the data or the user ends the job at once. Whatever ends it, no worker is
left.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.connection import wait
from typing import Any

from shards.errors import DatasyncError, TransientError, UsageError
from shards.plan import Job, load_transform
from shards.sources.base import Task
from shards.task import run_task
from shards.worker import Worker

TRIES = 3
_log = logging.getLogger(__name__)

Tasks = Iterator[tuple[int, Task]]
OnRecord = Callable[[int, Task, dict[str, Any]], None]
OnRows = Callable[[int, int, int], None]


def default_workers() -> int:
    """One worker for each CPU that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_here(job: Job, tasks: Tasks, on_record: OnRecord, on_rows: OnRows) -> None:
    """Run tasks one after the other in this process."""
    for number, task in tasks:
        for attempt in range(1, TRIES + 1):
            try:
                record = run_task(job, number, task, partial(on_rows, number))
                break
            except Exception as error:
                if not _again(error, number, attempt):
                    raise
                time.sleep(_pause(attempt))
        on_record(number, task, record)


def run_local(job: Job, tasks: Tasks, on_record: OnRecord, on_rows: OnRows, *, workers: int) -> None:
    """Run tasks in `workers` processes."""
    pool = _Pool(job, workers)
    try:
        pool.run(tasks, on_record, on_rows)
    finally:
        pool.stop()


class _Pool:
    """Worker processes and what each of them is at."""

    def __init__(self, job: Job, workers: int) -> None:
        self._job = job
        self._limit = workers
        self._workers: list[Worker] = []
        self._again: deque[tuple[int, Task]] = deque()
        self._tries: dict[int, int] = {}
        self._running: dict[int, Task] = {}

    def run(self, tasks: Tasks, on_record: OnRecord, on_rows: OnRows) -> None:
        while True:
            self._fill(tasks)
            if not self._running:
                return
            ready = wait([worker.connection for worker in self._workers])
            for worker in [worker for worker in self._workers if worker.connection in ready]:
                self._hear(worker, on_record, on_rows)

    def _fill(self, tasks: Tasks) -> None:
        """Give every idle worker a task, starting workers while there are more tasks than workers."""
        while True:
            idle = next((worker for worker in self._workers if worker.number is None), None)
            if idle is None and len(self._workers) >= self._limit:
                return
            following = self._again.popleft() if self._again else next(tasks, None)
            if following is None:
                return
            if idle is None:
                idle = Worker()
                self._workers.append(idle)
                idle.send(("job", self._job))
            number, task = following
            idle.number = number
            self._running[number] = task
            self._tries[number] = self._tries.get(number, 0) + 1
            idle.send(("task", number, task))  # a worker that is gone is found by `wait`

    def _hear(self, worker: Worker, on_record: OnRecord, on_rows: OnRows) -> None:
        try:
            what, number, value = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            self._died(worker)
            return
        if what == "rows":
            on_rows(number, *value)
            return
        if worker.number == number:
            worker.number = None
        if what == "made":
            worker.storing.add(number)
            return
        worker.storing.discard(number)
        task = self._running.pop(number)
        if what == "done":
            self._tries.pop(number, None)
            on_record(number, task, value)
        elif _again(value, number, self._tries[number]):
            time.sleep(_pause(self._tries[number]))
            self._again.append((number, task))
        else:
            raise value

    def _died(self, worker: Worker) -> None:
        """Put its tasks back, unless one has had its tries."""
        worker.stop()
        self._workers.remove(worker)
        code = worker.process.returncode
        blamed = worker.storing if worker.number is None else {worker.number}
        for number in sorted(worker.storing | blamed):
            if number not in blamed:
                self._tries[number] -= 1
            elif self._tries[number] >= TRIES:
                raise DatasyncError(
                    f"task {number} ended its worker {TRIES} times (last exit status {code})",
                    mend="look for a lack of memory; --workers 1 and a smaller --size-limit need less",
                )
            _log.warning("a worker died at task %d (exit status %s); trying it again", number, code)
            self._again.append((number, self._running.pop(number)))

    def stop(self) -> None:
        for worker in self._workers:
            worker.stop()


def _again(error: BaseException, number: int, tries: int) -> bool:
    """Whether a failed task is worth another try; says so in the log."""
    if not _passing(error):
        return False
    if tries >= TRIES:
        if isinstance(error, DatasyncError):
            return False
        raise DatasyncError(
            f"task {number} failed {TRIES} times: {type(error).__name__}: {error}",
            mend="check that the source and the destination can be reached and have space, then run again",
        ) from error
    _log.warning("task %d: %s; trying it again", number, error)
    return True


def _passing(error: BaseException) -> bool:
    """Whether an error is of a store or a device that may answer the next time."""
    if isinstance(error, TransientError):
        return True
    if isinstance(error, DatasyncError):
        return False
    of_a_client = type(error).__module__.partition(".")[0] in (
        "botocore",
        "aiobotocore",
        "aiohttp",
        "asyncio",
    )
    return of_a_client or (isinstance(error, OSError) and error.errno is not None)


def _pause(tries: int) -> float:
    return float(min(2 ** (tries - 1), 10))


def run_ray(
    job: Job, tasks: Tasks, on_record: OnRecord, on_rows: OnRows, *, address: str | None, workers: int
) -> None:
    """Run tasks on the Ray cluster at `address`, or on one that is started here for this job."""
    try:
        import ray
    except ImportError as error:
        raise UsageError("--engine ray needs Ray", mend="pip install 'datasync[ray]'") from error
    started = not ray.is_initialized()
    if started:
        _start_ray(ray, address, workers)
    try:
        _run_on_ray(ray, job, tasks, on_record, on_rows, workers if address is None else None)
    finally:
        if started:
            ray.shutdown()


def _start_ray(ray: Any, address: str | None, workers: int) -> None:
    if address is not None:
        _check_reachable(address)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        if address is None:
            ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        else:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise DatasyncError(
            f"the Ray cluster at {address or 'this machine'} cannot be reached: {error}",
            mend="check --address",
        ) from error


def _check_reachable(address: str) -> None:
    """Ray itself tries for minutes before it says that nothing is there."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return  # auto, local, a name that Ray resolves
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise DatasyncError(
            f"the Ray cluster at {address} cannot be reached: {error.strerror or error}",
            mend="check --address",
        ) from error


def _run_on_ray(
    ray: Any, job: Job, tasks: Tasks, on_record: OnRecord, on_rows: OnRows, limit: int | None
) -> None:
    """Keep the cluster's CPUs busy; Ray itself repeats a task whose worker or node died."""
    remote = ray.remote(num_cpus=1, max_retries=TRIES - 1)(run_task)
    shared = ray.put(_with_code(ray, job))
    at_once = limit or max(int(ray.cluster_resources().get("CPU", 1)), 1) * 2
    running: dict[Any, tuple[int, Task]] = {}
    tries: dict[int, int] = {}
    try:
        while True:
            while len(running) < at_once and (following := next(tasks, None)) is not None:
                running[remote.remote(shared, *following)] = following
            if not running:
                return
            ready, _ = ray.wait(list(running), num_returns=1)
            number, task = running.pop(ready[0])
            tries[number] = tries.get(number, 0) + 1
            try:
                record = ray.get(ready[0])
            except ray.exceptions.RayTaskError as error:
                if not _again(error.cause, number, tries[number]):
                    raise (error.cause if isinstance(error.cause, DatasyncError) else error) from None
                time.sleep(_pause(tries[number]))
                running[remote.remote(shared, number, task)] = number, task
                continue
            except ray.exceptions.RayError as error:
                raise DatasyncError(
                    f"task {number} ended its worker or its node {TRIES} times: {str(error).splitlines()[0]}",
                    mend="look for a lack of memory, or run again when the cluster is well",
                ) from error
            on_rows(number, record["rows"], 0)
            on_record(number, task, record)
    finally:
        for reference in running:
            ray.cancel(reference, force=True)


def _with_code(ray: Any, job: Job) -> Job:
    """The job with the code of its transform in it: the user's module is on this machine alone."""
    function = load_transform(job.options.transform)
    if function is None:
        return job
    module = sys.modules.get(getattr(function, "__module__", ""))
    if module is not None:
        ray.cloudpickle.register_pickle_by_value(module)
    return replace(job, options=replace(job.options, transform=function))
