"""One destination of a run: opened under its lease, planned, and published when it is complete.

    open       take the lease · read the newest receipt, its manifest, the journal of an unfinished run
    plan       compare · look for objects that are in place without a record · adopt or abort old uploads
    publish    manifest ─► origins, adopted ─► index (conditional) ─► deletions ─► receipt ─► journal away

A reader at any instant sees the old index and everything it names, or the new one and everything it names.
"""

from __future__ import annotations

import heapq
import json
import logging
import socket
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasync.errors import (
    ConflictError,
    FormatError,
    NotFoundError,
    StoreError,
    UnsupportedError,
    UsageError,
)
from datasync.ops import receipts
from datasync.ops.judgement import Signature, described, manifest_fault, restore_manifest
from datasync.ops.receipts import Receipt
from datasync.replicate import journal as journals
from datasync.replicate.catalog import TREE, Catalog, origins, tag_of
from datasync.replicate.journal import Begun, Done, Journal
from datasync.replicate.lane import Lane
from datasync.replicate.layout import (
    INDEX,
    LEFTOVERS,
    MANIFESTS,
    adopted_key,
    damage_key,
    is_internal,
    manifest_key,
    origin_key,
)
from datasync.replicate.lease import TTL_SECONDS, Lease
from datasync.replicate.limits import endpoint_of, identity
from datasync.replicate.manifests import ManifestFile, StoredFile
from datasync.replicate.plan import Plan, compare, conflicts, in_place, items
from datasync.replicate.retry import RETRY_SECONDS, retrying
from datasync.storage.base import ObjectInfo, Store
from datasync.storage.keys import utf8
from datasync.storage.local import LocalStore
from datasync.storage.retry import LAST_SECONDS, inheriting, one_thing
from shards.version import __version__

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

_STAT_UP_TO = 64
_PROBE_SECONDS = 900.0  # finding out what a server can do takes seconds; what is older was left by a kill


@dataclass(slots=True, kw_only=True)
class Destination:
    """A destination that is under our lease.

    Args:
        name (str): For people.
        store (Store): The dataset's root there.
        lease (Lease): Held until `close`.
        receipt (Receipt | None): The newest one found.
        index (ObjectInfo | None): The index found, whose tag the new one must replace.
        past (Past): What the journal of an unfinished run says.
        lane (Lane): Its side of the transfer.
        plan (Plan | None): What it needs.
        mended (bool): Its records were found damaged or missing, and must be written anew.
    """

    name: str
    store: Store
    lease: Lease
    receipt: Receipt | None
    index: ObjectInfo | None
    past: journals.Past
    lane: Lane
    plan: Plan | None = None
    mended: bool = False
    started: str = field(default_factory=receipts.now)

    def close(self) -> None:
        """Give the lease back; the journal stays unless `publish` removed it.

        A place that was given up, or a run that is to end, is not waited for again and again.
        """
        seconds = None if self.lane.alive else LAST_SECONDS
        with one_thing(seconds, None, default=RETRY_SECONDS):
            self.lane.close()
            try:
                self.lane.journal.close()
            except StoreError as error:
                log.warning("the journal at %s could not be written: %s", self.store.url, error)
            self.lease.release()


def open_destination(
    name: str,
    store: Store,
    *,
    command: str,
    turn: threading.Condition,
    stop: threading.Event,
    read_back: bool = False,
    retry_seconds: float = RETRY_SECONDS,
    ttl: float = TTL_SECONDS,
    on_progress: Any = None,
) -> Destination:
    """Take the lease of a destination and read what is known about it.

    Raises:
        BusyError: Another run works there.
        StoreError: The place cannot be written or read.
    """
    lease = Lease(store, command, ttl=ttl)
    retrying(lease.acquire, seconds=retry_seconds)
    try:
        receipt, damaged = retrying(lambda: receipts.recovered(store), seconds=retry_seconds)
        lane = Lane(
            name,
            store,
            Journal(store, lease.token),
            turn=turn,
            stop=stop,
            read_back=read_back,
            retry_seconds=retry_seconds,
            on_progress=on_progress,
        )
        destination = Destination(
            name=name,
            store=store,
            lease=lease,
            receipt=receipt,
            index=_stat(store, INDEX),
            past=retrying(lambda: journals.load(store), seconds=retry_seconds),
            lane=lane,
            mended=damaged,
        )
    except BaseException:
        lease.release()
        raise
    lease.when_lost(lambda: lane.fail(lease.lost_error()))
    return destination


