"""`verify`: prove that a copy still is what its manifest says, and record what is not.

    quick     every object is there with its size                      one listing
    sample    quick, and a share of the objects is read and hashed     the next share at the next run
    full      quick, and every object is read and hashed

A sample is a stripe: objects are spread over n stripes by their digest, and each run takes the stripe after
the last one, so that n runs have read everything. Finished work is recorded at the place, and a run that was
killed goes on from there. What is bad goes to quarantine, so that its name does not lie to a reader; what is
bad or missing turns the receipt to ``damaged`` and is listed for `repair` and for the next `replicate`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasync.errors import CorruptError, DatasyncError, DeniedError, NotFoundError, UsageError
from datasync.ops import receipts
from datasync.ops.judgement import manifest_fault, signature_fault
from datasync.ops.receipts import Receipt
from datasync.replicate.catalog import TREE, Catalog, describe, with_tags
from datasync.replicate.destination import damage
from datasync.replicate.lane import quarantine
from datasync.replicate.layout import INDEX, SCRUB, damage_key, is_internal, manifest_key, signature_key
from datasync.replicate.lease import held
from datasync.replicate.limits import concurrency_of
from datasync.replicate.options import Stop
from datasync.replicate.plan import Item, beside, items, schema
from datasync.replicate.retry import retrying
from datasync.storage.base import Store
from datasync.storage.retry import inheriting
from shards.digests import Digest
from shards.manifest import Manifest
from shards.progress import Progress

if TYPE_CHECKING:
    import pyarrow as pa

    from datasync.replicate.plan import Rows

log = logging.getLogger(__name__)

QUICK, SAMPLE, FULL = "quick", "sample", "full"
_READERS = 16
_RECORD_EVERY = 256
_BATCH = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """An object that is not as it should be.

    Args:
        key (str): Which.
        problem (str): ``missing``, ``size``, ``digest`` or ``signature``.
        message (str): What was expected and what was found.
        quarantined (str | None): Where the bad object is now.
    """

    key: str
    problem: str
    message: str
    quarantined: str | None = None


@dataclass(slots=True, kw_only=True)
class Report:
    """What `verify` found.

    Args:
        name, url, version (str): What was looked at.
        mode (str): ``quick``, ``sample`` or ``full``.
        objects, bytes (int): Of the version.
        hashed, hashed_bytes (int): Read and hashed, by this run or the killed one that it continues.
        findings (list[Finding]): What is wrong.
        extra (int): Objects that no manifest names; they are left alone.
        finished (bool): False when the run was stopped.
    """

    name: str
    url: str
    version: str
    mode: str
    objects: int
    bytes: int
    hashed: int = 0
    hashed_bytes: int = 0
    findings: list[Finding] = field(default_factory=list)
    extra: int = 0
    finished: bool = True

    @property
    def good(self) -> bool:
        return not self.findings


def verify(
    store: Store,
    *,
    name: str,
    mode: str = FULL,
    share: float = 1.0,
    stop: Stop | None = None,
    quiet: bool = False,
    on_finding: Callable[[Finding], None] | None = None,
    public: str | Path | None = None,
) -> Report:
    """Check a copy against its manifest.

    Args:
        store (Store): The root of the copy.
        name (str): For people.
        mode (str): ``quick``, ``sample`` or ``full``. Default: ``full``.
        share (float): Of the objects that a sample reads, above 0 and below 1.
        stop (Stop | None): Ends the run cleanly when asked.
        quiet (bool): No progress. Default: ``False``.
        on_finding (Callable | None): Called with each finding as it is made.
        public (str | Path | None): The key that must have signed its index.

    With keys that may only read, what is found is told and not recorded.

    Raises:
        NotFoundError: Nothing is there that says what should be.
        BusyError: A replication is at work there.
    """
    if mode not in (QUICK, SAMPLE, FULL) or (mode == SAMPLE and not 0 < share <= 1):
        raise UsageError(f"cannot verify {share:.0%} by {mode}", mend="give a share between 0% and 100%")
    stop = stop or Stop()
    receipt = receipts.read(store)
    if receipt is None:
        table, version = expected(store, name, None)
        # Nothing of ours is there to be kept true, so nothing is written either.
        return _Scrub(store, name, table, version, None, mode, share, stop, quiet, on_finding, public).run()
    with contextlib.ExitStack() as stack:
        keeps = True
        try:
            stack.enter_context(held(store, f"verify {name}"))
        except DeniedError as error:
            log.warning("nothing is recorded and nothing moved to quarantine: %s", error.message)
            keeps = False
        receipt = receipts.read(store)
        if receipt is not None:
            why = manifest_fault(store, receipt.version, receipt.manifest)
            if why is not None:
                return _without_manifest(store, receipt, mode, why, on_finding)
        table, version = expected(store, name, receipt)
        return _Scrub(
            store, name, table, version, receipt, mode, share, stop, quiet, on_finding, public, keeps=keeps
        ).run()


def _without_manifest(
    store: Store, receipt: Receipt, mode: str, why: str, on_finding: Callable[[Finding], None] | None
) -> Report:
    """All that can be found where nothing says what else there should be."""
    key = manifest_key(receipt.version)
    problem = "missing" if why.endswith("missing") else "digest"
    finding = Finding(key=key, problem=problem, message=f"{why}; without it nothing can be checked")
    if on_finding is not None:
        on_finding(finding)
    return Report(
        name=receipt.name,
        url=store.url,
        version=receipt.version,
        mode=mode,
        objects=receipt.objects,
        bytes=receipt.bytes,
        findings=[finding],
    )


def expected(store: Store, name: str, receipt: Receipt | None) -> tuple[pa.Table, str]:
    """What should be at a place: by its receipt's manifest, else by its own index.

    Raises:
        NotFoundError: Neither is there.
        FormatError: The index and the receipt name different versions, or one is damaged.
    """
    if receipt is not None:
        key = manifest_key(receipt.version)
        data = retrying(lambda: store.read(key))
        manifest = Manifest.from_parquet(data, where=f"{store.url}/{key}")
        if manifest.version != receipt.version:
            raise CorruptError(
                f"{store.url}/{key} has the content of version {manifest.version[:12]}…",
                mend="replicate again: it writes the manifest anew",
            )
        return with_tags(manifest.table), receipt.version
    try:
        catalog = describe(store, name)
    except NotFoundError as error:
        raise NotFoundError(
            f"there is no copy of {name} to verify at {store.url}: {error.message}",
            mend="check the name and the cluster (datasync status), or replicate it there first",
        ) from error
    if catalog.kind == TREE:
        raise NotFoundError(
            f"{store.url} has neither an index nor a receipt: nothing says what should be there",
            mend="replicate it first; a receipt is what a copy is checked against",
        )
    import pyarrow as pa

    table = pa.Table.from_batches(list(catalog.batches()), schema())
    return table, catalog.version or _index_version(catalog)


def _index_version(catalog: Catalog) -> str:
    """A name for a version whose digests are not all known: that of its index."""
    assert catalog.index_sha256 is not None
    return catalog.index_sha256


class _Scrub:
    """One run of `verify` over one copy."""

    def __init__(
        self,
        store: Store,
        name: str,
        table: pa.Table,
        version: str,
        receipt: Receipt | None,
        mode: str,
        share: float,
        stop: Stop,
        quiet: bool,
        on_finding: Callable[[Finding], None] | None,
        public: str | Path | None,
        *,
        keeps: bool = True,
    ) -> None:
        import pyarrow.compute as pc

        self.store, self.table, self.receipt, self.stop, self.quiet = store, table, receipt, stop, quiet
        total = int(pc.sum(table["bytes"]).as_py() or 0)
        self.report = Report(
            name=name, url=store.url, version=version, mode=mode, objects=table.num_rows, bytes=total
        )
        self.stripes = max(round(1 / share), 1) if mode == SAMPLE else 1
        last = (receipt.verified or {}).get("stripe", -1) if receipt else -1
        self.stripe = (last + 1) % self.stripes
        self.hashes = {} if receipt is not None else describe(store, name).hashes
        self.run_name = f"{SCRUB}{version[:16]}-{mode}-{self.stripes}-{self.stripe}"
        self._on_finding = on_finding
        self._public = public
        self._keeps = keeps and receipt is not None
        self._lock = threading.Lock()
        self._passed: list[str] = []
        self._files = 0

    def run(self) -> Report:
        report = self.report
        missing, wrong, good = self._compare()
        for item in items(self.table, missing, self.hashes):
            self._found(Finding(key=item.key, problem="missing", message=f"{item.key} is missing"))
        self._index()
        self._signature()
        done = self._resume()
        for place, found in wrong:
            (item,) = items(self.table, place, self.hashes)
            self._bad(item, "size", f"{item.key} has {found:,} bytes, expected {item.bytes:,}")
        if report.mode != QUICK:
            self._hash_all(good, done)
        report.finished = not self.stop.event.is_set()
        self._record()
        return report

    def _compare(self) -> tuple[Rows, list[tuple[Rows, int]], Rows]:
        """Rows that a listing lacks, rows that it shows with another size and with which, and the others.

        The listing is held as columns and both are walked side by side, a batch at a time.
        """
        import numpy as np
        import pyarrow.compute as pc

        missing, wrong, good, offset = [], [], [], 0
        for batch, there in beside(self.table.to_batches(max_chunksize=_BATCH), self._listing()):
            at = pc.index_in(batch["key"], value_set=there["key"].combine_chunks())
            sizes = there["bytes"].take(at)
            absent = pc.is_null(at).to_numpy(zero_copy_only=False)
            same = pc.fill_null(pc.equal(sizes, batch["bytes"]), False).to_numpy()
            missing.append(offset + np.flatnonzero(absent))
            good.append(offset + np.flatnonzero(same))
            for place in np.flatnonzero(~absent & ~same):
                wrong.append((np.array([offset + place], np.int64), sizes[int(place)].as_py()))
            self.report.extra += there.num_rows - int((~absent).sum())
            offset += batch.num_rows
        nothing = np.zeros(0, np.int64)
        return np.concatenate([nothing, *missing]), wrong, np.concatenate([nothing, *good])

    def _listing(self) -> list[pa.RecordBatch]:
        """Keys and sizes at the place, but for this tool's own files."""
        import pyarrow as pa

        def listed() -> list[pa.RecordBatch]:
            batches, part = [], []
            for info in self.store.list():
                if not is_internal(info.key) and info.key != INDEX:
                    # A name that is not UTF-8 is in no manifest, so however it is written it is one more.
                    part.append((info.key.encode(errors="surrogateescape"), info.bytes))
                if len(part) == _BATCH:
                    batches.append(columns(part))
                    part = []
            return [*batches, columns(part)]

        def columns(part: list[tuple[bytes, int]]) -> pa.RecordBatch:
            keys, sizes = zip(*part, strict=True) if part else ((), ())
            arrays = [pa.array(keys, pa.binary()).cast(pa.string(), safe=False), pa.array(sizes, pa.uint64())]
            return pa.RecordBatch.from_arrays(arrays, ["key", "bytes"])

        return retrying(listed)

    def _is_due(self, item: Item) -> bool:
        """Whether this run reads an object; names and sizes are looked at always."""
        if self.stripes == 1:
            return True
        name = item.sha256 or hashlib.sha256(item.key.encode()).hexdigest()
        return int(name[:8], 16) % self.stripes == self.stripe

    def _index(self) -> None:
        """The index is not in the manifest; the receipt has its digest."""
        wanted = self.receipt.index if self.receipt is not None else None
        if wanted is None:
            return
        try:
            found = hashlib.sha256(retrying(lambda: self.store.read(INDEX))).hexdigest()
        except NotFoundError:
            self._found(Finding(key=INDEX, problem="missing", message=f"{INDEX} is missing"))
            return
        if found != wanted["sha256"]:
            message = f"{INDEX} has sha256 {found}, the receipt says {wanted['sha256']}"
            self._found(Finding(key=INDEX, problem="digest", message=message))

    def _signature(self) -> None:
        """The index in place must be signed, where a key is required; that is told and not recorded."""
        if self._public is None:
            return
        try:
            digest = hashlib.sha256(retrying(lambda: self.store.read(INDEX))).hexdigest()
        except NotFoundError:
            return  # told already, or a tree
        why = signature_fault(self.store, digest, self._public)
        if why is not None:
            self._found(Finding(key=signature_key(digest), problem="signature", message=why))

    def _hash_all(self, rows: Rows, done: set[str]) -> None:
        import numpy as np
        import pyarrow as pa

        if self.stripes > 1:
            due = [item.row for item in items(self.table, rows) if self._is_due(item)]
            rows = np.array(due, np.int64)
        slots, lock = concurrency_of(self.store), threading.Lock()
        total = int(self.table["bytes"].take(pa.array(rows)).to_numpy().sum())
        label = f"verify {self.report.name}"
        todo = items(self.table, rows, self.hashes)
        with Progress(label, total_bytes=total, total_items=len(rows), quiet=self.quiet) as progress:

            def reader() -> None:
                while not self.stop.event.is_set():
                    with lock:
                        item = next(todo, None)
                    if item is None:
                        return
                    if item.key not in done:
                        with slots.slot(item.bytes, self.store.url):
                            self._check(item)
                    with self._lock:
                        self.report.hashed += 1
                        self.report.hashed_bytes += item.bytes
                    progress.advance(bytes=item.bytes, items=1)

            with ThreadPoolExecutor(_READERS) as pool:
                for future in [pool.submit(inheriting(reader)) for _ in range(_READERS)]:
                    future.result()

    def _check(self, item: Item) -> None:
        names = {"sha256", *item.hashes} if item.sha256 or not item.hashes else set(item.hashes)

        def read() -> dict[str, str]:
            digest = Digest(names)
            with self.store.stream(item.key) as pieces:
                for piece in pieces:
                    digest.update(piece)
            return digest.hexdigests()

        try:
            found = retrying(read, stop=self.stop.event)
        except NotFoundError:
            self._found(Finding(key=item.key, problem="missing", message=f"{item.key} is missing"))
            return
        wanted = {**item.hashes, **({"sha256": item.sha256} if item.sha256 else {})}
        for algorithm, digest in wanted.items():
            if found[algorithm] != digest.lower():
                message = (
                    f"{item.key} does not match the {'manifest' if item.sha256 else 'index'}\n"
                    f"  expected {algorithm} {digest}  got {found[algorithm]}"
                )
                self._bad(item, "digest", message)
                return
        self._pass(item.key)

    def _bad(self, item: Item, problem: str, message: str) -> None:
        """Record a bad object, and move it away where we are the keepers of the copy."""
        where = None
        if self._keeps:
            try:
                where = quarantine(self.store, item.key)
            except DatasyncError as error:
                log.warning("%s could not be moved to quarantine: %s", item.key, error)
        self._found(Finding(key=item.key, problem=problem, message=message, quarantined=where))

    def _found(self, finding: Finding) -> None:
        with self._lock:
            self.report.findings.append(finding)
        if self._on_finding is not None:
            self._on_finding(finding)

    # Resuming

    def _pass(self, key: str) -> None:
        with self._lock:
            self._passed.append(key)
            if len(self._passed) < _RECORD_EVERY:
                return
            passed, self._passed = self._passed, []
            self._files += 1
            name = f"{self.run_name}-{self._files:06d}.jsonl"
        self._save(name, passed)

    def _save(self, name: str, passed: list[str]) -> None:
        if self._keeps and passed:
            data = "".join(json.dumps(key) + "\n" for key in passed).encode()
            retrying(lambda: self.store.write(name, data))

    def _resume(self) -> set[str]:
        """What the killed run before this one had found good."""
        done: set[str] = set()
        if not self._keeps or self.report.mode == QUICK:
            return done
        for info in self.store.list(self.run_name):
            self._files += 1
            try:
                done.update([str(json.loads(line)) for line in self.store.read(info.key).splitlines()])
            except ValueError:
                log.warning("%s/%s is damaged; what it names is read again", self.store.url, info.key)
        return done

    def _record(self) -> None:
        """Keep the receipt true."""
        report, receipt = self.report, self.receipt
        if receipt is None or not self._keeps:
            return
        if not report.finished:
            self._save(f"{self.run_name}-{self._files + 1:06d}.jsonl", self._passed)
        # What an earlier run found and this one did not look at is still damaged.
        damaged = {finding.key for finding in report.findings if finding.problem != "signature"}
        if not receipt.whole and (report.mode != FULL or not report.finished):
            damaged |= set(damage(self.store, receipt.version))
        verified: dict[str, Any] | None = receipt.verified
        if report.finished:
            verified = {
                "at": receipts.now(),
                "mode": report.mode,
                "objects": report.hashed,
                "bytes": report.hashed_bytes,
                "stripe": self.stripe
                if report.mode == SAMPLE
                else (receipt.verified or {}).get("stripe", -1),
                "stripes": self.stripes,
                "missing": sum(finding.problem == "missing" for finding in report.findings),
                "bad": sum(finding.problem in ("size", "digest") for finding in report.findings),
            }
        if damaged:
            document = {"found": receipts.now(), "damaged": sorted(damaged)}
            data = json.dumps(document, ensure_ascii=False).encode()
            retrying(lambda: self.store.write(damage_key(receipt.version), data))
        state = receipts.DAMAGED if damaged else receipts.WHOLE
        fresh = replace(receipt, state=state, verified=verified)
        retrying(lambda: receipts.write(self.store, fresh))
        if report.finished:
            if not damaged:
                self.store.delete([damage_key(receipt.version)])
            self.store.delete([info.key for info in self.store.list(SCRUB)])
