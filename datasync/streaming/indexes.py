"""The index of a stream: read from the first healthy replica, kept in the cache for when none is.

Each time a source is made, the replica is asked whether its index is still the one in the cache (one `stat`
where the store has ETags), so that a dataset that was published again is noticed, and a large index is not
fetched by every rank. With all replicas down, the cached index serves, with a warning: its shards are named
by content, so they are still what it says. Where a key must have signed the index, one that it has not signed
is refused, wherever it comes from; the signature is kept with the cached index.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import queue
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from datasync.errors import (
    CorruptError,
    DatasyncError,
    DeniedError,
    FormatError,
    NotFoundError,
    TransientError,
)
from datasync.storage.base import Store
from datasync.storage.local import LocalStore
from datasync.streaming.filelock import file_lock
from datasync.streaming.replicas import Replicas
from datasync.streaming.stamps import FOLDER, encoded
from shards.index import BASENAME, Index

log = logging.getLogger("datasync.streaming")

Result = TypeVar("Result")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 10.0


def index_key(split: str | None) -> str:
    """Where the index of a split lies below the dataset."""
    return f"{split}/{BASENAME}" if split else BASENAME


def read_local(
    root: Path, split: str | None, *, signed_by: str | None = None, version: str | None = None
) -> Index:
    """The index of a dataset that has no replica.

    Raises:
        CorruptError: It is not signed by `signed_by`.
        NotFoundError: There is none, or it is of another version.
        FormatError: It is no index.
    """
    path = os.path.join(root, index_key(split))
    try:
        with open(path, "rb") as file:
            data = file.read()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFoundError(
            f"there is no dataset at {path}", mend="name a remote to stream it from, or another folder"
        ) from error
    if signed_by is not None:
        _check_signature(LocalStore(root), split, data, signed_by)
    index = Index.parse(data, where=path)
    _check_version(index, version, where=path)
    return index


def load_index(
    replicas: Replicas,
    root: Path,
    split: str | None,
    *,
    retry: int,
    timeout: float,
    signed_by: str | None = None,
    version: str | None = None,
) -> tuple[Index, int | None]:
    """The index of a dataset that has replicas, and the number of the one that has it; None if none answers.

    Args:
        replicas (Replicas): Where it can be read.
        root (Path): The cache folder.
        split (str | None): The split, if the dataset has them.
        retry (int): Rounds over all replicas after the first one.
        timeout (float): Seconds for one read, and the least time for which failures that can pass are
            retried.
        signed_by (str | None): The public key that must have signed it. Default: none.
        version (str | None): The version it must be; a replica that has another one is passed over. Default:
            that of the first replica that answers.

    Raises:
        CorruptError: No replica has one that this key has signed.
        FormatError: What is there is no index.
        StoreError: No replica has one that can be read; NotFoundError if it is the version that none has.
    """
    kept = _Kept(root, split, signed_by, version)
    deadline = time.monotonic() + timeout
    rounds = 0
    with kept.lock(timeout):
        while True:
            failures: list[tuple[str, DatasyncError]] = []  # two clusters may have buckets of one name
            tried: list[int] = []
            while (replica := replicas.pick(tried)) is not None:
                tried.append(replica.number)
                try:
                    index = within(timeout, lambda store=replica.store: kept.fetch(store))  # type: ignore[misc]
                except DatasyncError as error:
                    failures.append((replica.name, error))
                    replicas.bad(replica, error)
                else:
                    replicas.good(replica, bytes=0, seconds=0.0)
                    return index, replica.number
            passing = any(_can_pass(error) for _, error in failures)
            if passing:
                cached = kept.read()
                if cached is not None:
                    log.warning("no replica answers; using the index of the last run, %s", kept.path)
                    return cached, None
            if not passing or (rounds >= retry and time.monotonic() >= deadline):
                raise _verdict(index_key(split), failures)
            time.sleep(min(_FIRST_PAUSE * 2**rounds, _LONGEST_PAUSE) * random.uniform(0.5, 1.0))
            rounds += 1


class _Kept:
    """The copy of an index in the cache, and a note of whose copy it is."""

    def __init__(self, root: Path, split: str | None, signed_by: str | None, version: str | None) -> None:
        key = index_key(split)
        self.path = os.path.join(root, key)
        self._key = key
        self._split = split
        self._signed_by = signed_by
        self._version = version
        self._own = os.path.join(root, FOLDER)
        self._note = os.path.join(self._own, f"index-{encoded(key)}.json")

    @contextlib.contextmanager
    def lock(self, timeout: float) -> Iterator[None]:
        """One process asks, the others wait for its answer; without a writable cache, each asks."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                os.makedirs(self._own, exist_ok=True)
                path = os.path.join(self._own, f"index-{encoded(self._key)}.lock")
                stack.enter_context(file_lock(path, wait=lambda seconds: seconds < timeout))
            yield

    def fetch(self, store: Store) -> Index:
        """The index as `store` has it now."""
        note = self._read_note()
        if note is not None and note.get("url") == store.url:
            now = store.stat(self._key)
            if now.etag is not None and [now.etag, now.bytes] == [note.get("etag"), note.get("bytes")]:
                cached = self.read()
                if cached is not None:
                    return cached
        status = store.stat(self._key)
        data = store.read(self._key)
        signature = None
        if self._signed_by is not None:
            signature = _check_signature(store, self._split, data, self._signed_by).decode()
        index = Index.parse(data, where=f"{store.url}/{self._key}")
        _check_version(index, self._version, where=f"{store.url}/{self._key}")
        with contextlib.suppress(
            OSError
        ):  # a cache that cannot be written only costs the next reader a fetch
            note = {"url": store.url, "etag": status.etag, "bytes": len(data), "signature": signature}
            self._write(data, note)
        return index

    def read(self) -> Index | None:
        """The copy, if it is whole."""
        note = self._read_note()
        if note is None:
            return None
        try:
            with open(self.path, "rb") as file:
                data = file.read()
        except OSError:
            return None
        if hashlib.sha256(data).hexdigest() != note.get("sha256") or not self._is_signed(data, note):
            return None
        index = Index.parse(data, where=self.path)
        return index if self._version is None or is_version(index, self._version) else None

    def _is_signed(self, data: bytes, note: dict[str, object]) -> bool:
        """Whether the copy carries the signature that it must have."""
        if self._signed_by is None:
            return True
        from datasync.ops.signatures import prove

        try:
            prove(str(note.get("signature")).encode(), data, self._signed_by, where=self.path)
        except CorruptError:
            return False
        return True

    def _read_note(self) -> dict[str, object] | None:
        try:
            with open(self._note, encoding="utf-8") as file:
                note = json.load(file)
        except (OSError, ValueError):
            return None
        return note if isinstance(note, dict) else None

    def _write(self, data: bytes, note: dict[str, object]) -> None:
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        os.makedirs(self._own, exist_ok=True)
        _replace(self.path, data)
        note["sha256"] = hashlib.sha256(data).hexdigest()
        _replace(self._note, json.dumps(note).encode())