def proven(store: Store, receipt: Receipt | None) -> Iterator[pa.RecordBatch]:
    """The objects that a receipt proves to be at its place, without those that `verify` found damaged.

    Raises:
        FormatError: The manifest there is damaged.
    """
    if receipt is None or receipt.whole:
        yield from _named(store, receipt)
        return
    import pyarrow as pa
    import pyarrow.compute as pc

    damaged = pa.array(damage(store, receipt.version), pa.string())
    for batch in _named(store, receipt):
        yield batch.filter(pc.invert(pc.is_in(batch["key"], value_set=damaged)))


def _named(store: Store, receipt: Receipt | None) -> Iterator[pa.RecordBatch]:
    """The objects of a receipt's version, whatever became of them; none where its manifest is gone.

    Raises:
        FormatError: The manifest there is damaged.
    """
    if receipt is None:
        return
    try:
        manifest = ManifestFile.open(store, manifest_key(receipt.version))
    except NotFoundError as error:
        log.warning("%s: everything there is looked at again: %s", store.url, error)
        return
    yield from manifest.batches()


def compared(catalog: Catalog, store: Store, receipt: Receipt | None, done: Mapping[str, Done]) -> Plan:
    """What a place needs, given what its receipt and the journal of an unfinished run prove."""
    try:
        return compare(catalog.batches(), proven(store, receipt), done)
    except FormatError as error:
        log.warning("%s: everything there is looked at again: %s", store.url, error)
        return compare(catalog.batches(), None, done)


def damage(store: Store, version: str) -> list[str]:
    """Keys that `verify` found missing or bad.

    Raises:
        FormatError: The record of it is damaged.
    """
    try:
        data = retrying(lambda: store.read(damage_key(version)))
    except NotFoundError:
        return []
    try:
        return [str(key) for key in json.loads(data)["damaged"]]
    except (ValueError, TypeError, KeyError) as error:
        raise FormatError(
            f"{store.url}/{damage_key(version)} is damaged: it says what verify found",
            mend="read everything again (datasync verify --full): that writes it anew",
        ) from error


def make_plan(destination: Destination, catalog: Catalog, *, deletes: bool = False) -> Plan:
    """Compare, look at the place itself where proof is missing, adopt or abort uploads of killed runs.

    Args:
        destination (Destination): Under its lease.
        catalog (Catalog): What the source has.
        deletes (bool): What the source no longer has is removed. Default: ``False``.

    Raises:
        StoreError: The place is a folder, and cannot hold these names, or not beside what it has.
    """
    import numpy as np

    _check_names(destination.store, catalog)
    receipt = destination.receipt if _has_manifest(destination, catalog) else None
    plan = compared(catalog, destination.store, receipt, destination.past.done)
    lane = destination.lane
    foreign: set[str] = set()
    if len(plan.unproven):
        there = in_place(plan, _listing(destination.store, plan))
        foreign = there.keys() - written(destination.store, among=set(there)) if there else set()
        lane.present = {key: key in foreign for key, right in there.items() if right}
    destination.plan = plan
    if not deletes:
        _check_room(destination, catalog, plan)
    keys = (item.key for item in items(plan.table, np.arange(plan.objects)))
    lane.journal.set_out(key for key in keys if key not in foreign)
    _sweep_uploads(destination, catalog)
    return plan


def check_origin(
    place: str, receipt: Receipt | None, catalog: Catalog, *, akin: frozenset[tuple[str, str]] | None
) -> None:
    """Leave the copy of something else alone.

    Args:
        place (str): The destination, for people.
        receipt (Receipt | None): Its newest.
        catalog (Catalog): What is to be copied there.
        akin (frozenset | None): As in `Options`.

    Raises:
        UsageError: A tree would come over a dataset or the reverse, or, under a name that nobody gave, what
            is at another place.
    """
    if receipt is None:
        return
    source = receipt.source["endpoint"], receipt.source["url"]
    if source == identity(catalog.store):
        return
    other_kind = (receipt.kind == TREE) != (catalog.kind == TREE)
    if not other_kind and (akin is None or source in akin):
        return
    what = "the tree" if receipt.kind == TREE else "the dataset"
    raise UsageError(
        f"{catalog.name} on {place} is a copy of {what} at {receipt.source['url']}, and"
        f" {catalog.store.url} is another; nothing was copied",
        mend="give another name: --as NAME"
        if other_kind
        else f"give another name (--as NAME), or, if this is the same that has moved: --as {catalog.name}",
    )


