"""Whether what lies at a place still is what its newest receipt proves: one judgement for every command.

    the receipt      says whole                               `verify` keeps it true
    the manifest     has the version in the receipt           it says what to check, to copy and to remove
    the index        has the digest in the receipt            it is what readers read
    its signature    is by the key that is required           where one is

The tags in the receipt tell in two small requests that index and manifest are unchanged, whatever their size.
What has another tag, after a folder was moved for instance, is read and compared.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from datasync.errors import (
    ConflictError,
    CorruptError,
    DatasyncError,
    DeniedError,
    FormatError,
    NotFoundError,
)
from datasync.ops.receipts import Receipt
from datasync.ops.signatures import check_digest
from datasync.replicate.catalog import tag_of
from datasync.replicate.layout import INDEX, manifest_key, signature_key
from datasync.replicate.manifests import ManifestFile, StoredFile
from datasync.replicate.retry import retrying
from datasync.storage.base import ObjectInfo, Store
from datasync.storage.retry import inheriting
from shards.manifest import fold

T = TypeVar("T")

DAMAGED, UNSIGNED = "damaged", "unsigned"


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a copy is not to be relied upon.

    Args:
        state (str): ``damaged`` or ``unsigned``.
        why (str): What is wrong.
    """

    state: str
    why: str


@dataclass(frozen=True, slots=True)
class Signature:
    """The signature of an index.

    Args:
        key (str): Where it lies, at every place.
        data (bytes): What it is.
        at_source (dict | None): Tag and size that it has where it was read.
    """

    key: str
    data: bytes
    at_source: dict[str, Any] | None


def fault(
    store: Store, receipt: Receipt, *, public: str | Path | None = None, in_place: bool = True
) -> Fault | None:
    """What is wrong with a copy, as far as a few small reads tell; None if nothing is.

    Args:
        store (Store): The root of the copy.
        receipt (Receipt): Its newest, or that of an older version.
        public (str | Path | None): The key that must have signed its index.
        in_place (bool): Whether the index must be that of the receipt. Default: ``True``; an older version's
            is not.

    Raises:
        UsageError: The key file cannot be used.
        StoreError: The place does not answer.
    """
    why: str | None
    if not receipt.whole:
        why = "verify found objects bad or missing" if receipt.state == DAMAGED else "gc is removing it"
        return Fault(DAMAGED, why)
    index = (lambda: index_fault(store, receipt)) if in_place else lambda: None
    for why in at_once(index, lambda: manifest_fault(store, receipt.version, receipt.manifest)):
        if why is not None:
            return Fault(DAMAGED, why)
    if public is not None:
        digest = None if receipt.index is None else str(receipt.index["sha256"])
        why = signature_fault(store, digest, public)
        if why is not None:
            return Fault(UNSIGNED, why)
    return None


def index_fault(store: Store, receipt: Receipt) -> str | None:
    """Why the index in place is not the one that a receipt proves."""
    if receipt.index is None:
        return None
    info = _stat(store, INDEX)
    if info is None:
        return f"{INDEX} is missing"
    if is_same(store, info, receipt.index):
        return None
    try:
        found = StoredFile.open(store, INDEX, info=info).sha256()
    except (NotFoundError, ConflictError):
        return f"{INDEX} goes away or is replaced while it is looked at"
    if found != receipt.index["sha256"]:
        return f"{INDEX} has sha256 {found}, the receipt says {receipt.index['sha256']}"
    return None


def manifest_fault(store: Store, version: str, known: dict[str, Any] | None) -> str | None:
    """Why the manifest of a version does not say what it did; a file with other tags is read.

    Args:
        store (Store): The root of the copy.
        version (str): Its version.
        known (dict | None): Tag and size of the file, when it was written.
    """
    key = manifest_key(version)
    info = _stat(store, key)
    if info is None:
        return f"its manifest {key} is missing"
    if is_same(store, info, known):
        return None
    try:
        found = version_of(ManifestFile.open(store, key))
    except NotFoundError:
        return f"its manifest {key} is missing"
    except FormatError as error:
        return f"its manifest is damaged: {error.message}"
    if found != version:
        return f"its manifest {key} is damaged: it has the content of version {found[:12]}…"
    return None


