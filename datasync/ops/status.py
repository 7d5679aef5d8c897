"""`status` and `wait`: which cluster has what, and whether it is whole.

The answers come from receipts: a few small reads for each copy, whatever its size.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasync.config_values import nearest
from datasync.errors import (
    CorruptError,
    DatasyncError,
    FormatError,
    NotFoundError,
    TransientError,
    UsageError,
)
from datasync.ops import patience, published, receipts
from datasync.ops.judgement import DAMAGED, UNSIGNED, fault, signature_fault
from datasync.ops.patience import within
from datasync.ops.receipts import Receipt
from datasync.replicate.catalog import tag_of
from datasync.replicate.layout import INDEX
from datasync.replicate.limits import identity
from datasync.storage.base import ObjectInfo, Store

if TYPE_CHECKING:
    from datasync.config import Cluster, Config

log = logging.getLogger(__name__)

HOME, WHOLE, OUTDATED, PARTIAL, ABSENT, FOREIGN, UNKNOWN = (
    "home",
    "whole",
    "outdated",
    "partial",
    "absent",
    "unproven",
    "unreachable",
)

_LAST_LOOK_SECONDS = 1.0
_PUBLICATION_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One dataset at one cluster.

    Args:
        dataset, cluster, url (str): Where.
        state (str): ``home`` (where it was sharded), ``whole``, ``outdated`` (whole, but the home has a newer
            version), ``partial`` (a first replication, or sharding, is under way or was stopped),
            ``damaged``, ``unsigned`` (without the signature that is required), ``unproven`` (an index or
            files without a receipt),
            ``absent`` or ``unreachable``.
        version (str | None): Of the copy.
        objects, bytes (int | None): Of the copy.
        age_seconds (float | None): Since its receipt.
        missing_bytes (int | None): Bytes that a replication would copy, as far as receipts tell.
        verified (dict | None): The last `verify`.
        error (str | None): Why it is unreachable, damaged or unsigned.
    """

    dataset: str
    cluster: str
    url: str
    state: str
    version: str | None = None
    objects: int | None = None
    bytes: int | None = None
    age_seconds: float | None = None
    missing_bytes: int | None = None
    verified: dict[str, Any] | None = None
    error: str | None = None


def status(
    config: Config, names: Sequence[str] = (), clusters: Sequence[str] = ()
) -> tuple[list[Place], dict[str, str]]:
    """Every dataset at every cluster, and the clusters that could not be asked, with the reason.

    With no names: the datasets that are configured and those that are found.

    Raises:
        UsageError: A cluster is not configured, or a name is neither, and nothing is there.
    """
    chosen = [config.cluster(name) for name in clusters] or list(config.clusters.values())
    found, silent = discover(config) if not names else (set(), {})
    wanted = list(names) or sorted({*config.datasets, *found})
    pairs = [(name, cluster.name) for name in wanted for cluster in chosen]
    with ThreadPoolExecutor(16) as pool:
        heads = dict(zip(wanted, pool.map(lambda name: _home_head(config, name), wanted), strict=True))
        places = list(pool.map(lambda pair: _place(config, pair[0], pair[1], heads[pair[0]], silent), pairs))
    for place in places:
        if place.state == UNKNOWN:
            silent.setdefault(place.cluster, place.error or "")
    for name in names:
        found_at = [place for place in places if place.dataset == name and place.state != ABSENT]
        if name not in config.datasets and not found_at:
            asked = ", ".join(cluster.name for cluster in chosen)
            raise UsageError(f"no dataset {name!r} is at {asked}", mend=nearest(name, config.datasets))
    places = [_lost(config, place, places) for place in places]
    return places, {name: why for name, why in silent.items() if name in {c.name for c in chosen}}


def _lost(config: Config, place: Place, places: Sequence[Place]) -> Place:
    """A home that holds nothing while others have copies has lost it, or is not mounted."""
    known = config.datasets.get(place.dataset)
    if place.state != ABSENT or known is None or known.home != place.cluster:
        return place
    copies = [
        other.cluster for other in places if other.dataset == place.dataset and other.version is not None
    ]
    if not copies:
        return place
    why = f"nothing is at its home, and {copies[0]} has a copy: is it mounted?"
    return _with(place, state=DAMAGED, error=why)


def discover(config: Config) -> tuple[set[str], dict[str, str]]:
    """Names of datasets and trees that the clusters hold, from one level of their listing.

    Also returns the clusters that cannot be listed, with the reason.
    """
    clusters = list(config.clusters.values())
    silent: dict[str, str] = {}

    def look(cluster: Cluster) -> set[str]:
        try:
            store = cluster.store()
            within(patience.ANSWER_SECONDS, lambda: _begun(store), where=store.url)
            return first_level(store)
        except DatasyncError as error:
            silent[cluster.name] = error.message
            return set()

    with ThreadPoolExecutor(max(len(clusters), 1)) as pool:
        return set().union(*pool.map(look, clusters)), silent


