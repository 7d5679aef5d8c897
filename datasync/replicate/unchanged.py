"""Whether there is nothing to do: found from small records, whatever the size of the dataset.

The source's index as its store describes it is compared with what the newest receipt of a place says of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping

from datasync.errors import DatasyncError, NotFoundError
from datasync.ops import receipts
from datasync.ops.judgement import at_once, is_same, signature_at, signature_fault
from datasync.ops.receipts import Receipt
from datasync.replicate.catalog import tag_of
from datasync.replicate.layout import INDEX, manifest_key
from datasync.replicate.limits import identity
from datasync.replicate.retry import retrying
from datasync.storage.base import Store
from datasync.storage.retry import inheriting

log = logging.getLogger(__name__)

_LAG_SECONDS = 1.0


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
