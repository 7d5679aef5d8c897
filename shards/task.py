"""One task: read its part of the corpus, write its shards, say what was done.

    source.read(payload) ──► Rows ──► (tokens) ──► a ShardBuilder for each split ──► sink
                               └──► bad rows ──► the quarantine's ShardBuilder ────► sink

What comes back is the task's record: the entries of its shards, and counts.

The same everywhere: in this process, in a worker, on a Ray node. What it writes depends on the job and the
task alone (invariant 3).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from shards.builder import FinishedShard, ShardBuilder
from shards.digests import crc32c
from shards.errors import DatasyncError, NotFoundError
from shards.journal import Journal
from shards.mds import RowError
from shards.plan import Job
from shards.rows import Rows, items
from shards.shuffle import Bucket, Scatter, gather
from shards.sink import Sink
from shards.sources import load
from shards.sources.base import Bad, Row, Table, Task
from shards.sources.files import FileList
from shards.sources.streams import take_count
from shards.split import parse_split, split_of
from shards.storing import Behind, Storing

if TYPE_CHECKING:
    import pyarrow as pa

    from shards.tokens import Packer

QUARANTINE = "_datasync/quarantine"
QUARANTINE_COLUMNS = {"reason": "str", "where": "str", "data": "bytes"}
_EXAMPLES = 3
_REPORT_ROWS = 1024

Report = Callable[[int, int], None]


class BadRowError(DatasyncError):
    """A row is bad, and the job is not to skip it."""


def run_task(job: Job, number: int, task: Task, report: Report | None = None) -> dict[str, Any]:
    """Do a task, store what comes of it and write down in the journal that it is done.

    Args:
        job (Job): What the task is part of.
        number (int): The task's number.
        task (Task): The task.
        report (Report | None): Called with a number of rows that are done, and the bytes of compressed files
            that were read for them. Default: ``None``.

    Returns:
        dict[str, Any]: The record of the task: ``rows skipped shards quarantine examples``.

    Raises:
        BadRowError: A row is bad and the job is to fail.
        DatasyncError: The source or the destination failed.
    """
    storing = Storing()
    try:
        return make_task(job, number, task, storing, report or (lambda *_: None)).result()
    finally:
        storing.settle()


def make_task(job: Job, number: int, task: Task, storing: Storing, report: Report) -> Future[dict[str, Any]]:
    """Do a task up to its last shard; the future is its record, when that and all shards are stored."""
    behind = Behind(storing)
    if isinstance(task.payload, Bucket):
        record = _gather(job, number, task.payload, behind)
    else:
        record = _read(job, number, task.payload, behind, report)

    def keep() -> dict[str, Any]:
        Journal(job.sink, job.name).record(number, record)
        return record

    return behind.finish(keep)


def _read(job: Job, number: int, payload: Any, behind: Behind, report: Report) -> dict[str, Any]:
    """Everything but the second half of a shuffle: rows out of the source."""
    options = job.options
    source = load(job.source)(_no_files(), options.source_options())
    rows = Rows(
        job.schema,
        options,
        strict=job.strict,
        known=job.known,
        checked=source.checks,
        root=job.root,
        access=job.storage_options,
    )
    take_count()  # what was read to find the columns is no progress
    done = _Outputs(job, number, behind, report)
    found = items(source.read(payload))
    if not rows.whole_tables:
        for row in rows.rows(found):
            done.take(row)
        return done.finish()
    for item in found:
        if isinstance(item, Table):
            batch, bad = rows.table(item)
            for refused in bad:
                done.bad(refused)
            done.batch(batch, item)
        else:
            for row in rows.rows((item,)):
                done.take(row)
    return done.finish()


def _gather(job: Job, number: int, bucket: Bucket, behind: Behind) -> dict[str, Any]:
    """The second half of a shuffle: the rows of one bucket, sorted, as shards."""
    prefix = f"{bucket.split}/" if bucket.split else ""
    output = _Output(job, prefix, job.schema.encodings, job.first + number, behind)
    for sample in gather(job.sink, bucket):
        output.store(output.builder.write_sample(sample))
    output.store(output.builder.finish())
    return {
        "rows": 0,  # they were counted when they were scattered
        "skipped": 0,
        "examples": [],
        "shards": {bucket.split: output.entries},
        "quarantine": [],
    }


def _no_files() -> FileList:
    return FileList(root="", names=[], sizes=np.empty(0, np.int64), versions=np.empty(0, np.uint64))


class _Outputs:
    """Where rows go: a builder for each split, and one for what is bad."""

    def __init__(self, job: Job, number: int, behind: Behind, report: Report) -> None:
        self._job = job
        self._behind = behind
        self._ordinal = job.first + number
        self._edges = parse_split(job.options.split)
        self._outputs: dict[str, _Output] = {}
        self._packers: dict[str, Packer] = {}
        self._scatters: dict[str, Scatter] = {}
        self._number = number
        self._quarantine = _Output(
            job, f"{QUARANTINE}/{job.name}/", QUARANTINE_COLUMNS, self._ordinal, behind
        )
        self._examples: list[list[str]] = []
        self._skipped = self._rows = self._reported = 0
        self._report = report

    def take(self, row: Row | Bad) -> None:
        """A row that came through, or a bad one."""
        if isinstance(row, Bad):
            self.bad(row)
            return
        split = self._split(row)
        packer = self._packer(split)
        if packer is None:
            self._store(row, split)
        else:
            self._take_packed(packer.feed(row), split)

    def _take_packed(self, rows: Iterable[Row | Bad], split: str) -> None:
        for row in rows:
            if isinstance(row, Bad):
                self.bad(row)
            else:
                self._store(row, split)

    def _packer(self, split: str) -> Packer | None:
        """What makes samples of text; one for each split, so that none mixes them."""
        if self._job.options.tokenizer is None:
            return None
        packer = self._packers.get(split)
        if packer is None:
            from shards.tokens import Packer

            packer = self._packers[split] = Packer(self._job.options, self._job.schema)
        return packer

    def _store(self, row: Row, split: str) -> None:
        output = self._output(split)
        try:
            if self._job.buckets:
                self._scatter(split).add(output.builder.recipe.layout.encode(row.values))
            else:
                output.store(output.builder.write(row.values))
        except RowError as error:
            self.bad(Bad(error.message, row.file, row.at))
            return
        self._count(1)

    def _scatter(self, split: str) -> Scatter:
        scatter = self._scatters.get(split)
        if scatter is None:
            job = self._job
            scatter = self._scatters[split] = Scatter(
                job.sink,
                job.name,
                seed=job.options.shuffle_seed or 0,
                number=self._number,
                split=split,
                buckets=job.buckets,
            )
        return scatter

    def batch(self, batch: pa.RecordBatch, table: Table) -> None:
        """Rows in columns; where one of them cannot be held, go on row by row."""
        output = self._output("")
        try:
            output.store(output.builder.write_batch(batch))
            self._count(batch.num_rows)
            return
        except RowError as error:
            written = error.written
        self._count(written)
        for at in range(written, batch.num_rows):
            try:
                output.store(output.builder.write_batch(batch.slice(at, 1)))
                self._count(1)
            except RowError as error:
                self.bad(Bad(error.message, table.file, table.first + at))

    def bad(self, bad: Bad) -> None:
        if self._job.options.on_error == "fail":
            raise BadRowError(
                f"{bad.where}: {bad.reason}",
                mend="mend the source, or pass over such rows with --on-error skip",
            )
        self._skipped += 1
        if len(self._examples) < _EXAMPLES:
            self._examples.append([bad.where, bad.reason])
        row = {"reason": _utf8(bad.reason), "where": _utf8(bad.where), "data": bad.data}
        self._quarantine.store(self._quarantine.builder.write(row))

    def finish(self) -> dict[str, Any]:
        for split, packer in sorted(self._packers.items()):
            self._take_packed(packer.finish(), split)
        for output in (*self._outputs.values(), self._quarantine):
            output.store(output.builder.finish())
        for scatter in self._scatters.values():
            scatter.flush()
        self._report(self._rows - self._reported, take_count())
        return {
            "rows": self._rows,
            "skipped": self._skipped,
            "examples": self._examples,
            "shards": {split: output.entries for split, output in sorted(self._outputs.items())},
            "quarantine": self._quarantine.entries,
            "runs": {split: scatter.runs for split, scatter in sorted(self._scatters.items())},
        }

    def _split(self, row: Row) -> str:
        if not self._edges:
            return ""
        options = self._job.options
        if options.key is not None:
            key = repr(_lasting(row.values[options.rename.get(options.key, options.key)]))
        elif row.key is not None:
            key = row.key
        else:
            key = repr([(name, _lasting(value)) for name, value in sorted(row.values.items())])
        return split_of(key.encode(errors="surrogateescape"), self._edges)

    def _output(self, split: str) -> _Output:
        output = self._outputs.get(split)
        if output is None:
            prefix = f"{split}/" if split else ""
            output = self._outputs[split] = _Output(
                self._job, prefix, self._job.schema.encodings, self._ordinal, self._behind
            )
        return output

    def _count(self, rows: int) -> None:
        self._rows += rows
        if self._rows - self._reported >= _REPORT_ROWS:
            self._report(self._rows - self._reported, take_count())
            self._reported = self._rows


class _Output:
    """The shards of one dataset that a task writes."""

    def __init__(self, job: Job, prefix: str, columns: dict[str, str], ordinal: int, behind: Behind) -> None:
        options = job.options
        self._behind = behind
        self._sink: Sink = job.sink
        self._prefix = prefix
        self.entries: list[dict[str, Any]] = []
        self.builder = ShardBuilder(
            columns,
            compression=options.compression,
            hashes=options.hashes,
            size_limit=options.limit_bytes,
            ordinal=ordinal,
        )

    def store(self, shards: list[FinishedShard]) -> None:
        for shard in shards:
            checksum = crc32c(shard.data)
            self._behind.put(partial(self._write, shard, checksum))
            self.entries.append({"shard": shard.info.to_dict(), "crc32c": checksum})

    def _write(self, shard: FinishedShard, checksum: int) -> None:
        file = shard.info.stored
        key = self._prefix + file.basename
        if not self._stored(key, file.bytes):
            self._sink.write(key, shard.data, crc32c=checksum)

    def _stored(self, key: str, size: int) -> bool:
        """Whether an earlier try, or a task with the same rows, has stored it: its name is its content."""
        try:
            return self._sink.stat(key).bytes == size
        except NotFoundError:
            return False


def _lasting(value: Any) -> Any:
    """A value whose repr is the same everywhere; an array's depends on NumPy, and leaves its middle out."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, hashlib.sha256(value.tobytes()).hexdigest()
    return value


def _utf8(text: str) -> str:
    return text.encode(errors="surrogateescape").decode(errors="replace")
