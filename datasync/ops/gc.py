"""`gc`: remove what only versions older than the newest few need.

    receipts ─► kept: the newest versions ─► keys that they, the index in place or a run under way need
             └► older versions: the keys of their manifests, less the kept, less what others put here

Only what a receipt says this tool wrote is ever removed. Each old version is first marked ``removing``, so
that nobody waits for it or counts on it; then its objects go, then its records. A kill in between leaves
a marked receipt, and the next run goes on from it. Trees have one version in place and are left to
``--delete``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

from datasync.errors import NotFoundError, StoreError, UsageError
from datasync.ops import receipts
from datasync.ops.receipts import Receipt
from datasync.replicate import journal
from datasync.replicate.catalog import TREE
from datasync.replicate.destination import read_adopted
from datasync.replicate.layout import INDEX, adopted_key, damage_key, manifest_key, origin_key, receipt_key
from datasync.replicate.lease import held
from datasync.replicate.retry import retrying
from datasync.storage.base import Store
from shards.manifest import Manifest

REMOVING = "removing"
_BATCH = 1000


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
        store (Store): The root of a copy.
        name (str): For people.
        keep (int): How many versions stay; at least 1.
        apply (bool): Remove. Default: ``False``: only tell.

    Raises:
        NotFoundError: No receipt is there, so nothing is known to be this tool's.
        BusyError: Another run is at work there.
        StoreError: The copy is damaged, or its index cannot be read: then nothing is removed.
    """
    if keep < 1:
        raise UsageError(f"cannot keep {keep} versions", mend="keep at least the one in use: --keep 1")
    if not apply:
        return _find(store, name, keep)[0]
    with held(store, f"gc {name}") as lease:
        garbage, old, sizes = _find(store, name, keep)
        for receipt in old:
            if receipt.state != REMOVING:
                marked = replace(receipt, state=REMOVING)
                retrying(partial(receipts.write, store, marked, current=False))
        lease.check()
        keys = sorted(sizes)
        for begin in range(0, len(keys), _BATCH):
            retrying(partial(store.delete, keys[begin : begin + _BATCH]))
        for receipt in old:
            version = receipt.version
            records = [manifest_key(version), origin_key(version), adopted_key(version), damage_key(version)]
            retrying(partial(store.delete, records))
            retrying(partial(store.delete, [receipt_key(version)]))
        garbage.applied = True
        return garbage


def _find(store: Store, name: str, keep: int) -> tuple[Garbage, list[Receipt], dict[str, int]]:
    found = receipts.read_all(store)
    newest = receipts.read(store)
    if newest is None or not found:
        raise NotFoundError(
            f"{store.url} has no receipt, so nothing there is known to be written by this tool",
            mend="gc removes old versions of copies; look after the home by hand",
        )
    if newest.kind == TREE:
        return Garbage(name=name, url=store.url, kept=[newest.version], removed=[]), [], {}
    # The newest last; a version that was replicated again counts by its last receipt.
    order = [r for r in found if r.version != newest.version and r.state != REMOVING] + [newest]
    kept = order[-keep:]
    kept_versions = {receipt.version for receipt in kept}
    old = [receipt for receipt in found if receipt.version not in kept_versions]
    needed = _needed(store, kept)
    garbage: dict[str, int] = {}
    for receipt in old:
        manifest = _manifest(store, receipt)
        if manifest is None:
            continue
        theirs = read_adopted(store, receipt)
        keys, sizes = manifest.table["key"].to_pylist(), manifest.table["bytes"].to_pylist()
        for key, size in zip(keys, sizes, strict=True):
            if key not in needed and key not in theirs:
                garbage[key] = size
    result = Garbage(
        name=name,
        url=store.url,
        kept=[receipt.version for receipt in reversed(kept)],
        removed=[receipt.version for receipt in reversed(old)],
        objects=len(garbage),
        bytes=sum(garbage.values()),
        keys=sorted(garbage),
    )
    return result, old, garbage


def _needed(store: Store, kept: list[Receipt]) -> set[str]:
    """Keys of the kept versions, of the index in place, and of a run that has not published yet."""
    from shards.index import Index

    needed: set[str] = set()
    for receipt in kept:
        manifest = _manifest(store, receipt)
        if manifest is None:
            raise StoreError(
                f"{store.url} has lost the manifest of version {receipt.version[:12]}…, which is to stay;"
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
    return needed


def _manifest(store: Store, receipt: Receipt) -> Manifest | None:
    key = manifest_key(receipt.version)
    try:
        return Manifest.from_parquet(retrying(lambda: store.read(key)), where=f"{store.url}/{key}")
    except NotFoundError:
        return None
