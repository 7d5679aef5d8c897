"""`--engine ray`: one replication spread over the nodes of a Ray cluster.

    here: leases, plan, publication ──batches of objects──► nodes: read, prove, write, journal
                                    ◄──what was done───────

A node works through its batch with a mover and lanes of its own, so memory, retries and journal are those of
a run on one machine; its journal files carry the run's token and the batch's number. Objects belong to one
batch only. The result is the same, whoever moved what.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from datasync.errors import DatasyncError, UsageError
from datasync.replicate.journal import Begun, Journal
from datasync.replicate.lane import Lane, Tally
from datasync.replicate.plan import Item
from datasync.replicate.transfer import Mover, Proof
from datasync.storage.base import Store

if TYPE_CHECKING:
    from datasync.replicate.options import Stop

_BATCH_OBJECTS = 2000
_BATCH_BYTES = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSpec:
    """What a node needs to know of a lane."""

    name: str
    store: Store
    token: int
    read_back: bool
    retry_seconds: float


@dataclass(slots=True, kw_only=True)
class Batch:
    """Objects for one node.

    Args:
        number (int): Of the batch; it names the journal's files.
        sources (list[Store]): As for a `Mover`.
        lanes (list[LaneSpec]): The destinations.
        work (list): Items, each with the places in `lanes` that want it.
        present (list[dict[str, bool]]): For each lane, keys that may be in place, as in `Lane`.
        uploads (list[dict]): For each lane, uploads to go on with.
    """

    number: int
    sources: list[Store]
    lanes: list[LaneSpec]
    work: list[tuple[Item, list[int]]] = field(default_factory=list)
    present: list[dict[str, bool]] = field(default_factory=list)
    uploads: list[dict[str, Begun]] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Done:
    """What came of a batch."""

    tallies: list[Tally]
    errors: list[DatasyncError | None]
    found: dict[int, Proof]
    tags: dict[int, tuple[str | None, int]]
    read_bytes: int
    read_objects: int
    source_error: DatasyncError | None


def run_batch(batch: Batch) -> Done:
    """Move a batch, on whatever machine this is."""
    turn, stop = threading.Condition(), threading.Event()
    lanes = []
    for spec, present, uploads in zip(batch.lanes, batch.present, batch.uploads, strict=True):
        journal = Journal(spec.store, spec.token, part=batch.number)
        lane = Lane(
            spec.name,
            spec.store,
            journal,
            turn=turn,
            stop=stop,
            read_back=spec.read_back,
            retry_seconds=spec.retry_seconds,
        )
        lane.present, lane.uploads = present, uploads
        lanes.append(lane)
    retry_seconds = max(spec.retry_seconds for spec in batch.lanes)
    mover = Mover(batch.sources, turn=turn, stop=stop, retry_seconds=retry_seconds)
    mover.move((item, [lanes[place] for place in places]) for item, places in batch.work)
    for lane in lanes:
        lane.drain()
        while lane.alive and lane.deferred:
            again, lane.deferred = lane.deferred, []
            mover.move((item, [lane]) for item in again)
            lane.drain()
        lane.close()
        lane.journal.close()
    return Done(
        tallies=[lane.tally for lane in lanes],
        errors=[lane.error for lane in lanes],
        found=mover.found,
        tags=mover.tags,
        read_bytes=mover.read_bytes,
        read_objects=mover.read_objects,
        source_error=mover.error,
    )


def batches(
    work: Iterator[tuple[Item, Sequence[Lane]]], sources: list[Store], lanes: Sequence[Lane]
) -> Iterator[Batch]:
    """Cut the work into batches of a bounded number of objects and bytes."""
    specs = [
        LaneSpec(
            name=lane.name,
            store=lane.store,
            token=lane.journal.token,
            read_back=lane.read_back,
            retry_seconds=lane.retry_seconds,
        )
        for lane in lanes
    ]
    number, held, batch = 0, 0, None
    for item, wanting in work:
        if batch is None:
            number, held = number + 1, 0
            batch = Batch(number=number, sources=sources, lanes=specs)
            batch.present, batch.uploads = [{} for _ in lanes], [{} for _ in lanes]
        places = [lanes.index(lane) for lane in wanting]
        batch.work.append((item, places))
        held += item.bytes
        for place in places:
            if item.key in lanes[place].present:
                batch.present[place][item.key] = lanes[place].present[item.key]
            if item.key in lanes[place].uploads:
                batch.uploads[place][item.key] = lanes[place].uploads[item.key]
        if len(batch.work) >= _BATCH_OBJECTS or held >= _BATCH_BYTES:
            yield batch
            batch = None
    if batch is not None:
        yield batch


def spread(
    mover: Mover, work: Iterator[tuple[Item, Sequence[Lane]]], lanes: Sequence[Lane], stop: Stop
) -> None:
    """Move the work on Ray, and add what came of it to the mover and the lanes.

    Raises:
        UsageError: Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise UsageError("the engine ray is not installed", mend="pip install 'datasync[ray]'") from error
    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False, configure_logging=False)
    task: Any = ray.remote(num_cpus=1, max_retries=2)(run_batch)
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]  # Ray has no types here
    most = max(int(resources.get("CPU", 1)), 1) * 2
    waiting: list[Any] = []
    feed = batches(work, mover.sources, lanes)
    more = True
    while more or waiting:
        while more and len(waiting) < most and not stop.event.is_set():
            batch = next(feed, None)
            if batch is None:
                more = False
                break
            waiting.append(task.remote(batch))
        if stop.event.is_set():
            more = False
        if waiting:
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=5)
            for reference in ready:
                _add(mover, lanes, ray.get(reference))


def _add(mover: Mover, lanes: Sequence[Lane], done: Done) -> None:
    mover.found.update(done.found)
    mover.tags.update(done.tags)
    mover.read_bytes += done.read_bytes
    mover.read_objects += done.read_objects
    mover.error = mover.error or done.source_error
    for lane, tally, error in zip(lanes, done.tallies, done.errors, strict=True):
        lane.add(tally)
        if error is not None:
            lane.fail(error)