def in_doubt(store: Store, plan: Plan) -> int:
    """How many objects of a plan are in place, with their size and without proof: a run compares them."""
    if not len(plan.unproven):
        return 0
    return sum(in_place(plan, _listing(store, plan)).values())


def make_way(destination: Destination, catalog: Catalog, gone: Iterable[str]) -> list[str]:
    """Remove, of what the source no longer has, the files whose names it needs for folders, and vice versa.

    A folder cannot hold both, so this comes before the copying; the receipt says that the old version is no
    longer whole, should the run end here.

    Args:
        destination (Destination): Planned.
        catalog (Catalog): What the source has.
        gone (Iterable[str]): What `--delete` may remove.
    """
    store, receipt = destination.store, destination.receipt
    blocking = in_the_way(store, catalog, gone)
    if not blocking:
        return []
    destination.lane.journal.removed(blocking)
    if receipt is not None:
        lost = sorted({*blocking, *(() if receipt.whole else damage(store, receipt.version))})
        document = {"found": receipts.now(), "damaged": lost}
        data = json.dumps(document, ensure_ascii=False).encode()
        retrying(lambda: store.write(damage_key(receipt.version), data))
        destination.receipt = replace(receipt, state=receipts.DAMAGED)
        retrying(partial(receipts.write, store, destination.receipt))
    retrying(lambda: store.delete(blocking))
    return blocking


def in_the_way(store: Store, catalog: Catalog, gone: Iterable[str]) -> list[str]:
    """Those of some keys that cannot be files beside the files of the source."""
    old = sorted(gone, key=utf8)
    if not old:
        return []
    inner = getattr(store, "store", store)
    folds = isinstance(inner, LocalStore) and folds_case(Path(inner.root))
    pairs = conflicts(heapq.merge(catalog.all_keys(), old, key=utf8), folds_case=folds)
    return sorted({key for pair in pairs for key in pair}.intersection(old))


def _has_manifest(destination: Destination, catalog: Catalog) -> bool:
    """Whether the manifest of the newest receipt is there; if it is not, the source may give it back."""
    store, receipt = destination.store, destination.receipt
    if receipt is None:
        return False
    why = manifest_fault(store, receipt.version, receipt.manifest)
    if why is None:
        return True
    destination.mended = True
    known = [catalog.manifest] if catalog.version == receipt.version and catalog.manifest is not None else []
    if restore_manifest(store, receipt.version, [*known, catalog.store]):
        log.warning("%s: %s; it was put back", store.url, why)
        return True
    log.warning("%s: %s; everything there is looked at again", store.url, why)
    return False


def _listing(store: Store, plan: Plan) -> Iterator[tuple[str, int]]:
    """Keys and sizes at the place: asked for one by one when few are wanted, else listed."""
    if len(plan.unproven) <= _STAT_UP_TO:
        wanted = [item.key for item in items(plan.table, plan.unproven)]
        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(inheriting(partial(_stat, store)), wanted))
        return iter([(info.key, info.bytes) for info in found if info is not None])

    def listed() -> Iterator[tuple[str, int]]:
        try:
            for info in store.list():
                if not is_internal(info.key):
                    yield info.key, info.bytes
        except NotFoundError:
            return

    return listed()


