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


def shard_files(job: str, record: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """The key and size of every shard that a record names."""
    groups = [(prefix_of(split), entries) for split, entries in record["shards"].items()]
    for prefix, entries in (*groups, (f"{QUARANTINE}/{job}/", record["quarantine"])):
        for entry in entries:
            file = entry["shard"]["zip_data"] or entry["shard"]["raw_data"]
            yield prefix + file["basename"], file["bytes"]


def prefix_of(split: str) -> str:
    return f"{split}/" if split else ""
