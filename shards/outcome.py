"""What a job did: the counts of its tasks, and what is kept of them when it is finished."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shards import commit
from shards.sink import Sink
from shards.task import QUARANTINE


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
        pending (bool): Of a shuffle in shares, the first of two rounds is done: run each share again.
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
    pending: bool = False


def as_json(part: commit.Published) -> dict[str, Any]:
    """A published dataset as JSON."""
    return asdict(part)


def summarize(records: commit.Records, description: Mapping[str, Any]) -> dict[str, Any]:
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
        "made": {},
        "shards": {},
    }


def to_result(
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


def nothing_new(sink: Sink, before: Mapping[str, commit.Current]) -> ConvertResult:
    """The result of appending a corpus that the datasets have already."""
    found = {prefix_of(split): now.index for split, now in before.items() if now.index is not None}
    published = tuple(commit.published_now(prefix, index) for prefix, index in found.items())
    return ConvertResult(
        url=sink.url,
        job="",
        published=published,
        columns=next((index.columns for index in found.values()), {}),
        rows=sum(part.samples for part in published),
        input_bytes=0,
        skipped=0,
        examples=(),
        quarantine=None,
        tasks=0,
        ran=0,
        seconds=0.0,
        notes=(),
        finished=True,
    )


def shard_files(job: str, record: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """The key and size of every shard that a record names."""
    groups = [(prefix_of(split), entries) for split, entries in record["shards"].items()]
    for prefix, entries in (*groups, (f"{QUARANTINE}/{job}/", record["quarantine"])):
        for entry in entries:
            file = entry["shard"]["zip_data"] or entry["shard"]["raw_data"]
            yield prefix + file["basename"], file["bytes"]


def prefix_of(split: str) -> str:
    return f"{split}/" if split else ""
