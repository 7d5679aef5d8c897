"""One replication: a source, one or several destinations, and what became of each.

    describe ─► open destinations ─► plan ─► move what is new ─► move what replaces or marks ─► publish each
                     │                            │
                     └ nothing new: done          └ who lags goes on alone; who dies is given up

Nothing to do is found from two small objects, the source's index as the store describes it and the newest
receipt, whatever the size of the dataset.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from datasync.errors import DatasyncError, NotFoundError, StoreError, TransientError, UsageError
from datasync.ops import receipts
from datasync.ops.judgement import Signature, at_once, is_same, signature_at, signature_fault, signature_of
from datasync.ops.receipts import Receipt
from datasync.replicate import spread
from datasync.replicate.catalog import TREE, Catalog, check_name, describe, learn, settle, tag_of
from datasync.replicate.destination import (
    Destination,
    compared,
    deletable,
    make_plan,
    make_way,
    open_destination,
    publish,
)
from datasync.replicate.lane import Lane, Tally
from datasync.replicate.layout import INDEX, manifest_key
from datasync.replicate.lease import TTL_SECONDS
from datasync.replicate.limits import identity
from datasync.replicate.plan import Item, Plan, items
from datasync.replicate.retry import RETRY_SECONDS, retrying
from datasync.replicate.transfer import Mover
from datasync.storage.base import Store
from datasync.storage.retry import inheriting, patient
from shards.progress import Progress

log = logging.getLogger(__name__)

_LAG_SECONDS = 1.0
_PHASES = ("first", "last", "marks")

ALREADY, PLANNED, PUBLISHED, FAILED, STOPPED = "already", "planned", "published", "failed", "stopped"


@dataclass(slots=True)
class Stop:
    """A request to end, with its reason; shared by the caller (signals, deadline) and the run."""

    event: threading.Event = field(default_factory=threading.Event)
    reason: str = ""
    exit_code: int = 4

    def ask(self, reason: str, exit_code: int = 4) -> None:
        if not self.event.is_set():
            self.reason, self.exit_code = reason, exit_code
            self.event.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to replicate.

    Args:
        as_tree (bool): Copy every file, also of a folder that has an index. Default: ``False``.
        dry_run (bool): Plan only; nothing is written anywhere. Default: ``False``.
        verify (str): ``stored``: each object is proven before it is sent, and by the destination's checksum
            while it is stored. ``full``: each is also read back. Default: ``stored``.
        delete (bool): Remove from a tree's copy what the source no longer has. Default: ``False``.
        max_delete (float): The largest share that may be removed. Default: ``0.1``.
        require_signature (str | None): Public key file that must have signed the index.
        retry_seconds (float): How long a failing place is tried. Default: ``120``.
        lease_seconds (float): Time to live of the leases. Default: ``60``.
        quiet (bool): No progress. Default: ``False``.
        engine (str): ``local``, or ``ray``: spread over the nodes of a Ray cluster. Default: ``local``.
    """

    as_tree: bool = False
    dry_run: bool = False
    verify: str = "stored"
    delete: bool = False
    max_delete: float = 0.1
    require_signature: str | None = None
    retry_seconds: float = RETRY_SECONDS
    lease_seconds: float = TTL_SECONDS
    quiet: bool = False
    engine: str = "local"

    def __post_init__(self) -> None:
        if self.verify not in ("stored", "full"):
            raise UsageError(f"verify cannot be {self.verify!r}", mend="use stored or full")


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of one destination.

    Args:
        name (str): The dataset or tree.
        source (str): URL.
        destination (str): The cluster's name, or a URL.
        url (str): URL of the copy.
        kind (str): ``dataset``, ``mds`` or ``tree``.
        state (str): ``already``, ``planned``, ``published``, ``failed`` or ``stopped``.
        version (str | None): Version of the source, where known.
        objects, bytes, samples (int): Of the whole version.
        to_copy, to_copy_bytes (int): Of the plan.
        feeder (str): Which other destination it is fed from, in a relay. Default: none, the source.
        paid_bytes (int): Of the bytes to copy, those that are read for no destination before this one:
            what several destinations need is read once.
        to_delete, deleted (int): Objects that ``delete`` would remove, and removed.
        estimate_seconds (float | None): Of a plan: at the rate of the last run that copied.
        tally (Tally): What was done.
        seconds (float): How long it took.
        source_bytes_read (int): Read from the source, for all destinations together.
        receipt (Receipt | None): The proof.
        error (DatasyncError | None): Why it failed.
    """

    name: str
    source: str
    destination: str
    url: str
    kind: str = ""
    state: str = FAILED
    version: str | None = None
    objects: int = 0
    bytes: int = 0
    samples: int | None = None
    to_copy: int = 0
    to_copy_bytes: int = 0
    feeder: str = ""
    paid_bytes: int = 0
    to_delete: int = 0
    deleted: int = 0
    estimate_seconds: float | None = None
    tally: Tally = field(default_factory=Tally)
    seconds: float = 0.0
    source_bytes_read: int = 0
    receipt: Receipt | None = None
    error: DatasyncError | None = None


def replicate(
    source: Store,
    to: Mapping[str, Store],
    *,
    name: str,
    options: Options | None = None,
    stop: Stop | None = None,
    fallbacks: Sequence[Store] = (),
) -> list[Outcome]:
    """Copy what is missing from `source` to every destination, proven, the index last.

    Args:
        source (Store): The root of the dataset or tree.
        to (Mapping[str, Store]): Name for people -> root of the copy.
        name (str): Of the dataset or tree.
        options (Options | None): How. Default: as `Options`.
        stop (Stop | None): Ends the run cleanly when asked.
        fallbacks (Sequence[Store]): Other places to read an object from that is bad at the source.

    Returns:
        list[Outcome]: One a destination, in the order given. A destination that fails has its error there.

    Raises:
        NotFoundError: There is nothing at the source.
        FormatError: The source's index or manifest cannot be trusted.
    """
    began = time.monotonic()
    check_name(name)
    options, stop = options or Options(), stop or Stop()
    outcomes = {
        place: Outcome(name=name, source=source.url, destination=place, url=store.url)
        for place, store in to.items()
    }
    for place, store in to.items():
        if identity(store) == identity(source):
            raise UsageError(f"{name}: {place} is the source itself", mend="name another destination")
    pending = dict(to)
    try:
        with patient(options.retry_seconds, stop.event):
            if not options.as_tree:
                for place, receipt in unchanged(source, to, options.require_signature).items():
                    _already(outcomes[place], receipt)
                    pending.pop(place)
            if stop.event.is_set():
                raise TransientError("a stop was asked for")
            if pending:
                _Run(source, pending, name, options, stop, fallbacks, outcomes).go()
    except TransientError as error:
        if not stop.event.is_set():
            raise
        log.info("%s: stopped in the middle of: %s", name, error.message)
        for place in pending:
            outcomes[place].state = STOPPED
    for outcome in outcomes.values():
        outcome.seconds = outcome.seconds or time.monotonic() - began
    return list(outcomes.values())


def unchanged(source: Store, to: Mapping[str, Store], public: str | None = None) -> dict[str, Receipt]:
    """Destinations whose newest receipt proves what the source's index still is. Two small objects each.

    Args:
        source (Store): The root of the dataset.
        to (Mapping[str, Store]): Roots of the copies.
        public (str | None): The key that must have signed the index.
    """
    try:
        info = retrying(lambda: source.stat(INDEX))
    except NotFoundError:
        return {}
    tag = tag_of(source, info)
    found: dict[str, Receipt] = {}
    answered: set[str] = set()

    def look(place: str, store: Store) -> None:
        try:
            receipt = _unchanged_at(store, source, {"tag": tag, "bytes": info.bytes}, public)
            if receipt is not None:
                found[place] = receipt
        except DatasyncError as error:
            log.info("%s must be looked at: %s", place, error)
        finally:
            answered.add(place)

    if len(to) == 1:
        look(*next(iter(to.items())))
        return found
    threads = [threading.Thread(target=inheriting(look), args=item, daemon=True) for item in to.items()]
    for thread in threads:
        thread.start()
    until: float | None = None
    while len(answered) < len(to) and (until is None or time.monotonic() < until):
        time.sleep(0.005)
        if answered and until is None:  # a dead one does not hold up the others
            until = time.monotonic() + _LAG_SECONDS
    return dict(found)


def _unchanged_at(
    store: Store, source: Store, index: dict[str, object], public: str | None
) -> Receipt | None:
    """The newest receipt of a place, if it proves what the source's `index` (tag and size) still is."""
    receipt = receipts.read(store)
    if receipt is None or not receipt.whole or receipt.index is None:
        return None
    if (receipt.source["endpoint"], receipt.source["url"]) != identity(source):
        return None
    if receipt.source["index"] != index or index["tag"] is None:
        return None
    digest = str(receipt.index["sha256"])

    def signed() -> bool:
        """Whether the signature that must be here, or the one that the source has now, is here."""
        if public is not None:
            return signature_fault(store, digest, public) is None
        return signature_at(source, digest) == receipt.source.get("signature")

    # Nothing but these records is looked at, so they must be what they were; all three are asked at once.
    same = at_once(
        lambda: is_same(store, store.stat(INDEX), receipt.index),
        lambda: is_same(store, store.stat(manifest_key(receipt.version)), receipt.manifest),
        signed,
    )
    return receipt if all(same) else None


