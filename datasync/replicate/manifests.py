"""The files of a manifest and of an index: held where they are small, else read where they lie, as needed.

So a run costs the same memory at a million objects and at ten million.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, BinaryIO, Self

from datasync.errors import ConflictError, NotFoundError, StoreError
from datasync.replicate.plan import schema
from datasync.replicate.retry import RETRY_SECONDS, retrying
from datasync.storage.base import Buffer, ObjectInfo, Store
from shards.manifest import read_batches

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

HELD_BYTES = 16 << 20
_PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file at a store, of the version that was opened.

    Args:
        where (str): Its URL, for messages.
        bytes (int): Its size.
        data (bytes | None): Its content, where that is small.
        store (Store | None), key (str), etag (str | None): Where it lies, otherwise.
        spool (BinaryIO | None): A file of this process that has it, after `spooled`.
    """

    where: str
    bytes: int
    data: Buffer | None = None
    store: Store | None = None
    key: str = ""
    etag: str | None = None
    spool: BinaryIO | None = None

    @classmethod
    def open(
        cls, store: Store, key: str, *, info: ObjectInfo | None = None, retry_seconds: float = RETRY_SECONDS
    ) -> Self:
        """The file at a store; `info` is what is known of it already.

        Raises:
            NotFoundError: It is not there.
        """
        info = info or retrying(lambda: store.stat(key), seconds=retry_seconds)
        where = f"{store.url}/{key}"
        if info.bytes > HELD_BYTES:
            return cls(where=where, bytes=info.bytes, store=store, key=key, etag=info.etag)
        data = retrying(lambda: store.read(key, etag=info.etag), seconds=retry_seconds)
        return cls(where=where, bytes=len(data), data=data)

    def spooled(self) -> Self:
        """The same file, copied to a temporary one where it is large: for what may be replaced at its store
        before it is read again. Where there is no room for it, it is read where it lies."""
        if self.data is not None:
            return self
        spool = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # lives as long as what is returned
        try:
            for start in range(0, self.bytes, _PIECE_BYTES):
                piece = self.read(start, min(_PIECE_BYTES, self.bytes - start))
                while piece:
                    piece = piece[spool.write(piece) :]
        except OSError as error:
            log.info("%s is not kept in %s: %s", self.where, tempfile.gettempdir(), error)
            spool.close()
            return self
        return replace(self, spool=spool)

    def read(self, start: int, length: int) -> Buffer:
        """A range of the file, of the version that was opened."""
        if self.data is not None:
            return memoryview(self.data)[start : start + length]
        if self.spool is not None:
            return os.pread(self.spool.fileno(), length, start)
        assert self.store is not None
        store = self.store
        return retrying(lambda: store.read(self.key, start=start, length=length, etag=self.etag))

    def content(self) -> Buffer:
        """All of it, in memory."""
        return self.data if self.data is not None else self.read(0, self.bytes)

    def sha256(self) -> str:
        """The SHA-256 of the file in hex, for which it is read once more where it is large."""
        digest = hashlib.sha256()
        for start in range(0, self.bytes, _PIECE_BYTES):
            digest.update(self.read(start, min(_PIECE_BYTES, self.bytes - start)))
        return digest.hexdigest()

    def write_to(
        self, store: Store, key: str, *, if_absent: bool = False, if_match: str | None = None
    ) -> ObjectInfo:
        """Store a copy of the file.

        Raises:
            ConflictError: The condition does not hold.
        """
        if self.data is not None:
            return store.write(key, self.data, if_absent=if_absent, if_match=if_match)
        upload = store.begin(key, bytes=self.bytes)
        try:
            step, tags = upload.part_bytes, {}
            for number, start in enumerate(range(0, self.bytes, step), start=1):
                try:
                    part = self.read(start, min(step, self.bytes - start))
                except (ConflictError, NotFoundError) as error:
                    raise StoreError(
                        f"{self.where} was replaced or removed during this run", mend="run again"
                    ) from error
                tags[number] = upload.put(number, part)
            return upload.complete(tags, if_absent=if_absent, if_match=if_match)
        except BaseException:
            with contextlib.suppress(StoreError):
                upload.abort()
            raise


class ManifestFile(StoredFile):
    """A manifest's file."""

    __slots__ = ()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Its rows, checked, with the columns of `plan.schema`; tags are null.

        Raises:
            FormatError: It is damaged.
        """
        import pyarrow as pa

        file = pa.BufferReader(self.data) if self.data is not None else pa.PythonFile(_Ranges(self), "r")
        for batch in read_batches(file, where=self.where):
            columns = [*batch.columns, pa.nulls(batch.num_rows, pa.string())]
            yield pa.RecordBatch.from_arrays(columns, schema=schema())


class _Ranges(io.RawIOBase):
    """A file that asks its store for what is read."""

    def __init__(self, file: ManifestFile) -> None:
        self._file = file
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.bytes}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(self._file.bytes - self._at, 0)
        data = bytes(self._file.read(self._at, left if size < 0 else min(size, left))) if left else b""
        self._at += len(data)
        return data