def _sweep_uploads(destination: Destination, catalog: Catalog) -> None:
    """Every upload that a killed run left here is either gone on with or aborted."""
    assert destination.plan is not None
    lane, recorded = destination.lane, destination.past.uploads
    try:
        open_uploads = {u.upload_id: u for u in retrying(lambda: list(destination.store.uploads()))}
    except UnsupportedError:
        return
    if not open_uploads:
        return
    import numpy as np

    plan, begun_keys = destination.plan, {u.key for u in open_uploads.values()}
    wanted = {
        item.key: item
        for item in items(plan.table, np.arange(plan.objects), rows=plan.rows)
        if item.key in begun_keys
    }
    ours = {key for key in catalog.all_keys() if key in begun_keys}
    for upload_id, info in sorted(open_uploads.items()):
        begun = recorded.get(upload_id)
        item = wanted.get(info.key)
        if begun is None:
            killed = info.key == INDEX or info.key.startswith(MANIFESTS)  # we hold the lease: nobody's now
            old_probe = is_internal(info.key) and time.time() - (info.started or 0) > _PROBE_SECONDS
            if info.key not in ours and not killed and not old_probe:
                continue  # somebody else's, for all we know
            # Killed between the beginning of the upload and its record: its parts are compared by their tags.
            begun = Begun(
                key=info.key,
                upload_id=upload_id,
                bytes=item.bytes if item else 0,
                part_bytes=0,
                sha256=item.sha256 if item else None,
            )
        same = item is not None and (begun.sha256, begun.bytes) == (item.sha256, item.bytes)
        if same and info.key not in lane.uploads:
            lane.uploads[info.key] = begun
        else:
            lane.drop_upload(begun)


def _check_names(store: Store, catalog: Catalog) -> None:
    """Folders cannot hold every set of keys; what cannot be copied is named before anything is."""
    inner = getattr(store, "store", store)
    if not isinstance(inner, LocalStore):
        return
    found = conflicts(catalog.all_keys(), folds_case=folds_case(Path(inner.root)))
    if found:
        first, second = found[0]
        raise StoreError(
            f"{first!r} and {second!r} cannot both be files below {store.url} ({len(found)} such pairs);"
            " nothing was copied",
            mend="rename one of them, or copy to an object store",
        )


def _check_room(destination: Destination, catalog: Catalog, plan: Plan) -> None:
    """A folder that keeps what the source has lost may have no room for its new names."""
    store = destination.store
    if catalog.kind != TREE or not isinstance(getattr(store, "store", store), LocalStore):
        return
    blocking = in_the_way(store, catalog, plan.gone)
    if blocking:
        raise StoreError(
            f"{blocking[0]!r} at {store.url} was copied earlier, the source has lost it, and needs its name"
            f" for another ({len(blocking)} such); nothing was copied",
            mend="run with --delete, which removes what the source no longer has",
        )


def _check_odd_names(store: Store, catalog: Catalog) -> None:
    """A store that takes a key and keeps it under another name is found out before anything is published."""
    import pyarrow.compute as pc

    if catalog.kind != TREE:
        return  # the names of shards are ours
    odd = pc.match_substring_regex(catalog.table["key"], r"\\|//|[\x01-\x1f\x7f]")
    for key in catalog.table["key"].filter(odd).to_pylist():
        listed = retrying(lambda key=key: [info.key for info in store.list(key)])  # type: ignore[misc]  # bound now
        if key not in listed:
            raise StoreError(
                f"{store.url} has taken {key!r} and keeps it under another name; nothing was published",
                mend="rename it at the source, or copy this tree to another kind of store",
            )


def folds_case(folder: Path) -> bool:
    """Whether the file system takes names that differ in case for one."""
    while not folder.is_dir():
        folder = folder.parent
    try:
        with tempfile.NamedTemporaryFile(prefix=".datasync-case-", suffix="a", dir=folder) as file:
            return Path(file.name[:-1] + "A").exists()
    except OSError:
        return False


def publish(
    destination: Destination,
    catalog: Catalog,
    *,
    delete: Iterable[str] = (),
    signature: Signature | None = None,
) -> Receipt:
    """Make a complete copy visible and prove it.

    Args:
        destination (Destination): All of its objects are stored.
        catalog (Catalog): With its version: every digest is known.
        delete (Iterable[str]): Keys to remove after the new version is visible.
        signature (Signature | None): That of the index, where the source has one.

    Raises:
        BusyError: The lease was lost; nothing was published.
        ConflictError: Somebody else changed the index meanwhile; nothing was published.
    """
    store, lane, lease = destination.store, destination.lane, destination.lease
    assert catalog.version is not None
    assert catalog.manifest is not None
    version, manifest = catalog.version, catalog.manifest

    def put(key: str, data: bytes) -> None:
        retrying(lambda: store.write(key, data), seconds=lane.retry_seconds)

    for begun in list(lane.uploads.values()):
        lane.drop_upload(begun)  # nobody went on with it
    lane.journal.flush()
    lease.check()
    retrying(lambda: manifest.write_to(store, manifest_key(version)), seconds=lane.retry_seconds)
    if (found := origins(catalog.table)) is not None:
        put(origin_key(version), found)
    adopted = _adopted(destination, catalog)
    if adopted:
        put(adopted_key(version), json.dumps(sorted(adopted), ensure_ascii=False).encode())
    if signature is not None:
        put(signature.key, signature.data)
    index = None if catalog.index is None else _publish_index(destination, catalog)
    delete = list(delete)
    if delete:
        retrying(lambda: store.delete(delete), seconds=lane.retry_seconds)
    if delete or destination.past.files:
        _note_leftovers(destination, catalog)
    receipt = _receipt(destination, catalog, index, adopted=len(adopted), signature=signature)
    retrying(lambda: receipts.write(store, receipt), seconds=lane.retry_seconds)
    retrying(lambda: store.delete([damage_key(version)]), seconds=lane.retry_seconds)
    retrying(lambda: lane.journal.clear(destination.past), seconds=lane.retry_seconds)
    return receipt


