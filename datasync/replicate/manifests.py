"""The file of a manifest: held whole where it is small, else read where it lies, as far as it is needed.

So planning costs the same memory at a million objects and at ten million.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from datasync.replicate.plan import schema
from datasync.replicate.retry import RETRY_SECONDS, retrying
from datasync.storage.base import Buffer, ObjectInfo, Store
from shards.manifest import read_batches

if TYPE_CHECKING:
    import pyarrow as pa

HELD_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFile:
    """A manifest's file.

    Args:
        where (str): Its URL, for messages.
        bytes (int): Its size.
        data (bytes | None): Its content, where that is small.
        store (Store | None), key (str), etag (str | None): Where it lies, otherwise.
    """

    where: str
    bytes: int
    data: Buffer | None = None
    store: Store | None = None
    key: str = ""
    etag: str | None = None

    @classmethod
    def open(cls, store: Store, key: str, *, retry_seconds: float = RETRY_SECONDS) -> ManifestFile:
        """The file at a store.

        Raises:
            NotFoundError: It is not there.
        """
        info: ObjectInfo = retrying(lambda: store.stat(key), seconds=retry_seconds)
        where = f"{store.url}/{key}"
        if info.bytes > HELD_BYTES:
            return cls(where=where, bytes=info.bytes, store=store, key=key, etag=info.etag)
        data = retrying(lambda: store.read(key, etag=info.etag), seconds=retry_seconds)
        return cls(where=where, bytes=len(data), data=data)

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

    def read(self, start: int, length: int) -> Buffer:
        """A range of the file, of the version that was opened."""
        if self.data is not None:
            return memoryview(self.data)[start : start + length]
        assert self.store is not None
        store = self.store
        return retrying(lambda: store.read(self.key, start=start, length=length, etag=self.etag))

    def write_to(self, store: Store, key: str) -> None:
        """Store a copy of the file."""
        if self.data is not None:
            store.write(key, self.data)
            return
        upload = store.begin(key, bytes=self.bytes)
        step, tags = upload.part_bytes, {}
        for number, start in enumerate(range(0, self.bytes, step), start=1):
            part = self.read(start, min(step, self.bytes - start))
            tags[number] = upload.put(number, part)
        upload.complete(tags)


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
