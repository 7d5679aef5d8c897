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
from functools import partial

from datasync.errors import DatasyncError, StoreError, TransientError, UsageError
from datasync.ops import receipts
from datasync.ops.judgement import Signature, signature_of
from datasync.ops.receipts import Receipt
from datasync.replicate import spread
from datasync.replicate.catalog import TREE, Catalog, check_name, describe, learn
from datasync.replicate.destination import (
    Destination,
    check_origin,
    compared,
    deletable,
    in_doubt,
    make_plan,
    make_way,
    publish,
)
from datasync.replicate.lane import Lane
from datasync.replicate.learnt import Paid, completed
from datasync.replicate.limits import identity
from datasync.replicate.opening import LAG_SECONDS, Opening
from datasync.replicate.options import ALREADY, PLANNED, PUBLISHED, STOPPED, Options, Outcome, Stop
from datasync.replicate.plan import Item, items
from datasync.replicate.transfer import Mover
from datasync.replicate.unchanged import unchanged
from datasync.storage.base import Store
from datasync.storage.retry import inheriting, patient
from shards.progress import Progress

log = logging.getLogger(__name__)

_PHASES = ("first", "last", "marks")


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


def _already(outcome: Outcome, receipt: Receipt) -> None:
    outcome.state = ALREADY
    outcome.kind, outcome.version, outcome.receipt = receipt.kind, receipt.version, receipt
    outcome.objects, outcome.bytes, outcome.samples = receipt.objects, receipt.bytes, receipt.samples


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
        self.opening = Opening(
            name,
            {} if options.dry_run else to,
            options,
            turn=self.turn,
            stop=stop.event,
            failed=self._failed,
            on_progress=self._advance,
        )
        self.paid = Paid()

    def go(self) -> None:
        options = self.options
        with self.opening.asked():
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
            for place in self.to:
                self._describe(place, catalog)
            opened, late = self.opening.all(partial(self._alone_from_the_start, catalog=catalog))
            for destination in opened:
                self._guarded(destination, partial(learn, catalog, destination.store, destination.receipt))
                self._describe(destination.name, catalog)
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
                check_origin(place, receipt, catalog, akin=self.options.akin)
                learn(catalog, store, receipt)
                plan = compared(catalog, store, receipt, {})
                outcome.to_compare = in_doubt(store, plan)
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
        outcome.kind, outcome.version, outcome.left_out = catalog.kind, catalog.version, catalog.left_out
        outcome.objects, outcome.bytes, outcome.samples = (
            catalog.objects,
            catalog.total_bytes,
            catalog.samples,
        )
        return outcome

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
        check_origin(destination.name, destination.receipt, catalog, akin=self.options.akin)
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

    def _failed(self, place: str, error: DatasyncError) -> None:
        """A place that could not be opened."""
        if not self._ended_by_stop(place, error):
            self.outcomes[place].error = error

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
        until = time.monotonic() + LAG_SECONDS
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
        settled = tally.copied + len(tally.adopted)
        if error is None and settled < outcome.to_copy:  # nothing should lead here, and nothing may pass
            error = StoreError(
                f"{self.name} on {destination.name}: {settled:,} of {outcome.to_copy:,} objects are there;"
                " nothing was published",
                mend="run again; if it stays, report it",
            )
        if error is not None:
            outcome.error = error
            return

        def end() -> None:
            final = completed(catalog, self.mover, destination.past)
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
