"""What a store is: objects under keys, below one root.

A `Store` is one prefix of one bucket, one folder, or one place that fsspec can reach. Keys are relative to
its root, '/'-separated, and cannot leave it (invariant 10). All methods are synchronous and thread-safe;
concurrency is the caller's. A store pickles: clients are made lazily, once a process, so that forked and
spawned workers can use it.

Invariant 2 is kept here: an object under its key is always complete. A local write goes to a temporary name,
fsync, rename; an S3 write is one PUT or a multipart upload that is completed last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

Buffer = bytes | bytearray | memoryview

TIME_TAG = "time-"  # begins an etag that other content of the same size and second would have too


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One object as its store describes it.

    Args:
        key (str): Relative to the store's root.
        bytes (int): Size in bytes.
        etag (str | None): Opaque version tag, usable in `if_match` and for pinned reads. For local files
            it is made from inode, size and mtime in nanoseconds.
        mtime (float | None): Seconds since the epoch.
        crc32c (int | None): Whole-object CRC-32C, where the store itself keeps one.
    """

    key: str
    bytes: int
    etag: str | None = None
    mtime: float | None = None
    crc32c: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """What `Store.read_into` read.

    Args:
        bytes (int): How many bytes lie in the buffer; the object's size where it is larger, and then what
            lies there is of no use.
        crc32c (int): CRC-32C of those bytes.
        sha256 (str | None): Their SHA-256 in hex, where it was asked for.
        checked (bool): They are the whole object and have the checksum that the store keeps of it.
    """

    bytes: int
    crc32c: int
    sha256: str | None = None
    checked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What a store can do; found by probing, since imitators of S3 differ.

    Args:
        if_absent (bool): Conditional create has exactly one winner.
        if_match (bool): Conditional replace by ETag.
        crc32c (bool): The store checks a CRC-32C given with a write and refuses a mismatch.
        multipart (bool): Large objects can be written in parts that survive the process.
        server_copy (bool): Objects can be copied inside the endpoint.
        ranges (bool): Part of an object can be read.
    """

    if_absent: bool
    if_match: bool
    crc32c: bool
    multipart: bool
    server_copy: bool
    ranges: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadInfo:
    """A multipart upload that was begun and not yet completed."""

    key: str
    upload_id: str
    started: float | None = None


class Upload(Protocol):
    """A large object on its way: parts in any order and in parallel, then `complete` makes it visible."""

    key: str
    upload_id: str
    part_bytes: int

    def put(self, number: int, data: Buffer, *, crc32c: int | None = None) -> str:
        """Store part `number` (from 1) and return its tag. Putting a part again replaces it."""

    def wait_turn(self, number: int) -> None:
        """Wait until part `number` may be put, in a store that takes parts in order; who waits here must not
        hold what the parts before it need."""

    def give_up(self) -> None:
        """A part will not come: whoever waits for its turn goes on, and fails."""

    def parts(self) -> dict[int, tuple[str, int]]:
        """Parts that the store already holds: number -> (tag, bytes)."""

    def complete(
        self, tags: dict[int, str], *, if_absent: bool = False, if_match: str | None = None
    ) -> ObjectInfo:
        """Make the object visible from these parts."""

    def abort(self) -> None:
        """Drop the upload and its parts; safe to call twice."""


class Store(Protocol):
    """Objects below one root.

    Errors are those of `datasync.errors`: `NotFoundError`, `DeniedError`, `ConflictError`,
    `UnsupportedError`, `ThrottledError`, `TransientError`, `CorruptError`, else `StoreError`; each names the
    store and the key.
    """

    @property
    def url(self) -> str:
        """The root as a URL, without secrets: for messages, receipts and equality."""

    def child(self, prefix: str) -> Store:
        """The same store rooted at `prefix` below this root."""

    def abilities(self) -> Abilities:
        """What this store can do; probed once for each endpoint and cached."""

    def stat(self, key: str) -> ObjectInfo:
        """Describe one object."""

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        """Every object whose key starts with `prefix`, sorted by key as UTF-8 bytes, later than `after`.

        A listing that cannot be completed raises; it never ends early in silence.
        """

    def read(self, key: str, *, start: int = 0, length: int | None = None, etag: str | None = None) -> bytes:
        """The bytes of an object, or of a range of it; a short body is a `TransientError`.

        With `etag`, a changed object is a `ConflictError`.
        """

    def read_into(
        self,
        key: str,
        buffer: memoryview,
        *,
        start: int | None = None,
        etag: str | None = None,
        sha256: bool = False,
    ) -> Filled:
        """Read an object, or with `start` a range of it, into memory of the caller's; else like `read`.

        Fresh memory costs more than reading into it, so whoever moves many objects uses the same again. With
        `sha256` the bytes are hashed as they come, while they are in the processor's cache.
        """

    def stream(
        self,
        key: str,
        *,
        start: int = 0,
        length: int | None = None,
        etag: str | None = None,
        chunk: int = 1 << 20,
    ) -> AbstractContextManager[Iterator[Buffer]]:
        """Like `read`, in pieces of about `chunk` bytes; a short body raises from the iterator."""

    def write(
        self,
        key: str,
        data: Buffer,
        *,
        crc32c: int | None = None,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> ObjectInfo:
        """Store `data` whole under `key`, visible only when complete; the store checks the CRC if it can."""

    def write_file(self, key: str, path: Path, *, if_absent: bool = False) -> ObjectInfo:
        """Store a local file, in parts where it is large."""

    def begin(self, key: str, *, bytes: int) -> Upload:
        """Begin a multipart upload for an object of this size."""

    def resume(self, key: str, upload_id: str, *, bytes: int) -> Upload:
        """Go on with an upload that an earlier process began; 0 bytes are unknown ones, to abort it."""

    def uploads(self, prefix: str = "") -> Iterator[UploadInfo]:
        """Uploads begun and not completed."""

    def copy(self, source: Store, source_key: str, key: str) -> ObjectInfo:
        """Copy inside the endpoint, without moving bytes through here; else `UnsupportedError`."""

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; one that does not exist is no error."""
