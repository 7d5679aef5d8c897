"""What `datasync shard` has published at a place.

The journal of a finished job (`shards.journal`) says which versions it published there, as a receipt does for
a copy. By it a dataset's home is told from a copy that lost its receipt, `wait` finds a home whole, and `gc`
knows which old versions there are this tool's own.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime

from datasync.errors import NotFoundError
from datasync.ops import receipts
from datasync.ops.judgement import described
from datasync.ops.receipts import Receipt
from datasync.replicate.layout import INDEX
from datasync.replicate.limits import endpoint_of
from datasync.replicate.retry import retrying
from datasync.storage.base import Store
from shards.index import Index
from shards.journal import Journal, jobs


def versions(store: Store) -> dict[str, set[str]]:
    """Versions that finished jobs published below `store`, by split (``""`` without one)."""
    found: dict[str, set[str]] = {}
    for job in retrying(lambda: jobs(store)):
        done = Journal(store, job).done()
        for split, version in (done or {}).get("versions", {}).items():
            found.setdefault(split, set()).add(version)
    return found


def unfinished(store: Store) -> list[str]:
    """Jobs that have begun to write below `store` and have not published."""
    return [job for job in retrying(lambda: jobs(store)) if Journal(store, job).done() is None]


def receipt_of_home(store: Store, name: str) -> Receipt | None:
    """What a receipt would say of a dataset that was sharded here; None where it was not.

    The index is written last, so where it names what a finished job published, all of that was there.
    """
    try:
        info = store.stat(INDEX)
        data = store.read(INDEX, etag=info.etag)
    except NotFoundError:
        return None
    index = Index.parse(data, where=f"{store.url}/{INDEX}")
    version = index.extra.get("version")
    if version is None or version not in versions(store).get("", ()):
        return None
    stamp = datetime.fromtimestamp(info.mtime, UTC).isoformat(timespec="milliseconds") if info.mtime else ""
    return Receipt(
        name=name,
        kind="dataset",
        version=str(version),
        state=receipts.WHOLE,
        objects=len(index.shards),
        bytes=sum(shard.stored.bytes for shard in index.shards),
        samples=index.samples,
        source={"url": store.url, "endpoint": endpoint_of(store), "index": None},
        destination=store.url,
        index={**(described(store, info) or {}), "sha256": hashlib.sha256(data).hexdigest()},
        copied={"objects": 0, "bytes": 0},
        adopted=0,
        checked={},
        started=stamp.replace("+00:00", "Z"),
        finished=stamp.replace("+00:00", "Z"),
        tool=str(index.extra.get("created_by", "")),
        host="",
        token=0,
    )