def _publish_index(destination: Destination, catalog: Catalog) -> ObjectInfo:
    """Put the index in place of the one that was there when the lease was taken."""
    store, old, index = destination.store, destination.index, catalog.index
    assert index is not None
    retry = destination.lane.retry_seconds
    abilities = store.abilities()

    def is_it(info: ObjectInfo) -> bool:
        if info.bytes != index.bytes:
            return False
        there = StoredFile.open(store, INDEX, info=info, retry_seconds=retry)
        return there.sha256() == catalog.index_sha256

    if old is not None and is_it(old):
        return old
    try:
        if old is None and abilities.if_absent:
            return retrying(lambda: index.write_to(store, INDEX, if_absent=True), seconds=retry)
        if old is not None and abilities.if_match:
            return retrying(lambda: index.write_to(store, INDEX, if_match=old.etag), seconds=retry)
    except ConflictError:
        # A write whose answer was lost has happened; anything else is somebody else's.
        now = _stat(store, INDEX)
        if now is not None and is_it(now):
            return now
        raise ConflictError(
            f"{store.url}/{INDEX} was changed by somebody else during this run; it was left as it is",
            mend="find out who writes there; then run again",
        ) from None
    now = _stat(store, INDEX)
    if (now and now.etag) != (old and old.etag):
        raise ConflictError(
            f"{store.url}/{INDEX} was changed by somebody else during this run; it was left as it is",
            mend="find out who writes there; then run again",
        )
    return retrying(lambda: index.write_to(store, INDEX), seconds=retry)


def _adopted(destination: Destination, catalog: Catalog) -> set[str]:
    """Objects of this version that others put here: found in place now, or by an earlier run."""
    lane = destination.lane
    found = {key for key in lane.tally.adopted if lane.present[key]}
    found |= {key for key, done in destination.past.done.items() if done.adopted}
    try:
        found |= read_adopted(destination.store, destination.receipt)
    except NotFoundError as error:
        log.warning("%s; from here on all of its version count as such", error.message)
        for batch in _named(destination.store, destination.receipt):
            found.update(batch["key"].to_pylist())
    if not found:
        return found
    return {key for key in catalog.all_keys() if key in found}


def read_adopted(store: Store, receipt: Receipt | None) -> set[str]:
    """Objects of a receipt's version that this tool did not write."""
    if receipt is None or not receipt.adopted:
        return set()
    try:
        return set(json.loads(retrying(lambda: store.read(adopted_key(receipt.version)))))
    except (NotFoundError, ValueError, TypeError):
        raise NotFoundError(
            f"{store.url}/{adopted_key(receipt.version)} is missing or damaged: it says which objects others"
            " wrote",
            mend="do not delete there; replicate again",
        ) from None


def leftovers(store: Store) -> dict[str, int]:
    """Objects, with their sizes, of runs that never published, which no version has."""
    try:
        data = retrying(lambda: store.read(LEFTOVERS))
        return {str(key): int(size) for key, size in json.loads(data).items()}
    except NotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError):
        log.warning("%s/%s is damaged; what it names is taken for others'", store.url, LEFTOVERS)
        return {}


