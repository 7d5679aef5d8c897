"""What a job has done, kept at its destination, so that it can be gone on with from any machine.

    _datasync/jobs/<job>/job.json             what the job is; written before its first task runs
    _datasync/jobs/<job>/files                what it reads (shards.appended)
    _datasync/jobs/<job>/tasks/000007.json    task 7 is finished: the entries of its shards
    _datasync/jobs/<job>/runs/…               rows on their way through a shuffle (shards.shuffle)
    _datasync/jobs/<job>/done.json            the index is published; the records of tasks go

A job is named by a digest of its input and its options: another input or other options are another job, and
the records of one cannot be taken for those of the other. A record is written when the shards that it names
are stored, in one write, so a task is finished or it never was (invariant 9).

`datasync gc` removes nothing where a job has begun. One that begins while gc is at work lets it end first:
each writes down what it does before it looks for the other, so one of them sees the other.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from shards.errors import FormatError, NotFoundError
from shards.sink import Sink

JOBS = "_datasync/jobs/"
_LEASE = "_datasync/lease.json"
_AT_ONCE = 16
_LOOK_SECONDS = 1.0

log = logging.getLogger(__name__)


class Journal:
    """The journal of one job.

    Args:
        sink (Sink): The destination.
        job (str): The job's name.
    """

    def __init__(self, sink: Sink, job: str) -> None:
        self._sink = sink
        self.job = job
        self._folder = f"{JOBS}{job}/"

    def begin(self, description: dict[str, Any]) -> None:
        """Write down what the job is."""
        self._write("job.json", description)

    def keep_files(self, files: Callable[[], bytes]) -> None:
        """Write down what it reads, unless that has been done."""
        key = f"{self._folder}files"
        try:
            self._sink.stat(key)
        except NotFoundError:
            self._sink.write(key, files())

    def description(self) -> dict[str, Any] | None:
        """What `begin` wrote; None if there is no such job."""
        return read_json(self._sink, f"{self._folder}job.json")

    def done(self) -> dict[str, Any] | None:
        """What `finish` wrote; None if the job is not finished."""
        return read_json(self._sink, f"{self._folder}done.json")

    def record(self, number: int, record: dict[str, Any]) -> None:
        """Task `number` is finished."""
        self._write(f"tasks/{number:06d}.json", record)

    def records(self) -> dict[int, dict[str, Any]]:
        """The record of every finished task, by number, in order."""
        keys = [info.key for info in listing(self._sink, f"{self._folder}tasks/")]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found = pool.map(lambda key: read_json(self._sink, key), keys)
            return {
                int(key[-11:-5]): record
                for key, record in zip(keys, found, strict=True)
                if record is not None
            }

    def forget(self, numbers: Iterable[int]) -> None:
        """These tasks are not finished after all."""
        self._sink.delete([f"{self._folder}tasks/{number:06d}.json" for number in numbers])

    def finish(self, summary: dict[str, Any]) -> None:
        """The job is published: keep a summary in place of the records."""
        self._write("done.json", summary)
        for part in ("tasks/", "runs/"):
            self._sink.delete([info.key for info in listing(self._sink, self._folder + part)])

    def drop(self) -> None:
        """Remove every trace of the job."""
        self._sink.delete([info.key for info in listing(self._sink, self._folder)])

    def _write(self, name: str, value: dict[str, Any]) -> None:
        self._sink.write(f"{self._folder}{name}", json.dumps(value, sort_keys=True).encode())


def let_removal_end(sink: Sink, *, clock: Callable[[], float] = time.monotonic) -> None:
    """Wait while `datasync gc` removes old versions at `sink`: they may hold shards that a job writes anew.

    A gc that was killed leaves its lease: one that is not renewed in its time to live is not waited for.
    """
    seen: dict[str, Any] | None = None
    since = clock()
    while True:
        lease = read_json(sink, _LEASE)
        holder = (lease or {}).get("holder") or {}
        if lease is None or not str(holder.get("command", "")).startswith("gc "):
            return
        if lease != seen:
            if seen is None:
                log.warning("%s: old versions are being removed there; that is waited for", sink.url)
            seen, since = lease, clock()
        elif clock() - since > float(lease.get("ttl", 0)):
            return
        time.sleep(_LOOK_SECONDS)


def jobs(sink: Sink) -> list[str]:
    """The names of all jobs that have a journal at `sink`."""
    return sorted({info.key[len(JOBS) :].partition("/")[0] for info in listing(sink, JOBS)})


def read_json(sink: Sink, key: str) -> dict[str, Any] | None:
    """A small JSON object; None if it is not there."""
    try:
        value = json.loads(sink.read(key))
    except NotFoundError:
        return None
    except ValueError as error:
        raise FormatError(
            f"{key} in {sink.url} is damaged: {error}", mend="delete it and run again"
        ) from error
    return value if isinstance(value, dict) else None


def listing(sink: Sink, prefix: str) -> Iterator[Any]:
    """`sink.list`, where a destination that does not exist yet is empty."""
    try:
        yield from sink.list(prefix)
    except NotFoundError:
        return