def _begun(store: Store) -> None:
    """The first key of a listing: whether a place answers at all."""
    with contextlib.suppress(NotFoundError):
        next(iter(store.list()), None)


def first_level(store: Store) -> set[str]:
    """First segments below a root under which an index or a receipt lies; one small listing for each."""
    found: set[str] = set()
    after = ""
    while True:
        try:
            info = next(iter(store.list(after=after)), None)
        except NotFoundError:
            return found
        if info is None:
            return found
        head, slash, _ = info.key.partition("/")
        if slash and _is_dataset(store.child(head)):
            found.add(head)
        # '0' follows '/': the next key is the first one after everything below this folder.
        after = f"{head}0" if slash else info.key


def _is_dataset(store: Store) -> bool:
    return any(_stat(store, key) is not None for key in (INDEX, "_datasync/receipt.json"))


def _home_head(config: Config, name: str) -> tuple[Store, ObjectInfo] | None:
    """The home of a dataset and its index there, where there is a home that answers."""
    known = config.datasets.get(name)
    if known is None or known.home is None:
        return None
    store = config.dataset_store(known.home, name)
    try:
        info = within(patience.ANSWER_SECONDS, lambda: _stat(store, INDEX), where=store.url)
    except DatasyncError:
        return None
    return None if info is None else (store, info)


def _place(
    config: Config,
    name: str,
    cluster: str,
    head: tuple[Store, ObjectInfo] | None,
    silent: Mapping[str, str],
) -> Place:
    root = config.cluster(cluster).url
    public = config.signed_by(name)
    blank = Place(dataset=name, cluster=cluster, url=f"{root.rstrip('/')}/{name}", state=ABSENT)
    if cluster in silent:
        return _with(blank, state=UNKNOWN, error=silent[cluster])
    try:
        store = config.dataset_store(cluster, name)
        blank = _with(blank, url=store.url)
        receipt = within(patience.ANSWER_SECONDS, lambda: receipts.read(store), where=store.url)
        if receipt is None:
            return _without_receipt(
                store,
                blank,
                public,
                is_home=name in config.datasets and config.datasets[name].home == cluster,
            )
        place = _with_receipt(store, receipt, blank, head, public)
        if place.state == DAMAGED and receipt.whole:
            # An index is published a moment before its receipt.
            time.sleep(_PUBLICATION_SECONDS)
            newest = receipts.read(store)
            if newest is not None and newest != receipt:
                place = _with_receipt(store, newest, blank, head, public)
        return place
    except (FormatError, CorruptError) as error:
        return _with(blank, state=DAMAGED, error=error.message)
    except DatasyncError as error:
        return _with(blank, state=UNKNOWN, error=error.message)


def _without_receipt(store: Store, blank: Place, public: str | None, *, is_home: bool) -> Place:
    from datasync.replicate.catalog import describe

    if _stat(store, INDEX) is None:
        return _without_index(store, blank, is_home=is_home)
    try:
        catalog = describe(store, blank.dataset)
    except NotFoundError as error:  # there is an index, so it is what that names
        return _with(blank, state=DAMAGED, error=error.message)
    home = is_home or catalog.version in published.versions(store).get("", ())
    why = None if public is None else signature_fault(store, catalog.index_sha256, public)
    return _with(
        blank,
        state=UNSIGNED if why is not None else HOME if home else FOREIGN,
        error=why,
        version=catalog.version,
        objects=catalog.objects,
        bytes=catalog.total_bytes,
    )


def _without_index(store: Store, blank: Place, *, is_home: bool) -> Place:
    """What is at a place that has neither a receipt nor an index."""
    from datasync.replicate.layout import JOURNAL, MANIFESTS, OWN
    from shards.journal import JOBS

    own: set[str] = set()
    data = False
    with contextlib.suppress(NotFoundError):
        own.update(info.key for info in store.list(OWN))
        data = any(not info.key.startswith(OWN) for info in _around(store, OWN))
    unfinished = {key.split("/")[2] for key in own if key.startswith(JOBS)}
    if any(f"{JOBS}{job}/done.json" not in own for job in unfinished) or any(
        key.startswith(JOURNAL) for key in own
    ):
        return _with(blank, state=PARTIAL)
    if any(key.startswith(MANIFESTS) for key in own):
        return _with(blank, state=DAMAGED, error=f"{INDEX} is gone")
    if not data:
        return blank
    return _with(blank, state=HOME if is_home else FOREIGN)


