"""`gc`: remove what only versions older than the newest few need.

    receipts ─► kept: the newest versions ─► keys that they, the index in place or a run under way need
             └► older versions: the keys of their manifests, less the kept, less what others put here

Only what a receipt says this tool wrote is ever removed. Each old version is first marked ``removing``, so
that nobody waits for it or counts on it; then its objects go, then its records. A kill in between leaves
a marked receipt, and the next run goes on from it. Trees have one version in place and are left to
``--delete``.

At a dataset's home there are no receipts: there, the journal of finished `datasync shard` jobs says which
versions are this tool's (`ops.published`), and nothing is removed while a job has not published. A job that
begins while something is removed waits for the end of it (`shards.journal`). A manifest goes after the
objects that only it needs, so a kill in between is gone on from as well.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial

from datasync.errors import NotFoundError, StoreError, UsageError
from datasync.ops import published, receipts
from datasync.ops.receipts import Receipt
from datasync.replicate import journal
from datasync.replicate.catalog import TREE
from datasync.replicate.destination import leftovers, read_adopted
from datasync.replicate.layout import (
    INDEX,
    LEFTOVERS,
    MANIFESTS,
    adopted_key,
    damage_key,
    manifest_key,
    origin_key,
    receipt_key,
)
from datasync.replicate.lease import held
from datasync.replicate.retry import retrying
from datasync.storage.base import ObjectInfo, Store
from shards.manifest import Manifest

REMOVING = "removing"
_BATCH = 1000
_PASSING = ("_datasync/probe-", "_datasync/clock/")  # written to find something out, and removed at once
_LEFT_SECONDS = 86_400.0


@dataclass(slots=True, kw_only=True)
class Garbage:
    """What `gc` would remove, or removed.

    Args:
        name, url (str): Where.
        kept (list[str]): Versions that stay, the newest first.
        removed (list[str]): Versions that go.
        objects (int): Objects that only those need.
        bytes (int): Their bytes.
        applied (bool): Whether they are gone.
        keys (list[str]): The objects.
    """

    name: str
    url: str
    kept: list[str]
    removed: list[str]
    objects: int = 0
    bytes: int = 0
    applied: bool = False
    keys: list[str] = field(default_factory=list)


def gc(store: Store, *, name: str, keep: int, apply: bool = False) -> Garbage:
    """Find what only old versions need, and remove it if told to.

    Args:
        store (Store): The root of a copy, or of a dataset's home.
        name (str): For people.
        keep (int): How many versions stay; at least 1.
        apply (bool): Remove. Default: ``False``: only tell.

    Raises:
        NotFoundError: Neither receipt nor finished job is there, so nothing is known to be this tool's.
        BusyError: Another run is at work there.
        StoreError: The copy is damaged, or its index cannot be read: then nothing is removed.
    """
    if keep < 1:
        raise UsageError(f"cannot keep {keep} versions", mend="keep at least the one in use: --keep 1")
    if not apply:
        return _find(store, name, keep).garbage
    with held(store, f"gc {name}") as lease:
        found = _find(store, name, keep)
        for receipt in found.receipts:
            if receipt.state != REMOVING:
                marked = replace(receipt, state=REMOVING)
                retrying(partial(receipts.write, store, marked, current=False))
        keys = found.garbage.keys
        for begin in range(0, len(keys), _BATCH):
            lease.check()
            _check_quiet(store)
            retrying(partial(store.delete, keys[begin : begin + _BATCH]))
        lease.check()
        retrying(partial(store.delete, found.records))
        for receipt in found.receipts:
            retrying(partial(store.delete, [receipt_key(receipt.version)]))
        retrying(partial(store.delete, _left_by_kills(store)))
        found.garbage.applied = True
        return found.garbage


@dataclass(slots=True, kw_only=True)
class _Found:
    """What goes: objects, then the records of their versions, then the receipts of those."""

    garbage: Garbage
    records: list[str] = field(default_factory=list)
    receipts: list[Receipt] = field(default_factory=list)


def _check_quiet(store: Store) -> None:
    """Refuse while a job of `datasync shard` writes there.

    Raises:
        StoreError: One has begun, and what it needs cannot be told from what nothing needs.
    """
    jobs = published.unfinished(store)
    if jobs:
        raise StoreError(
            f"{store.url}: datasync shard has begun to write there and not published (job {jobs[0]}), and"
            " what it needs cannot be told from what nothing needs; nothing more was removed",
            mend="finish it (the same datasync shard again); then run gc",
        )


def _find(store: Store, name: str, keep: int) -> _Found:
    _check_quiet(store)
    newest = receipts.read(store)
    if newest is None:
        return _find_home(store, name, keep)
    if newest.kind == TREE:
        return _Found(garbage=Garbage(name=name, url=store.url, kept=[newest.version], removed=[]))
    found = receipts.read_all(store)
    # The newest last; a version that was replicated again counts by its last receipt.
    order = [r for r in found if r.version != newest.version and r.state != REMOVING] + [newest]
    kept = order[-keep:]
    kept_versions = {receipt.version for receipt in kept}
    old = [receipt for receipt in found if receipt.version not in kept_versions]
    needed = _needed(store, kept_versions)
    garbage = {key: size for key, size in leftovers(store).items() if key not in needed}
    records = [LEFTOVERS] if garbage else []
    for receipt in old:
        records += _records(receipt.version)
        theirs = read_adopted(store, receipt) if _manifest(store, receipt.version) is not None else set()
        garbage |= _garbage(store, receipt.version, needed | theirs)
    return _Found(
        garbage=Garbage(
            name=name,
            url=store.url,
            kept=[receipt.version for receipt in reversed(kept)],
            removed=[receipt.version for receipt in reversed(old)],
            objects=len(garbage),
            bytes=sum(garbage.values()),
            keys=sorted(garbage),
        ),
        records=records,
        receipts=old,
    )


def _find_home(store: Store, name: str, keep: int) -> _Found:
    """What goes where `datasync shard` wrote; each split has an index and versions of its own."""
    ours = published.versions(store)
    if not ours:
        raise NotFoundError(
            f"{store.url} has neither a receipt nor a finished job of datasync shard, so nothing there is"
            " known to be written by this tool",
            mend="look after it by hand",
        )
    result = _Found(garbage=Garbage(name=name, url=store.url, kept=[], removed=[]))
    for split, versions in sorted(ours.items()):
        place, prefix = (store.child(split), f"{split}/") if split else (store, "")
        there = retrying(lambda place=place: list(place.list(MANIFESTS)))  # type: ignore[misc]  # bound now
        there.sort(key=lambda info: info.mtime or 0.0)
        order = [info.key.removeprefix(MANIFESTS).removesuffix(".parquet") for info in there]
        in_use = _version_in_use(place)
        mine = [version for version in order if version in versions and version != in_use]
        kept = [*mine, in_use][-keep:]
        old = [version for version in mine if version not in kept]
        # A manifest that is not ours speaks for objects that are not either.
        needed = _needed(place, [version for version in order if version not in old])
        garbage: dict[str, int] = {}
        for version in old:
            garbage |= _garbage(place, version, needed)
            result.records += [prefix + key for key in _records(version)]
        result.garbage.kept += reversed(kept)
        result.garbage.removed += reversed(old)
        result.garbage.objects += len(garbage)
        result.garbage.bytes += sum(garbage.values())
        result.garbage.keys += [prefix + key for key in sorted(garbage)]
    return result


def _version_in_use(place: Store) -> str:
    """The version that the index in place names.

    Raises:
        StoreError: It names none: another program has written it.
    """
    from shards.index import Index

    where = f"{place.url}/{INDEX}"
    version = Index.parse(retrying(lambda: place.read(INDEX)), where=where).extra.get("version")
    if not isinstance(version, str):
        raise StoreError(
            f"{where} was not written by datasync shard; nothing was removed",
            mend="find out who wrote it, or shard the dataset again",
        )
    return version


def _left_by_kills(store: Store) -> list[str]:
    """Small objects of this tool that live for a moment, and are a day old."""
    infos = [info for prefix in _PASSING for info in retrying(partial(_listed, store, prefix))]
    return [info.key for info in infos if info.mtime is not None and time.time() - info.mtime > _LEFT_SECONDS]


def _listed(store: Store, prefix: str) -> list[ObjectInfo]:
    return list(store.list(prefix))


def _records(version: str) -> list[str]:
    return [manifest_key(version), origin_key(version), adopted_key(version), damage_key(version)]


def _garbage(store: Store, version: str, needed: set[str]) -> dict[str, int]:
    """Objects of a version, with their sizes, less what is needed; none where its manifest is gone."""
    manifest = _manifest(store, version)
    if manifest is None:
        return {}
    keys, sizes = manifest.table["key"].to_pylist(), manifest.table["bytes"].to_pylist()
    return {key: size for key, size in zip(keys, sizes, strict=True) if key not in needed}


def _needed(store: Store, kept: Iterable[str]) -> set[str]:
    """Keys of the kept versions, of the index in place, and of a run that has not published yet."""
    from shards.index import Index

    needed: set[str] = set()
    for version in kept:
        manifest = _manifest(store, version)
        if manifest is None:
            raise StoreError(
                f"{store.url} has lost the manifest of version {version[:12]}…, which is to stay;"
                " nothing was removed",
                mend="replicate again; it writes the manifest anew",
            )
        needed.update(manifest.table["key"].to_pylist())
    data = retrying(lambda: store.read(INDEX))
    for shard in Index.parse(data, where=f"{store.url}/{INDEX}").shards:
        needed.add(shard.raw.basename)
        if shard.zip is not None:
            needed.add(shard.zip.basename)
    past = journal.load(store)
    needed.update(past.done)
    needed.update(begun.key for begun in past.uploads.values())
    for keys in journal.set_out(store):
        needed.update(keys)
    return needed


def _manifest(store: Store, version: str) -> Manifest | None:
    key = manifest_key(version)
    try:
        return Manifest.from_parquet(retrying(lambda: store.read(key)), where=f"{store.url}/{key}")
    except NotFoundError:
        return None