def is_version(index: Index, version: str) -> bool:
    """Whether `version` is the beginning of the dataset's version or of its index's fingerprint."""
    return index.fingerprint.startswith(version) or str(index.extra.get("version", "")).startswith(version)


def _check_version(index: Index, version: str | None, *, where: str) -> None:
    if version is not None and not is_version(index, version):
        has = index.extra.get("version") or index.fingerprint
        raise NotFoundError(
            f"{where} has version {str(has)[:12]}, not version {version[:12]}",
            mend="wait until a replica has it (datasync wait), or name a version that one has",
        )


def _check_signature(store: Store, split: str | None, data: bytes, public: str) -> bytes:
    """The signature of an index, which lies beside it; `CorruptError` if it is not by that key."""
    from datasync.ops.signatures import check_signature

    return check_signature(store.child(split) if split else store, data, public)[1]


def _replace(path: str, data: bytes) -> None:
    temporary = f"{path}.{uuid.uuid4().hex}.tmp"
    try:
        with open(temporary, "wb") as file:
            file.write(data)
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def within(seconds: float, function: Callable[[], Result]) -> Result:
    """What `function` returns or raises, if it does so in time; a store that says nothing is left behind."""
    answer: queue.SimpleQueue[tuple[Result | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answer.put((function(), None))
        except BaseException as error:  # noqa: BLE001  raised by the waiting thread
            answer.put((None, error))

    threading.Thread(target=run, name="datasync-index", daemon=True).start()
    try:
        result, error = answer.get(timeout=seconds)
    except queue.Empty:
        raise TransientError(
            f"the index was not answered within {seconds:.0f} s", mend="check that store"
        ) from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def _can_pass(error: DatasyncError) -> bool:
    return not isinstance(error, FormatError | CorruptError | NotFoundError | DeniedError)


def _verdict(key: str, failures: list[tuple[str, DatasyncError]]) -> DatasyncError:
    """The one failure, or one error for all of them."""
    errors = [error for _, error in failures]
    if len(errors) == 1:
        return errors[0]
    kind = next(
        (
            k
            for k in (FormatError, CorruptError, DeniedError, NotFoundError)
            if all(isinstance(e, k) for e in errors)
        ),
        TransientError,
    )
    lines = "\n  ".join(f"{name}: {error.message}" for name, error in failures)
    mend = next((error.mend for error in errors if error.mend), "")
    return kind(f"{key} could not be read from any replica\n  {lines}", mend=mend)
