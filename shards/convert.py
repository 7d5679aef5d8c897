"""The job: a corpus in, a dataset out.

    list files ─► kind of source ─► columns ─► tasks ─► engine ─► records in the journal ─► commit
                                                  │                       ▲
                                                  └── finished ones are passed over

Everything before the engine is a function of the input and the options. A job that is killed at any instant
and run again goes on behind its last finished task and ends with the same bytes (invariants 3 and 9).
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shards import commit, engines
from shards.errors import FormatError, UsageError
from shards.find import Found, find
from shards.journal import Journal, jobs, listing
from shards.options import ConvertOptions
from shards.plan import Job, job_name
from shards.progress import Progress
from shards.sink import LocalSink, Sink
from shards.sources import Task
from shards.task import QUARANTINE

_log = logging.getLogger(__name__)

# Below this, starting processes costs more than it saves.
_SMALL = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertResult:
    """What a job did.

    Args:
        url (str): The destination.
        job (str): The job's name.
        published (tuple[commit.Published, ...]): One a split; empty where only some tasks were run.
        columns (Mapping[str, str]): Column -> encoding.
        rows (int): Rows in the shards of this job.
        input_bytes (int): Bytes that were read, as far as they are known.
        skipped (int): Rows that went to the quarantine.
        examples (tuple[tuple[str, str], ...]): Where and why, for some of them.
        quarantine (str | None): Where they are.
        tasks (int): Tasks of the job.
        ran (int): Tasks that this run did; the others were finished before.
        seconds (float): How long it took.
        notes (tuple[str, ...]): What was left out of the source.
        finished (bool): It had been finished before: there was nothing to do.
    """

    url: str
    job: str
    published: tuple[commit.Published, ...]
    columns: Mapping[str, str]
    rows: int
    input_bytes: int
    skipped: int
    examples: tuple[tuple[str, str], ...]
    quarantine: str | None
    tasks: int
    ran: int
    seconds: float
    notes: tuple[str, ...]
    finished: bool = False


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
    found = find(source, asked, storage_options=storage_options)
    sink = LocalSink(out) if isinstance(out, str | Path) else out
    refuse_nesting([source] if isinstance(source, str | Path) else source, sink)
    run = _Run(found, asked, sink)
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


class _Run:
    """One run of a job."""

    def __init__(self, found: Found, options: ConvertOptions, sink: Sink) -> None:
        self._found = found
        self._options = options
        self._sink = sink
        self._ran = 0
        name = job_name(found.files, options, found.kind.name, found.schema)
        self._journal = Journal(sink, name)
        self._splits = list(options.split) or [""]
        self._before = {split: commit.current(sink, _prefix(split)) for split in self._splits}
        self._name = name

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
        return _result(self._sink, self._name, done, (), finished=True, notes=self._found.notes)

    def tasks(self) -> None:
        """Run what is not finished yet."""
        found, options = self._found, self._options
        description = self._begin()
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
            first=description["first"],
        )
        done = self._usable_records()
        mine = [number for number in range(found.tasks) if self._is_mine(number)]
        todo = frozenset(number for number in mine if number not in done)
        sizes = found.sizes
        with Progress(
            f"shard {found.label}",
            total_bytes=int(sizes[mine].sum()) if mine else 0,
            unit="rows",
            quiet=options.quiet,
        ) as progress:
            for number, record in done.items():
                if self._is_mine(number):
                    progress.advance(bytes=int(sizes[number]), items=record["rows"])

            def on_record(number: int, task: Task, record: dict[str, Any]) -> None:
                self._journal.record(number, record)
                self._ran += 1
                progress.advance(bytes=task.bytes)

            def on_rows(rows: int) -> None:
                progress.advance(items=rows)

            pending = ((number, task) for number, task in enumerate(found.source.tasks()) if number in todo)
            self._engine(
                job, pending, len(todo), int(sum(sizes[number] for number in todo)), on_record, on_rows
            )

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
            "tasks": self._found.tasks,
            "input_bytes": int(self._found.sizes.sum()),
            "splits": self._splits,
            "columns": self._found.schema.encodings,
            "append": self._options.append,
            "first": self._first_ordinal(),
        }
        self._journal.drop()
        self._journal.begin(description)
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
                if there != ours:
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
        """Whether a job from this source was published here before."""
        done = (Journal(self._sink, name).done() for name in jobs(self._sink))
        return any(summary["source"] == self._found.label_url for summary in done if summary is not None)

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
        stored = {info.key: info.bytes for info in listing(self._sink, "") if ".mds" in info.key}
        lost = [
            number
            for number, record in records.items()
            if (record["skipped"] and self._options.on_error == "fail")
            or any(stored.get(key) != size for key, size in _shard_files(self._name, record))
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
        assert description is not None
        records = self._journal.records()
        result = _commit(self._sink, self._journal, description, records, self._before)
        self._sweep()
        return replace(result, ran=self._ran, notes=self._found.notes)

    def result(self) -> ConvertResult:
        """What a share of a job did; nothing is published."""
        records = {
            number: record for number, record in self._journal.records().items() if self._is_mine(number)
        }
        summary = _summary(
            records,
            {
                "source": self._found.label_url,
                "columns": self._found.schema.encodings,
                "tasks": self._found.tasks,
                "input_bytes": int(self._found.sizes.sum()),
            },
        )
        result = _result(self._sink, self._name, summary, (), notes=self._found.notes)
        return replace(result, ran=self._ran)

    def _sweep(self) -> None:
        """Remove journals of unfinished jobs from this source, and shards of theirs that nothing names."""
        kept: set[str] = set()
        for split in self._splits:
            index = commit.current(self._sink, _prefix(split)).index
            kept.update(_prefix(split) + shard.stored.basename for shard in (index.shards if index else ()))
        for name in jobs(self._sink):
            journal = Journal(self._sink, name)
            description = journal.description()
            if name == self._name or description is None or journal.done() is not None:
                continue
            if description["source"] == self._found.label_url:
                files = [
                    key for record in journal.records().values() for key, _ in _shard_files(name, record)
                ]
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
    summary = _summary(records, description)
    if not summary["rows"]:
        journal.drop()
        why = f"; {summary['examples'][0][1]} ({summary['examples'][0][0]})" if summary["examples"] else ""
        raise FormatError(
            f"{description['source']} has no rows{why}", mend="look at the source with --dry-run"
        )
    published = []
    for split in description["splits"]:
        prefix = _prefix(split)
        was = before[split] if before is not None else commit.current(sink, prefix)
        entries = list(commit.entries_of(records, split))
        published.append(commit.publish(sink, prefix, entries, was, append=description["append"]))
        summary["versions"][split] = published[-1].version
        if description["append"]:
            summary["shards"][split] = [commit.stored_name(entry) for entry in entries]
    bad = list(commit.quarantine_of(records))
    if bad:
        prefix = f"{QUARANTINE}/{journal.job}/"
        commit.publish(sink, prefix, bad, commit.current(sink, prefix), append=False)
    summary["published"] = [vars_of(part) for part in published]
    journal.finish(summary)
    return _result(sink, journal.job, summary, tuple(published))


def vars_of(part: commit.Published) -> dict[str, Any]:
    """A published dataset as JSON."""
    from dataclasses import asdict

    return asdict(part)


def _summary(records: commit.Records, description: Mapping[str, Any]) -> dict[str, Any]:
    """The counts of a job, from the records of its tasks."""
    examples = [example for number in sorted(records) for example in records[number]["examples"]]
    return {
        "source": description["source"],
        "columns": description["columns"],
        "tasks": description["tasks"],
        "input_bytes": description["input_bytes"],
        "rows": sum(record["rows"] for record in records.values()),
        "skipped": sum(record["skipped"] for record in records.values()),
        "examples": examples[:5],
        "versions": {},
        "shards": {},
    }


def _result(
    sink: Sink,
    job: str,
    summary: Mapping[str, Any],
    published: tuple[commit.Published, ...],
    *,
    finished: bool = False,
    notes: tuple[str, ...] = (),
) -> ConvertResult:
    return ConvertResult(
        url=sink.url,
        job=job,
        published=published or tuple(commit.Published(**part) for part in summary.get("published", ())),
        columns=summary["columns"],
        rows=summary["rows"],
        input_bytes=summary["input_bytes"],
        skipped=summary["skipped"],
        examples=tuple((where, why) for where, why in summary["examples"]),
        quarantine=f"{sink.url}/{QUARANTINE}/{job}" if summary["skipped"] else None,
        tasks=summary["tasks"],
        ran=0,
        seconds=0.0,
        notes=notes,
        finished=finished,
    )


def _shard_files(job: str, record: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """The key and size of every shard that a record names."""
    groups = [(_prefix(split), entries) for split, entries in record["shards"].items()]
    for prefix, entries in (*groups, (f"{QUARANTINE}/{job}/", record["quarantine"])):
        for entry in entries:
            file = entry["shard"]["zip_data"] or entry["shard"]["raw_data"]
            yield prefix + file["basename"], file["bytes"]


def _prefix(split: str) -> str:
    return f"{split}/" if split else ""


def _list(columns: Mapping[str, str]) -> str:
    return ", ".join(f"{name}:{encoding}" for name, encoding in columns.items())
