"""The job: a corpus in, a dataset out.

    list files ─► kind of source ─► columns ─► tasks ─► engine ─► records in the journal ─► commit
                                                  │                       ▲
                                                  └── finished ones are passed over

Everything before the engine is a function of the input and the options. A job that is killed at any instant
and run again goes on behind its last finished task and ends with the same bytes (invariants 3 and 9).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shards import appended, commit, engines
from shards.errors import ConflictError, FormatError, UsageError
from shards.find import Found, find
from shards.journal import Journal, jobs, let_removal_end, listing
from shards.options import ConvertOptions
from shards.outcome import (
    ConvertResult,
    as_json,
    nothing_new,
    prefix_of,
    shard_files,
    summarize,
    to_result,
)
from shards.plan import Job, job_name
from shards.progress import Progress
from shards.shuffle import buckets_of
from shards.sink import LocalSink, Sink
from shards.sources import Task
from shards.task import QUARANTINE

__all__ = ["ConvertResult", "convert", "merge"]


# Below this, starting processes costs more than it saves.
_SMALL = 16 << 20


def convert(
    source: str | Path | Sequence[str | Path],
    out: str | Path | Sink,
    *,
    storage_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> ConvertResult:
    """Turn a corpus into a dataset of MDS shards.

    Args:
        source (str | Path | Sequence[str | Path]): Files, folders, globs or URLs.
        out (str | Path | Sink): A folder, or a store.
        storage_options (Mapping[str, Any] | None): What fsspec needs to read `source`. Default: ``None``.
        **options (Any): Fields of `ConvertOptions`.

    Raises:
        UsageError: An option, the source or the destination is wrong; nothing was written.
        DatasyncError: The source or a store failed, or a row is bad. What was finished is kept: run again.
    """
    started = time.monotonic()
    asked = ConvertOptions(**options)
    sink = LocalSink(out) if isinstance(out, str | Path) else out
    refuse_nesting([source] if isinstance(source, str | Path) else source, sink)
    before = {split: commit.current(sink, prefix_of(split)) for split in asked.split or [""]}
    known = None
    if asked.append:
        _settle(sink, before)
        known = appended.read_known(sink, before)
    first = source if isinstance(source, str | Path) else next(iter(source), "")
    try:
        with Progress(f"look at {os.path.basename(os.fspath(first).rstrip('/'))}", quiet=asked.quiet):
            found = find(source, asked, storage_options=storage_options, known=known)
    except appended.NothingNew:
        return replace(nothing_new(sink, before), seconds=time.monotonic() - started)
    run = _Run(found, asked, sink, before)
    finished = run.finished()
    if finished is not None:
        return replace(finished, seconds=time.monotonic() - started)
    run.tasks()
    result = run.result() if asked.task is not None else run.commit()
    return replace(result, seconds=time.monotonic() - started)


def merge(out: str | Path | Sink) -> ConvertResult:
    """Commit the job at `out` whose tasks were run with `task=(i, n)`.

    Raises:
        UsageError: There is no such job, or more than one.
        FormatError: Some of its tasks are not finished.
    """
    started = time.monotonic()
    sink = LocalSink(out) if isinstance(out, str | Path) else out
    open_jobs = [name for name in jobs(sink) if Journal(sink, name).done() is None]
    described = {name: Journal(sink, name).description() for name in open_jobs}
    waiting = {name: description for name, description in described.items() if description is not None}
    if not waiting:
        raise UsageError(
            f"{sink.url} has no job that waits for a merge", mend="run datasync shard --task i/n first"
        )
    complete = {
        name: description
        for name, description in waiting.items()
        if len(Journal(sink, name).records()) == description["tasks"]
    }
    if len(complete) != 1:
        name, description = next(iter(complete.items() or waiting.items()))
        if complete:
            raise UsageError(
                f"{sink.url} has {len(complete)} jobs that could be merged", mend="run one of them again"
            )
        done = Journal(sink, name).records().keys()
        missing = [number for number in range(description["tasks"]) if number not in done]
        raise FormatError(
            f"{len(missing):,} of {description['tasks']:,} tasks are not finished, the first is {missing[0]}",
            mend="run the missing shares again: datasync shard … --task i/n",
        )
    name, description = next(iter(complete.items()))
    journal = Journal(sink, name)
    result = _commit(sink, journal, description, journal.records())
    return replace(result, seconds=time.monotonic() - started)


def refuse_nesting(sources: Sequence[str | Path], sink: Sink) -> None:
    """Refuse a destination inside the source: the next run would take its shards for corpus."""
    for source in sources:
        folder = os.path.abspath(source)
        if os.path.isdir(folder) and f"{sink.url}/".startswith(f"{folder}/"):
            raise UsageError(
                f"the destination {sink.url} lies inside the source {folder}",
                mend="choose a folder beside it",
            )


def _settle(sink: Sink, before: Mapping[str, commit.Current]) -> None:
    """Close the journals of jobs that were killed between publishing and saying so."""
    there = {
        split: [shard.stored.basename for shard in now.index.shards] if now.index is not None else []
        for split, now in before.items()
    }
    for name in jobs(sink):
        journal = Journal(sink, name)
        description = journal.description()
        if description is None or journal.done() is not None or set(description["splits"]) != set(there):
            continue
        records = journal.records()
        made = {
            split: [commit.stored_name(entry) for entry in commit.entries_of(records, split)]
            for split in there
        }
        whole = len(records) == description["tasks"] and any(made.values())
        if description["append"]:
            published = all(set(made[split]) <= set(there[split]) for split in there)
        else:
            published = made == there
        if whole and published:
            _commit(sink, journal, description, records, before)


class _Run:
    """One run of a job."""

    def __init__(
        self, found: Found, options: ConvertOptions, sink: Sink, before: Mapping[str, commit.Current]
    ) -> None:
        self._found = found
        self._options = options
        self._sink = sink
        self._ran = 0
        name = job_name(found.files, options, found.kind.name, found.schema)
        self._journal = Journal(sink, name)
        self._splits = list(options.split) or [""]
        self._before = before
        self._name = name
        self._buckets = 0
        if options.shuffle_seed is not None:
            self._buckets = max(1, -(-int(found.sizes.sum()) // options.limit_bytes))
        self._pending = False

    def finished(self) -> ConvertResult | None:
        """The result of the run that did all this, if there was one and its dataset is still there."""
        done = self._journal.done()
        if done is None:
            return None
        for split, version in done["versions"].items():
            before = self._before[split].index
            if before is None:
                return None
            if self._options.append:
                names = {shard.stored.basename for shard in before.shards}
                if not names.issuperset(done["shards"][split]):
                    return None
            elif before.extra.get("version") != version:
                return None
        return to_result(self._sink, self._name, done, (), finished=True, notes=self._found.notes)

    def tasks(self) -> None:
        """Run what is not finished yet; where rows are shuffled, in two rounds."""
        found, options = self._found, self._options
        description = self._begin()
        self._journal.keep_files(partial(appended.identities, found.files))
        buckets = self._buckets
        job = Job(
            name=self._name,
            source=found.kind.name,
            schema=found.schema,
            known=found.known,
            strict=found.strict,
            options=options,
            sink=self._sink,
            root=found.files.root,
            storage_options=found.files.storage_options,
            buckets=buckets,
            first=description["first"],
        )
        done = self._usable_records()
        self._round(job, f"shard {found.label}", 0, found.sizes, found.source.tasks(), done)
        if buckets:
            records = self._journal.records()
            self._pending = any(number not in records for number in range(found.tasks))
        if buckets and not self._pending:
            scattered = {number: records[number] for number in range(found.tasks)}
            tasks = [
                Task(payload=bucket, bytes=bucket.bytes)
                for bucket in buckets_of(scattered, buckets, self._splits)
            ]
            sizes = np.array([task.bytes for task in tasks], np.int64)
            self._round(job, f"shuffle {found.label}", found.tasks, sizes, tasks, done)

    def _round(
        self,
        job: Job,
        label: str,
        first: int,
        sizes: np.ndarray[Any, np.dtype[np.int64]],
        tasks: Iterable[Task],
        done: Mapping[int, Mapping[str, Any]],
    ) -> None:
        """Run those of `tasks` that are ours and not done; `first` is the number of the first of them."""
        mine = [number for number in range(first, first + len(sizes)) if self._is_mine(number)]
        weight = {number: int(sizes[number - first]) for number in mine}
        todo = {number for number in mine if number not in done}
        total = sum(weight.values())
        with Progress(label, total_bytes=total, unit="rows", quiet=self._options.quiet) as progress:
            for number in mine:
                if number in done:
                    progress.advance(bytes=weight[number], items=done[number]["rows"])

            raw = stored = 0
            told: dict[int, int] = {}  # task -> bytes that were counted before it is done

            def on_record(number: int, task: Task, record: dict[str, Any]) -> None:
                nonlocal raw, stored
                self._ran += 1
                for entry in (entry for entries in record["shards"].values() for entry in entries):
                    raw += entry["shard"]["raw_data"]["bytes"]
                    stored += (entry["shard"]["zip_data"] or entry["shard"]["raw_data"])["bytes"]
                ratio = f"{raw / stored:.2f}x" if stored else ""
                progress.advance(bytes=task.bytes - told.pop(number, 0), note=ratio)

            def on_rows(number: int, rows: int, size: int) -> None:
                before = told.get(number, 0)
                told[number] = min(before + size, weight[number])
                progress.advance(bytes=told[number] - before, items=rows)

            pending = ((number, task) for number, task in enumerate(tasks, first) if number in todo)
            self._engine(job, pending, len(todo), sum(weight[number] for number in todo), on_record, on_rows)

    def _engine(
        self,
        job: Job,
        tasks: Iterator[tuple[int, Task]],
        count: int,
        size: int,
        on_record: engines.OnRecord,
        on_rows: engines.OnRows,
    ) -> None:
        options = self._options
        workers = options.workers or engines.default_workers()
        if count == 0:
            return
        if options.engine == "ray":
            engines.run_ray(job, tasks, on_record, on_rows, address=options.address, workers=workers)
        elif count == 1 or workers == 1 or (options.workers is None and size < _SMALL):
            engines.run_here(job, tasks, on_record, on_rows)
        else:
            engines.run_local(job, tasks, on_record, on_rows, workers=min(workers, count))

    def _begin(self) -> dict[str, Any]:
        """The description of the job: as an earlier run wrote it, or written now."""
        description = self._journal.description()
        if description is not None and self._journal.done() is None:
            return description
        self._check_destination()
        description = {
            "job": self._name,
            "source": self._found.label_url,
            "kind": self._found.kind.name,
            "tasks": self._found.tasks + self._buckets * len(self._splits),
            "input_bytes": int(self._found.sizes.sum()),
            "splits": self._splits,
            "columns": self._found.schema.encodings,
            "append": self._options.append,
            "first": self._first_ordinal(),
        }
        self._journal.drop()
        self._journal.begin(description)
        let_removal_end(self._sink)
        return description

    def _check_destination(self) -> None:
        """Refuse to publish over a dataset made from something else, and to append what does not fit."""
        for split, before in self._before.items():
            where = f"{self._sink.url}/{split}".rstrip("/")
            if before.index is None:
                if self._options.append:
                    raise UsageError(
                        f"there is no dataset at {where} to append to", mend="leave --append out"
                    )
                continue
            if self._options.append:
                there, ours = before.index.columns, self._found.schema.encodings
                if len(before.index.shards) and there != ours:
                    raise UsageError(
                        f"the dataset at {where} has {_list(there)}, the source has {_list(ours)}",
                        mend="choose with --columns, --select and --rename until they are the same",
                    )
            elif not self._options.overwrite and not self._made_from_this():
                raise UsageError(
                    f"{where} holds a dataset that was made from something else",
                    mend="--overwrite publishes this one in its place, --append adds to it",
                )

    def _made_from_this(self) -> bool:
        """Whether all of the dataset that is there came from this source, so that nothing else is lost."""
        done = [summary for name in jobs(self._sink) if (summary := Journal(self._sink, name).done())]
        if not done:
            return False
        if all(summary["source"] == self._found.label_url for summary in done):
            return True
        there = {
            split: before.index.extra.get("version")
            for split, before in self._before.items()
            if before.index is not None
        }
        return any(
            summary["source"] == self._found.label_url
            and not summary.get("shards")  # which appending jobs keep
            and all(summary["versions"].get(split) == version for split, version in there.items())
            for summary in done
        )

    def _first_ordinal(self) -> int:
        """Where the numbers of this job's shards begin: behind those that are there, when appending."""
        if not self._options.append:
            return 0
        highest = -1
        for before in self._before.values():
            for shard in before.index.shards if before.index is not None else ():
                match = re.match(r"shards/(\d+)-", shard.stored.basename)
                highest = max(highest, int(match[1]) if match else 0)
        return highest + 1

    def _usable_records(self) -> dict[int, dict[str, Any]]:
        """Records of finished tasks whose shards are there; those that hold bad rows only if they may."""
        records = self._journal.records()
        if not records:
            return {}
        stored = {
            info.key: info.bytes
            for info in listing(self._sink, "")
            if ".mds" in info.key or "/runs/" in info.key
        }
        lost = [
            number
            for number, record in records.items()
            if (record["skipped"] and self._options.on_error == "fail")
            or any(stored.get(key) != size for key, size in shard_files(self._name, record))
            or any(run["key"] not in stored for runs in record.get("runs", {}).values() for run in runs)
        ]
        self._journal.forget(lost)
        for number in lost:
            del records[number]
        return records

    def _is_mine(self, number: int) -> bool:
        share = self._options.task
        return share is None or number % share[1] == share[0]

    def commit(self) -> ConvertResult:
        """Publish what the tasks made."""
        description = self._journal.description()
        records = self._journal.records()
        if description is None or len(records) < description["tasks"]:
            return self._overtaken()
        result = _commit(self._sink, self._journal, description, records, self._before)
        self._sweep()
        return replace(result, ran=self._ran, notes=self._found.notes)

    def _overtaken(self) -> ConvertResult:
        """What another run published while this one worked: the records of tasks go when a job is published.

        Raises:
            ConflictError: That was another job; what this one has made is not whole any more.
        """
        done = self._journal.done()
        if done is not None:
            return to_result(self._sink, self._name, done, (), finished=True, notes=self._found.notes)
        raise ConflictError(
            f"{self._sink.url} was published by another run while this one worked; that is untouched",
            mend="let one run work at a place; then run again with --overwrite or --append",
        )

    def result(self) -> ConvertResult:
        """What a share of a job did; nothing is published."""
        records = {
            number: record for number, record in self._journal.records().items() if self._is_mine(number)
        }
        summary = summarize(
            records,
            {
                "source": self._found.label_url,
                "columns": self._found.schema.encodings,
                "tasks": self._found.tasks + self._buckets * len(self._splits),
                "input_bytes": int(self._found.sizes.sum()),
            },
        )
        result = to_result(self._sink, self._name, summary, (), notes=self._found.notes)
        return replace(result, ran=self._ran, pending=self._pending)

    def _sweep(self) -> None:
        """Remove journals of unfinished jobs from this source, and shards of theirs that nothing names."""
        kept: set[str] = set()
        for split in self._splits:
            index = commit.current(self._sink, prefix_of(split)).index
            kept.update(prefix_of(split) + shard.stored.basename for shard in (index.shards if index else ()))
        for name in jobs(self._sink):
            journal = Journal(self._sink, name)
            description = journal.description()
            if name == self._name or description is None or journal.done() is not None:
                continue
            if description["source"] == self._found.label_url:
                files = [key for record in journal.records().values() for key, _ in shard_files(name, record)]
                self._sink.delete(key for key in files if key not in kept)
                journal.drop()