def signature_fault(store: Store, index_sha256: str | None, public: str | Path) -> str | None:
    """Why the index with this digest is not signed by a key at a place.

    Raises:
        UsageError: The key file cannot be used.
    """
    try:
        check_digest(store, index_sha256, public)
    except CorruptError as error:
        return error.message
    return None


def version_of(file: ManifestFile) -> str:
    """The version that a manifest's content has.

    Raises:
        FormatError: It is damaged.
    """
    digest = hashlib.sha256()
    for batch in file.batches():
        fold(digest, batch)
    return digest.hexdigest()


def is_same(store: Store, info: ObjectInfo, known: dict[str, Any] | None) -> bool:
    """Whether an object has the tag and the size that a receipt recorded."""
    tag = tag_of(store, info)
    return known is not None and tag is not None and (tag, info.bytes) == (known["tag"], known["bytes"])


def described(store: Store, info: ObjectInfo | None) -> dict[str, Any] | None:
    """What a receipt records of an object; None of none."""
    return None if info is None else {"tag": tag_of(store, info), "bytes": info.bytes}


def signature_at(store: Store, index_sha256: str) -> dict[str, Any] | None:
    """Tag and size of the signature of an index; None if there is none, or none that may be read."""
    try:
        return described(store, _stat(store, signature_key(index_sha256)))
    except DeniedError:  # what is not there is denied, too, where the keys may not list
        return None


def signature_of(store: Store, index_sha256: str | None, public: str | Path | None) -> Signature | None:
    """The signature of an index, to be copied with it; None if there is none.

    Args:
        store (Store): Where it lies.
        index_sha256 (str | None): The index's digest; None where there is no index.
        public (str | Path | None): The key that must have made it.

    Raises:
        CorruptError: There is none by that key.
        UsageError: The key file cannot be used.
    """
    at_source = None if index_sha256 is None else signature_at(store, index_sha256)
    if public is not None:
        key, data = check_digest(store, index_sha256, public)
    elif index_sha256 is None or at_source is None:
        return None
    else:
        key = signature_key(index_sha256)
        data = retrying(lambda: store.read(key))
    return Signature(key, data, at_source)


def restore_manifest(store: Store, version: str, places: Sequence[ManifestFile | Store]) -> bool:
    """Put a manifest back from wherever its content has the version; whether one was found."""
    key = manifest_key(version)
    for place in places:
        try:
            file = place if isinstance(place, ManifestFile) else ManifestFile.open(place, key)
            if version_of(file) != version:
                continue
        except DatasyncError:
            continue  # it is at the next one, or the caller says that it is nowhere
        retrying(lambda file=file: file.write_to(store, key))  # type: ignore[misc]  # bound now
        return True
    return False


def at_once(*calls: Callable[[], T]) -> list[T]:
    """What several calls return, made side by side; the threads of those that hang do not keep the process.

    Raises:
        BaseException: The first failure among them.
    """
    answers: dict[int, T] = {}
    failures: dict[int, BaseException] = {}

    def run(number: int) -> None:
        try:
            answers[number] = calls[number]()
        except BaseException as error:  # noqa: BLE001  the caller raises it
            failures[number] = error

    threads = [
        threading.Thread(target=inheriting(run), args=(number,), daemon=True)
        for number in range(1, len(calls))
    ]
    for thread in threads:
        thread.start()
    run(0)
    for thread in threads:
        thread.join()
    if failures:
        raise failures[min(failures)]
    return [answers[number] for number in range(len(calls))]


def _stat(store: Store, key: str) -> ObjectInfo | None:
    try:
        return retrying(lambda: store.stat(key))
    except NotFoundError:
        return None
