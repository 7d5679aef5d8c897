"""Where things lie below a dataset's root, and which keys may be copied.

    index.json                              the only pointer; a tree has none
    shards/…                                data, named by content
    _datasync/manifests/<version>.parquet   every object of a version, with digests
    _datasync/receipts/<version>.json       what a replication proved, one a version
    _datasync/receipt.json                  the newest of them: "is it here, whole?" is one read
    _datasync/adopted/<version>.json        objects that were here before us, and are never ours to remove
    _datasync/leftovers.json                objects of runs that never published, which no version has
    _datasync/origins/<version>.parquet     source tags of a tree's objects, to notice changes without reading
    _datasync/damage/<version>.json         what the last `verify` found missing or bad
    _datasync/signatures/<sha256>.json      signatures of an index, named by the index they sign
    _datasync/lease.json                    who may write here now
    _datasync/journal/<token>-…-<n>.jsonl     what the run that is under way has finished
    _datasync/scrub/<version>-<n>.jsonl     what the `verify` that is under way has checked
    _datasync/quarantine/<key>              objects that did not have their digest

Keys below `_datasync/` are this tool's own and are never data.
"""

from __future__ import annotations

from datasync.storage.keys import check_key
from shards.manifest import manifest_key

__all__ = [
    "INDEX",
    "JOURNAL",
    "LEASE",
    "LEFTOVERS",
    "RECEIPT",
    "RECEIPTS",
    "adopted_key",
    "check_data_key",
    "damage_key",
    "is_internal",
    "is_marker",
    "manifest_key",
    "origin_key",
    "quarantine_key",
    "receipt_key",
    "signature_key",
]

INDEX = "index.json"
OWN = "_datasync/"
LEASE = "_datasync/lease.json"
JOURNAL = "_datasync/journal/"
SCRUB = "_datasync/scrub/"
RECEIPT = "_datasync/receipt.json"
RECEIPTS = "_datasync/receipts/"
LEFTOVERS = "_datasync/leftovers.json"
MANIFESTS = "_datasync/manifests/"
SIGNATURES = "_datasync/signatures/"

# Files by which other programs recognise a finished tree or a finished checkpoint: copied after all others.
_MARKERS = frozenset(
    {
        INDEX,
        ".metadata",
        "commit.json",
        "latest",
        "_SUCCESS",
        "COMMIT",
        "COMPLETE",
        "latest_checkpointed_iteration.txt",
    }
)


def receipt_key(version: str) -> str:
    return f"{RECEIPTS}{version}.json"


def adopted_key(version: str) -> str:
    return f"_datasync/adopted/{version}.json"


def origin_key(version: str) -> str:
    return f"_datasync/origins/{version}.parquet"


def damage_key(version: str) -> str:
    return f"_datasync/damage/{version}.json"


def signature_key(index_sha256: str) -> str:
    return f"{SIGNATURES}{index_sha256}.json"


def quarantine_key(key: str) -> str:
    return f"_datasync/quarantine/{key}"


def is_internal(key: str) -> bool:
    """Whether a key is this tool's own bookkeeping rather than data."""
    return key.startswith(OWN)


def is_marker(key: str) -> bool:
    """Whether other programs take this file as the sign that the rest is there."""
    return key.rpartition("/")[2] in _MARKERS


def check_data_key(key: str, *, where: str) -> str:
    """`key` unchanged, if it is data that stays below its root.

    Raises:
        FormatError: It leaves the root or is one of this tool's own, whatever the source's index says.
    """
    from datasync.errors import FormatError, StoreError

    try:
        check_key(key, where=where)
    except StoreError as error:
        raise FormatError(error.message, mend=error.mend) from error
    if key.startswith("/") or is_internal(key) or key == INDEX:
        raise FormatError(
            f"{where} names {key!r} as data, which would overwrite something else",
            mend="do not use this dataset, or find out who wrote its index",
        )
    return key
