"""`repair`: bring back what is bad or missing, from any replica that proves good.

What is damaged is what the last `verify` recorded; objects whose names are gone since then are found by a
listing. Every object is read from the replicas in turn until one gives bytes with the right digest. The
receipt turns ``whole`` again when nothing is left. A dataset's home has no receipt and no record of damage:
there, everything is read first, against the manifest that its index names.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from datasync.errors import CorruptError, DatasyncError, NotFoundError, StoreError, UsageError
from datasync.ops import published, receipts
from datasync.ops.judgement import described, index_fault, manifest_fault, restore_manifest, signature_fault
from datasync.ops.signatures import check_digest
from datasync.replicate import journal as journals
from datasync.replicate.catalog import tag_of
from datasync.replicate.destination import damage
from datasync.replicate.journal import Journal
from datasync.replicate.lane import Lane
from datasync.replicate.layout import INDEX, SIGNATURES, damage_key, manifest_key, signature_key
from datasync.replicate.lease import held
from datasync.replicate.options import Stop
from datasync.replicate.plan import items
from datasync.replicate.retry import RETRY_SECONDS, retrying
from datasync.replicate.transfer import Mover
from datasync.replicate.verify import expected, verify
from datasync.storage.base import Store
from shards.progress import Progress

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Repair:
    """What `repair` did.

    Args:
        name, url, version (str): What was repaired.
        damaged (int): Objects that were bad or missing.
        repaired (int): Objects brought back.
        repaired_bytes (int): Their bytes.
        left (dict[str, DatasyncError]): Objects that no replica could give, with the reason.
        finished (bool): False when the run was stopped.
    """

    name: str
    url: str
    version: str
    damaged: int = 0
    repaired: int = 0
    repaired_bytes: int = 0
    left: dict[str, DatasyncError] = field(default_factory=dict)
    finished: bool = True


def repair(
    store: Store,
    replicas: Sequence[Store],
    *,
    name: str,
    stop: Stop | None = None,
    quiet: bool = False,
    retry_seconds: float = RETRY_SECONDS,
    public: str | Path | None = None,
) -> Repair:
    """Fetch bad and missing objects of a copy.

    Args:
        store (Store): The root of the copy.
        replicas (Sequence[Store]): Other places that may have them, best first.
        name (str): For people.
        stop (Stop | None): Ends the run cleanly when asked.
        quiet (bool): No progress. Default: ``False``.
        retry_seconds (float): How long a failing place is tried. Default: ``120``.
        public (str | Path | None): The key that must have signed its index.

    Raises:
        NotFoundError: No replica has its manifest; or there is neither a receipt nor a dataset that was
            sharded there.
        BusyError: A replication is at work there.
    """
    stop = stop or Stop()
    if not replicas:
        raise StoreError(
            f"there is no other replica of {name} to repair from", mend="name one: --from cluster-a"
        )
    with held(store, f"repair {name}") as lease:
        receipt, damaged = receipts.recovered(store)
        proof = receipt or published.receipt_of_home(store, name)
        if proof is None:
            raise NotFoundError(
                f"{store.url} has no receipt: nothing says what should be there",
                mend="replicate it (datasync replicate); that also looks at what is in place",
            )
        result = Repair(name=name, url=store.url, version=proof.version)
        _repair_manifest(store, replicas, proof, result)
        table, _ = expected(store, name, receipt)
        if receipt is not None:
            wanted = _wanted(store, table, receipt)
        else:
            wanted = {finding.key for finding in verify(store, name=name, stop=stop, quiet=quiet).findings}
        result.damaged += len(wanted) + damaged
        result.repaired += damaged
        if INDEX in wanted and receipt is not None:
            _repair_index(store, replicas, receipt, result)
        _repair_signature(store, replicas, proof, result, public)
        turn = threading.Condition()
        journal = Journal(store, lease.token)
        rows = [row for row, key in enumerate(table["key"].to_pylist()) if key in wanted]
        if rows:
            import numpy as np

            todo = list(items(table, np.array(rows, np.int64)))
            total = sum(item.bytes for item in todo)
            with Progress(
                f"repair {name}", total_bytes=total, total_items=len(todo), quiet=quiet
            ) as progress:
                lane = Lane(
                    store.url,
                    store,
                    journal,
                    turn=turn,
                    stop=stop.event,
                    read_back=True,
                    retry_seconds=retry_seconds,
                    on_progress=lambda count, objects: progress.advance(bytes=count, items=objects),
                )
                # What is in place may be good after all: a listing that came late, a person who put it back.
                lane.present = {item.key: False for item in todo}
                mover = Mover(replicas, turn=turn, stop=stop.event, retry_seconds=retry_seconds)
                mover.move((item, [lane]) for item in todo)
                lane.drain()
                lane.close()
            if lane.error is not None:
                raise lane.error
            result.repaired += lane.tally.copied + len(lane.tally.adopted)
            result.repaired_bytes += lane.tally.copied_bytes
            result.left.update(lane.tally.failures)
        result.finished = not stop.event.is_set()
        lease.check()
        if receipt is not None:
            _record(store, receipt, result)
        journal.clear(journals.load(store))
        return result


def _wanted(store: Store, table: object, receipt: receipts.Receipt) -> set[str]:
    """Keys to bring back: those recorded, and those that a listing lacks or shows with another size."""
    import pyarrow as pa

    assert isinstance(table, pa.Table)
    there = {info.key: info.bytes for info in retrying(lambda: list(store.list()))}
    wanted = set(damage(store, receipt.version))
    for key, size in zip(table["key"].to_pylist(), table["bytes"].to_pylist(), strict=True):
        if there.get(key) != size:
            wanted.add(key)
    if index_fault(store, receipt) is not None:
        wanted.add(INDEX)
    return wanted


def _repair_manifest(
    store: Store, replicas: Sequence[Store], receipt: receipts.Receipt, result: Repair
) -> None:
    """The manifest says what should be there; without it nothing else can be repaired."""
    why = manifest_fault(store, receipt.version, receipt.manifest)
    if why is None:
        return
    if not restore_manifest(store, receipt.version, replicas):
        raise NotFoundError(
            f"{store.url}: {why}, and no replica has it",
            mend="replicate again (datasync replicate): it writes the manifest anew",
        )
    log.warning("%s: %s; it was put back", store.url, why)
    result.damaged += 1
    result.repaired += 1


def _repair_signature(
    store: Store,
    replicas: Sequence[Store],
    receipt: receipts.Receipt,
    result: Repair,
    public: str | Path | None,
) -> None:
    """The signature that is required, from whichever replica has it."""
    if public is None or receipt.index is None:
        return
    digest = str(receipt.index["sha256"])
    why = signature_fault(store, digest, public)
    if why is None:
        return
    key = signature_key(digest)
    result.damaged += 1
    for replica in replicas:
        try:
            _, data = check_digest(replica, digest, public)
        except UsageError:
            raise
        except DatasyncError as error:
            log.info("%s: %s", replica.url, error)
            continue
        retrying(partial(store.write, key, data))
        result.repaired += 1
        return
    result.left[key] = CorruptError(
        why, mend="if the index is right, sign it (datasync sign); then replicate again"
    )


def _repair_index(store: Store, replicas: Sequence[Store], receipt: receipts.Receipt, result: Repair) -> None:
    """The index must be the one that the receipt proves; a newer one at a replica is not this version's."""
    assert receipt.index is not None
    for replica in replicas:
        try:
            data = retrying(partial(replica.read, INDEX))
        except DatasyncError as error:
            log.info("%s: %s", replica.url, error)
            continue
        if hashlib.sha256(data).hexdigest() == receipt.index["sha256"]:
            retrying(partial(store.write, INDEX, data))
            result.repaired += 1
            result.repaired_bytes += len(data)
            return
    result.left[INDEX] = NotFoundError(
        f"no replica has the index of version {receipt.version[:12]}…",
        mend="replicate again to get the newest version",
    )


def _record(store: Store, receipt: receipts.Receipt, result: Repair) -> None:
    left = [key for key in result.left if not key.startswith(SIGNATURES)]  # that is judged where it lies
    if left or not result.finished:
        if result.finished:
            document = {"found": receipts.now(), "damaged": sorted(left)}
            retrying(
                lambda: store.write(
                    damage_key(receipt.version), json.dumps(document, ensure_ascii=False).encode()
                )
            )
            receipts.write(store, replace(receipt, state=receipts.DAMAGED))
        return
    index = receipt.index
    if index is not None:
        index = {**index, "tag": tag_of(store, store.stat(INDEX))}
    manifest = described(store, store.stat(manifest_key(receipt.version)))
    receipts.write(store, replace(receipt, state=receipts.WHOLE, index=index, manifest=manifest))
    store.delete([damage_key(receipt.version)])