def _already(outcome: Outcome, receipt: Receipt) -> None:
    outcome.state = ALREADY
    outcome.kind, outcome.version, outcome.receipt = receipt.kind, receipt.version, receipt
    outcome.objects, outcome.bytes, outcome.samples = receipt.objects, receipt.bytes, receipt.samples


class _Paid:
    """The objects that destinations have asked for so far, each of which is read once."""

    def __init__(self) -> None:
        self._rows: Any = None
        self._lock = threading.Lock()

    def add(self, plan: Plan) -> int:
        """Bytes of a plan that no plan before it had."""
        import numpy as np

        with self._lock:
            if self._rows is None:
                self._rows = plan.rows
                return plan.bytes
            fresh = ~np.isin(plan.rows, self._rows)
            self._rows = np.concatenate((self._rows, plan.rows[fresh]))
        return int(plan.table["bytes"].to_numpy()[fresh].sum())


class _Run:
    """The steps of one replication, in the order of the module's picture."""

    def __init__(
        self,
        source: Store,
        to: Mapping[str, Store],
        name: str,
        options: Options,
        stop: Stop,
        fallbacks: Sequence[Store],
        outcomes: dict[str, Outcome],
    ) -> None:
        self.source, self.to, self.name, self.options, self.stop = source, to, name, options, stop
        self.fallbacks = fallbacks
        self.outcomes = outcomes
        self.began = time.monotonic()
        self.turn = threading.Condition()
        self.mover = self._new_mover()
        self.progress: dict[str, Progress] = {}
        self.shown = contextlib.ExitStack()
        self.signature: Signature | None = None
        self.asking: dict[str, threading.Thread] = {}
        self.silent: dict[str, DatasyncError] = {}
        self.paid = _Paid()

    def go(self) -> None:
        options = self.options
        with self._destinations_asked():
            catalog = describe(
                self.source, self.name, as_tree=options.as_tree, retry_seconds=options.retry_seconds
            )
        self.signature = signature_of(self.source, catalog.index_sha256, options.require_signature)
        if catalog.kind == TREE:
            self._check_apart()
        if self.options.dry_run:
            self._plan_only(catalog)
            return
        with contextlib.ExitStack() as self.shown:
            opened, late = self._open_all(catalog)
            try:
                ready = [d for d in opened if self._guarded(d, partial(self._plan, d, catalog))]
                for destination in ready:
                    self._show(destination)
                if ready:
                    self._group(ready, catalog)
            finally:
                for destination in opened:
                    destination.close()
                for thread in late:
                    thread.join()

    def _check_apart(self) -> None:
        """A tree is not copied into itself, where each run would copy what the last one made."""
        endpoint, root = identity(self.source)
        for place, store in self.to.items():
            there, inner = identity(store)
            if there == endpoint and inner.startswith(f"{root.rstrip('/')}/"):
                raise UsageError(
                    f"{self.name}: {place} lies inside the source {self.source.url}",
                    mend="choose a destination beside it",
                )

    def _plan_only(self, catalog: Catalog) -> None:
        for place, store in self.to.items():
            outcome = self._describe(place, catalog)
            try:
                receipt = receipts.read(store)
                learn(catalog, store, receipt)
                plan = compared(catalog, store, receipt, {})
                if self.options.delete:
                    gone = deletable(place, store, catalog, max_delete=self.options.max_delete)
                    outcome.to_delete = len(gone)
            except DatasyncError as error:
                outcome.error = error
                continue
            outcome.state, outcome.version = PLANNED, catalog.version
            outcome.to_copy, outcome.to_copy_bytes = plan.objects, plan.bytes
            outcome.paid_bytes = self.paid.add(plan)
            rate = receipts.rate(receipt)
            outcome.estimate_seconds = plan.bytes / rate if rate else None

    def _describe(self, place: str, catalog: Catalog) -> Outcome:
        outcome = self.outcomes[place]
        outcome.kind, outcome.version = catalog.kind, catalog.version
        outcome.objects, outcome.bytes, outcome.samples = (
            catalog.objects,
            catalog.total_bytes,
            catalog.samples,
        )
        return outcome

    @contextlib.contextmanager
    def _destinations_asked(self) -> Iterator[None]:
        """Have the destinations asked what they can do while the source is looked at."""

        def ask(place: str, store: Store) -> None:
            try:
                retrying(store.abilities)
            except DatasyncError as error:
                self.silent[place] = error  # told when it is opened

        if not self.options.dry_run:
            for item in self.to.items():
                self.asking[item[0]] = threading.Thread(target=inheriting(ask), args=item, daemon=True)
        for thread in self.asking.values():
            thread.start()
        try:
            yield
        finally:
            for thread in self.asking.values():
                thread.join(_LAG_SECONDS)  # a dead one does not hold up the others

    def _open_all(self, catalog: Catalog) -> tuple[list[Destination], list[threading.Thread]]:
        """Every destination that can be worked at, opened side by side.

        One that takes much longer than the first, because it is slow or dead, goes its way in a thread of its
        own, which is returned; the others do not wait for it.
        """
        opened: dict[str, Destination] = {}
        answered: set[str] = set()
        began: list[bool] = []

        def begin(place: str, store: Store) -> None:
            destination = self._open(place, store)
            with self.turn:
                answered.add(place)
                self.turn.notify_all()
                if not began:
                    if destination is not None:
                        opened[place] = destination
                    return
            if destination is not None:
                self._alone_from_the_start(destination, catalog)

        threads = {
            place: threading.Thread(target=inheriting(begin), args=(place, store))
            for place, store in self.to.items()
        }
        for place, thread in threads.items():
            self._describe(place, catalog)
            thread.start()
        until: float | None = None
        with self.turn:
            while len(answered) < len(threads) and (until is None or time.monotonic() < until):
                self.turn.wait(0.2)
                if opened and until is None:
                    until = time.monotonic() + _LAG_SECONDS
            began.append(True)
        ready = [opened[place] for place in self.to if place in opened]
        for destination in ready:
            self._guarded(destination, partial(learn, catalog, destination.store, destination.receipt))
            self._describe(destination.name, catalog)
        return ready, [threads[place] for place in self.to if place not in answered]

    def _open(self, place: str, store: Store) -> Destination | None:
        """A destination under its lease, or None with its error told."""
        try:
            self.asking[place].join()
            if place in self.silent:
                raise self.silent[place]
            return open_destination(
                place,
                store,
                command=f"replicate {self.name}",
                turn=self.turn,
                stop=self.stop.event,
                read_back=self.options.verify == "full" or not store.abilities().crc32c,
                retry_seconds=self.options.retry_seconds,
                ttl=self.options.lease_seconds,
                on_progress=partial(self._advance, place),
            )
        except DatasyncError as error:
            if not self._ended_by_stop(place, error):
                self.outcomes[place].error = error
        except Exception as error:  # a defect must not pass for success because a thread ended with it
            log.exception("%s: %s", place, self.name)
            self.outcomes[place].error = StoreError(f"{place}: {type(error).__name__}: {error}")
        return None

    def _alone_from_the_start(self, destination: Destination, catalog: Catalog) -> None:
        """The whole way of a destination that could be opened only when the others were under way."""

        def go() -> None:
            self._plan(destination, catalog)
            self.outcomes[destination.name].paid_bytes = self.outcomes[destination.name].to_copy_bytes
            self._show(destination)
            self._move([destination], _PHASES[0], catalog)
            self._alone(destination, catalog, _PHASES[0])

        try:
            self._guarded(destination, go)
        finally:
            destination.close()

    def _show(self, destination: Destination) -> None:
        """Progress of one destination, below that of the others."""
        plan = destination.plan
        if plan is None or not plan.objects:
            return
        several = len(self.to) > 1
        progress = Progress(
            f"{self.name} → {destination.name}" if several else f"replicate {self.name}",
            total_bytes=plan.bytes,
            total_items=plan.objects,
            quiet=self.options.quiet,
            beside=next(iter(self.progress.values()), None),
        )
        with self.turn:
            self.progress[destination.name] = self.shown.enter_context(progress)

    def _plan(self, destination: Destination, catalog: Catalog) -> None:
        plan = make_plan(destination, catalog, deletes=self.options.delete)
        outcome = self.outcomes[destination.name]
        outcome.to_copy, outcome.to_copy_bytes, outcome.tally = (
            plan.objects,
            plan.bytes,
            destination.lane.tally,
        )
        outcome.paid_bytes = self.paid.add(plan)
        if self.options.delete:
            gone = self._deletable(destination, catalog)
            outcome.to_delete = len(gone)
            outcome.deleted = len(make_way(destination, catalog, gone))

    def _deletable(self, destination: Destination, catalog: Catalog) -> list[str]:
        place, store = destination.name, destination.store
        return deletable(place, store, catalog, max_delete=self.options.max_delete)

    def _guarded(self, destination: Destination, step: Callable[[], None]) -> bool:
        """Run one step of one destination; its failure, of whatever kind, is that destination's alone."""
        try:
            step()
            return True
        except DatasyncError as error:
            if self._ended_by_stop(destination.name, error):
                return False
            failure = error
        except Exception as error:  # a defect must not pass for success because a thread ended with it
            log.exception("%s: %s", destination.name, self.name)
            failure = StoreError(
                f"{self.name} on {destination.name}: {type(error).__name__}: {error}; nothing is proven",
                mend="run again; if it stays, report it with what is logged above",
            )
        destination.lane.fail(failure)
        self.outcomes[destination.name].error = failure
        return False

    def _ended_by_stop(self, place: str, error: DatasyncError) -> bool:
        """Whether a place is only unfinished: what failed would have been tried again but for the stop."""
        if not self.stop.event.is_set() or not isinstance(error, TransientError):
            return False
        log.info("%s: stopped in the middle of: %s", place, error.message)
        self.outcomes[place].state = STOPPED
        return True

    def _group(self, group: list[Destination], catalog: Catalog) -> None:
        """Bring destinations that keep step to their end; who lags gets a thread of its own."""
        threads: list[threading.Thread] = []
        for phase in _PHASES:
            self._move(group, phase, catalog)
            slow = self._lagging(group)
            group = [destination for destination in group if destination not in slow]
            threads += [self._thread(self._alone, destination, catalog, phase) for destination in slow]
        threads += [self._thread(self._finish, destination, catalog) for destination in group]
        for thread in threads:
            thread.join()

    def _thread(self, step: Callable[..., None], destination: Destination, *args: object) -> threading.Thread:
        def guarded() -> None:
            self._guarded(destination, partial(step, destination, *args))

        thread = threading.Thread(target=inheriting(guarded), name=f"end of {destination.name}")
        thread.start()
        return thread

    def _move(self, group: list[Destination], phase: str, catalog: Catalog) -> None:
        wanted: dict[int, list[Lane]] = {}
        if len(group) > 1:
            for destination in group:
                assert destination.plan is not None
                for row in destination.plan.rows[getattr(destination.plan, phase)].tolist():
                    wanted.setdefault(row, []).append(destination.lane)
        everyone = [destination.lane for destination in group]

        def work() -> Iterator[tuple[Item, list[Lane]]]:
            for destination in group:
                plan = destination.plan
                assert plan is not None
                for item in items(plan.table, getattr(plan, phase), catalog.hashes, rows=plan.rows):
                    lanes = wanted.get(item.row, everyone)
                    # What several want comes round with the first of them.
                    if lanes[0] is destination.lane:
                        yield item, lanes

        if self.options.engine == "ray":
            spread.spread(self.mover, work(), everyone, self.stop)
        else:
            self.mover.move(work())

    def _lagging(self, group: list[Destination]) -> list[Destination]:
        """Those that still have something to do when all others have nothing left, or had it for a while."""
        until = time.monotonic() + _LAG_SECONDS
        with self.turn:
            while True:
                busy = [d for d in group if d.lane.alive and (not d.lane.idle or d.lane.deferred)]
                waiting = [d for d in busy if not d.lane.deferred]
                if len(group) == 1 or not waiting:
                    break
                if len(busy) < len(group) and time.monotonic() > until:
                    break
                self.turn.wait(0.2)
        if len(group) == 1:
            self._alone_moves(group[0])
            return []
        return busy

    def _alone(self, destination: Destination, catalog: Catalog, phase: str) -> None:
        """The rest of the way of one destination, from the end of a phase."""
        self._alone_moves(destination)
        for later in _PHASES[_PHASES.index(phase) + 1 :]:
            self._move([destination], later, catalog)
            self._alone_moves(destination)
        self._finish(destination, catalog)

    def _alone_moves(self, destination: Destination) -> None:
        """Everything that was put off for a destination, until nothing is."""
        lane = destination.lane
        lane.drain()
        while lane.alive and lane.deferred:
            again, lane.deferred = lane.deferred, []
            self.mover.move((item, [lane]) for item in again)
            lane.drain()

    def _finish(self, destination: Destination, catalog: Catalog) -> None:
        """Publish a destination that has everything; say why not, otherwise."""
        lane, outcome = destination.lane, self.outcomes[destination.name]
        outcome.source_bytes_read = self.mover.read_bytes
        tally = lane.tally
        error = lane.error or self.mover.error
        if error is None and lane.tally.failed:
            key, first = lane.tally.failures[0]
            error = type(first)(
                f"{self.name} on {destination.name}: {lane.tally.failed:,} of {outcome.to_copy:,} objects"
                f" could not be copied; nothing was published. The first is {key}:\n  {first.message}",
                mend=first.mend or "run again",
            )
        if error is None and self.stop.event.is_set():
            outcome.state = STOPPED
            return
        if error is not None:
            outcome.error = error
            return

        def end() -> None:
            final = self._complete(catalog, destination)
            gone = self._deletable(destination, final) if self.options.delete else []
            old = destination.receipt
            same = (
                old is not None and old.whole and old.version == final.version and not (tally.copied or gone)
            )
            news = self.mover.found or destination.past.files or destination.mended
            if not (same and final.kind == TREE and not news):
                outcome.receipt = publish(destination, final, delete=gone, signature=self.signature)
            else:
                outcome.receipt = old
            outcome.state, outcome.version = ALREADY if same else PUBLISHED, final.version
            outcome.objects, outcome.bytes = final.objects, final.total_bytes
            outcome.deleted += len(gone)

        if self._guarded(destination, end):
            destination.close()  # the next run may begin, whatever the other destinations still do
        outcome.seconds = time.monotonic() - self.began

    def _complete(self, catalog: Catalog, destination: Destination) -> Catalog:
        """The catalog with every digest that was learnt while copying, here or by an unfinished run."""
        if catalog.version is not None and not self.mover.tags:
            return catalog
        import pyarrow as pa

        table = catalog.table
        columns = {name: table[name].to_pylist() for name in ("bytes", "sha256", "crc32c", "tag")}
        with self.turn:
            found, changed = dict(self.mover.found), dict(self.mover.tags)
        for row, (tag, size) in changed.items():
            columns["tag"][row], columns["bytes"][row] = tag, size
        for row, proof in found.items():
            columns["sha256"][row], columns["crc32c"][row] = bytes.fromhex(proof.sha256), proof.crc32c
        keys = table["key"]
        for row, sha in enumerate(columns["sha256"]):
            if sha is None:
                done = destination.past.done.get(keys[row].as_py())
                if done is None:
                    raise StoreError(f"{keys[row].as_py()}: its digest was not learnt", mend="run again")
                columns["sha256"][row], columns["crc32c"][row] = bytes.fromhex(done.sha256), done.crc32c
        for name, values in columns.items():
            at = table.schema.get_field_index(name)
            table = table.set_column(
                at, table.schema.field(name), pa.array(values, table.schema.field(name).type)
            )
        final = replace(catalog, table=table, version=None, manifest=None)
        settle(final)
        return final

    def _advance(self, place: str, count: int, objects: int) -> None:
        if place in self.progress:
            self.progress[place].advance(bytes=count, items=objects)

    def _new_mover(self) -> Mover:
        return Mover(
            [self.source, *self.fallbacks],
            turn=self.turn,
            stop=self.stop.event,
            retry_seconds=self.options.retry_seconds,
        )