def _commit(
    sink: Sink,
    journal: Journal,
    description: Mapping[str, Any],
    records: commit.Records,
    before: Mapping[str, commit.Current] | None = None,
) -> ConvertResult:
    """Publish every split, then the quarantine, then close the journal."""
    summary = summarize(records, description)
    if not summary["rows"]:
        journal.drop()
        why = f"; {summary['examples'][0][1]} ({summary['examples'][0][0]})" if summary["examples"] else ""
        raise FormatError(
            f"{description['source']} has no rows{why}", mend="look at the source with --dry-run"
        )
    published = []
    for split in description["splits"]:
        prefix = prefix_of(split)
        was = before[split] if before is not None else commit.current(sink, prefix)
        entries = list(commit.entries_of(records, split))
        published.append(commit.publish(sink, prefix, entries, was, append=description["append"]))
        summary["versions"][split] = published[-1].version
        if entries:
            summary["made"][split] = appended.run_of([commit.stored_name(entry) for entry in entries])
        if description["append"]:
            summary["shards"][split] = [commit.stored_name(entry) for entry in entries]
    bad = list(commit.quarantine_of(records))
    if bad:
        prefix = f"{QUARANTINE}/{journal.job}/"
        commit.publish(sink, prefix, bad, commit.current(sink, prefix), append=False)
    summary["published"] = [as_json(part) for part in published]
    journal.finish(summary)
    return to_result(sink, journal.job, summary, tuple(published))


def _list(columns: Mapping[str, str]) -> str:
    return ", ".join(f"{name}:{encoding}" for name, encoding in columns.items())