def _note_leftovers(destination: Destination, catalog: Catalog) -> None:
    """Keep in mind what runs that never published have put here, for `--delete` and `gc`."""
    store = destination.store
    ours = set(leftovers(store))
    for keys in journals.set_out(store):
        ours.update(keys)
    ours.difference_update(catalog.all_keys())
    found: dict[str, int] = {}
    if ours:
        found = {info.key: info.bytes for info in retrying(lambda: list(store.list())) if info.key in ours}
    if found:
        retrying(lambda: store.write(LEFTOVERS, json.dumps(found, ensure_ascii=False).encode()))
    else:
        retrying(lambda: store.delete([LEFTOVERS]))


def written(store: Store, *, among: set[str]) -> set[str]:
    """Those of some objects that this tool wrote: receipts say so, or runs that have not published.

    Of several receipts the newest that has an object decides.
    """
    ours = among.intersection(leftovers(store))
    for keys in journals.set_out(store):
        ours.update(among.intersection(keys))
    undecided = among - ours
    for receipt in reversed(retrying(lambda: receipts.read_all(store, damaged_too=True))):
        if not undecided:
            break
        theirs: set[str] | None = None
        try:
            theirs = read_adopted(store, receipt)
        except NotFoundError as error:
            log.warning("%s; all of its version count as such", error.message)
        try:
            for batch in _named(store, receipt):
                found = undecided.intersection(batch["key"].to_pylist())
                ours |= set() if theirs is None else found - theirs
                undecided -= found
        except FormatError as error:
            log.warning("%s: what it says is not known to be ours: %s", store.url, error.message)
    return ours


def _receipt(
    destination: Destination,
    catalog: Catalog,
    index: ObjectInfo | None,
    *,
    adopted: int,
    signature: Signature | None,
) -> Receipt:
    tally = destination.lane.tally
    assert catalog.version is not None
    source_index: dict[str, Any] | None = None
    if catalog.index_info is not None:
        source_index = {
            "tag": tag_of(catalog.store, catalog.index_info) if catalog.told else None,
            "bytes": catalog.index_info.bytes,
        }
    index_here: dict[str, Any] | None = None
    if index is not None and catalog.index is not None:
        index_here = {
            "tag": tag_of(destination.store, index),
            "bytes": index.bytes,
            "sha256": catalog.index_sha256,
        }
    return Receipt(
        name=catalog.name,
        kind=catalog.kind,
        version=catalog.version,
        state=receipts.WHOLE,
        objects=catalog.objects,
        bytes=catalog.total_bytes,
        samples=catalog.samples,
        source={
            "url": catalog.store.url,
            "endpoint": endpoint_of(catalog.store),
            "index": source_index,
            "signature": None if signature is None else signature.at_source,
        },
        destination=destination.store.url,
        index=index_here,
        copied={"objects": tally.copied, "bytes": tally.copied_bytes},
        adopted=adopted,
        checked={
            "sha256": tally.checked_sha256,
            "crc32c": tally.checked_crc32c,
            "read_back": tally.read_back,
            "adopted": len(tally.adopted),
        },
        started=destination.started,
        finished=receipts.now(),
        tool=f"datasync {__version__}",
        host=socket.gethostname(),
        token=destination.lease.token,
        manifest=described(destination.store, _stat(destination.store, manifest_key(catalog.version))),
    )


def deletable(place: str, store: Store, catalog: Catalog, *, max_delete: float) -> list[str]:
    """What `--delete` removes: what this tool is known to have written and the source no longer has.

    Args:
        place (str): The destination, for people.
        store (Store): The copy.
        catalog (Catalog): What the source has.
        max_delete (float): The largest share of our objects that may go.

    Raises:
        StoreError: That would be a larger share than `max_delete`; nothing is removed.
    """
    if catalog.kind != TREE:
        return []
    ours = written(store, among={info.key for info in retrying(lambda: list(store.list()))})
    gone = ours.difference(catalog.table["key"].to_pylist())
    if len(gone) > max_delete * len(ours):
        raise StoreError(
            f"{catalog.name}: the source no longer has {len(gone):,} of {len(ours):,} objects on"
            f" {place}; a run may remove {max_delete:.0%}; nothing was removed or published",
            mend="check the source; if it is right, give a larger --max-delete",
        )
    return sorted(gone)


def _stat(store: Store, key: str) -> ObjectInfo | None:
    try:
        return retrying(lambda: store.stat(key))
    except NotFoundError:
        return None