def _around(store: Store, prefix: str) -> Iterator[ObjectInfo]:
    """The first object of a place, and the first one after a prefix."""
    yield from islice(store.list(), 1)
    # '0' follows '/': the next key is the first one after everything below this folder.
    yield from islice(store.list(after=f"{prefix.rstrip('/')}0"), 1)


def _with_receipt(
    store: Store,
    receipt: Receipt,
    blank: Place,
    head: tuple[Store, ObjectInfo] | None,
    public: str | None,
) -> Place:
    state, missing = WHOLE, 0
    found = fault(store, receipt, public=public)
    if found is not None:
        state = found.state
        missing = 0 if receipt.whole else _damaged_bytes(store, receipt)
    elif head is not None and identity(head[0]) != identity(store):
        info = head[1]
        tag = {"tag": tag_of(head[0], info), "bytes": info.bytes}
        if (receipt.source["endpoint"], receipt.source["url"]) != identity(head[0]) or receipt.source[
            "index"
        ] != tag:
            newer, missing = _missing_bytes(head[0], store, receipt)
            state = OUTDATED if newer else WHOLE
    return _with(
        blank,
        state=state,
        version=receipt.version,
        objects=receipt.objects,
        bytes=receipt.bytes,
        age_seconds=receipts.age_seconds(receipt.finished),
        missing_bytes=missing,
        verified=receipt.verified,
        error=None if found is None else found.why,
    )


def _missing_bytes(home: Store, store: Store, receipt: Receipt) -> tuple[bool, int]:
    """Whether the home has another version, and how much of it this place lacks."""
    from datasync.replicate.catalog import describe, learn
    from datasync.replicate.destination import compared

    catalog = describe(home, receipt.name)
    learn(catalog, store, receipt)
    if catalog.version == receipt.version:
        return False, 0
    return True, compared(catalog, store, receipt, {}).bytes


def _damaged_bytes(store: Store, receipt: Receipt) -> int:
    import pyarrow.compute as pc

    from datasync.replicate.destination import proven

    return receipt.bytes - sum(int(pc.sum(batch["bytes"]).as_py() or 0) for batch in proven(store, receipt))


def _with(place: Place, **changes: Any) -> Place:
    from dataclasses import replace

    return replace(place, **changes)


def _stat(store: Store, key: str) -> ObjectInfo | None:
    try:
        return store.stat(key)
    except NotFoundError:
        return None


def is_here(
    store: Store, name: str, version: str | None, public: str | Path | None = None
) -> tuple[Receipt | None, str]:
    """The receipt that proves a version (or any) whole at a place, or else why it is not. A few small reads.

    The home has no receipt: there, the journal of `datasync shard` says what the index is.
    """
    newest = receipts.read(store)
    if newest is None:
        newest = published.receipt_of_home(store, name)
    in_place = newest is not None and (version is None or newest.version.startswith(version))
    receipt = newest
    if not in_place:
        receipt = receipts.read(store, version) if version is not None and len(version) == 64 else None
    if receipt is None:
        return None, f"version {newest.version} is there" if newest else "no receipt is there"
    found = fault(store, receipt, public=public, in_place=in_place)
    return (receipt, "") if found is None else (None, found.why)


def wait(
    store: Store,
    *,
    name: str,
    version: str | None = None,
    timeout: float | None = None,
    poll: float = 5.0,
    public: str | Path | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[Receipt | None, str]:
    """Block until a version is whole at a place; no receipt, but why, when `timeout` seconds are over.

    Args:
        store (Store): The root of the copy.
        name (str): For people.
        version (str | None): A version or the beginning of one; None is any.
        timeout (float | None): Seconds; None is for ever.
        poll (float): Seconds between two looks. Default: ``5``.
        public (str | Path | None): The key that must have signed its index.
        sleep (Callable): How to wait.

    Raises:
        UsageError: The key file cannot be used.
    """
    why = ""
    began = time.monotonic()
    while True:
        try:
            if timeout is None:
                receipt, now = is_here(store, name, version, public)
            else:
                most = max(timeout - (time.monotonic() - began), _LAST_LOOK_SECONDS)
                receipt, now = within(most, lambda: is_here(store, name, version, public), where=store.url)
            if receipt is not None:
                return receipt, ""
        except (TransientError, CorruptError, FormatError) as error:
            now = error.message
        if now != why:
            log.info("%s is waited for: %s", store.url, now)
            why = now
        left = None if timeout is None else timeout - (time.monotonic() - began)
        if left is not None and left <= 0:
            return None, why
        sleep(poll if left is None else min(poll, left))
