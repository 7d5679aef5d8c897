"""The manifest: every object of a dataset version, with its size and digests.

    _datasync/manifests/<version>.parquet      key, bytes, crc32c, sha256, samples    one row an object

A manifest lists the objects that an `index.json` points at (or, for an arbitrary tree, every file of it), but
not `index.json` itself, which names the manifest. Rows are sorted by key as UTF-8 bytes, keys are unique.

`version` is the SHA-256, in hex, over the rows in that order, each as

    u32 length of the key · the key in UTF-8 · u64 bytes · the 32 bytes of the object's SHA-256

all little-endian. CRCs and sample counts are left out: they follow from the bytes, and a tool that does not
know them must arrive at the same version.

Columns are Arrow arrays, so a manifest costs its bytes and not a Python object for each row.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shards.errors import FormatError

if TYPE_CHECKING:
    import pyarrow as pa

_BATCH = 65_536
_HEAD = struct.Struct("<I")
_SIZE = struct.Struct("<Q")


def manifest_key(version: str) -> str:
    """Where the manifest of `version` lies, relative to the dataset."""
    return f"_datasync/manifests/{version}.parquet"


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestEntry:
    """One object.

    Args:
        key (str): Relative to the dataset, '/'-separated.
        bytes (int): Size in bytes.
        sha256 (str): SHA-256 of the object, 64 hex digits.
        crc32c (int | None): CRC-32C of the object, where known. Default: ``None``.
        samples (int | None): Samples in it, where it is a shard. Default: ``None``.
    """

    key: str
    bytes: int
    sha256: str
    crc32c: int | None = None
    samples: int | None = None


class Manifest:
    """Every object of one version, sorted by key. Build with `from_entries` or `from_parquet`.

    Args:
        table (pyarrow.Table): Rows with the columns of `schema()`, sorted and unique by key.
    """

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    @classmethod
    def from_entries(cls, entries: Iterable[ManifestEntry]) -> Manifest:
        """A manifest of `entries`, in any order.

        An entry given twice with the same content counts once.

        Raises:
            FormatError: A key is given twice with different content or is not UTF-8; a digest is bad.
        """
        import pyarrow as pa

        batches: list[pa.RecordBatch] = []
        rows: list[tuple[str, int, int | None, bytes, int | None]] = []
        for entry in entries:
            rows.append((entry.key, entry.bytes, entry.crc32c, _raw_digest(entry), entry.samples))
            if len(rows) == _BATCH:
                batches.append(_batch(rows))
                rows = []
        if rows or not batches:
            batches.append(_batch(rows))
        table = pa.Table.from_batches(batches, schema=schema()).sort_by("key").combine_chunks()
        return cls(_unique(table))

    @classmethod
    def from_parquet(cls, data: bytes | memoryview, *, where: str = "manifest") -> Manifest:
        """Read what `to_parquet` wrote; `where` names it in errors.

        Raises:
            FormatError: Not Parquet, not these columns, unsorted or repeated keys.
        """
        import pyarrow as pa

        return cls(pa.Table.from_batches(list(read_batches(pa.BufferReader(data), where=where)), schema()))

    def to_parquet(self) -> bytes:
        """This manifest as a Parquet file."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        sink = pa.BufferOutputStream()
        pq.write_table(self.table, sink, compression="zstd", row_group_size=1 << 20, store_schema=False)
        return bytes(sink.getvalue())

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def entries(self) -> Iterator[ManifestEntry]:
        """Every entry, by key; made as they are asked for."""
        return self.entries_from("")

    def entries_from(self, key: str) -> Iterator[ManifestEntry]:
        """The entries whose key is `key` or later."""
        for batch in self.table.slice(self._lower_bound(key)).to_batches(max_chunksize=_BATCH):
            columns = [batch.column(name).to_pylist() for name in schema().names]
            for name, size, crc, digest, samples in zip(*columns, strict=True):
                yield ManifestEntry(key=name, bytes=size, crc32c=crc, sha256=digest.hex(), samples=samples)

    def get(self, key: str) -> ManifestEntry | None:
        """The entry of `key`, or None. A binary search."""
        entry = next(self.entries_from_one(key), None)
        return entry if entry is not None and entry.key == key else None

    def entries_from_one(self, key: str) -> Iterator[ManifestEntry]:
        """Like `entries_from`, but at most one entry is made."""
        at = self._lower_bound(key)
        return iter(list(Manifest(self.table.slice(at, 1)).entries)) if at < len(self) else iter(())

    def __contains__(self, key: str) -> bool:
        return self.get(key) is not None

    @property
    def total_bytes(self) -> int:
        """Bytes of all objects together."""
        import pyarrow.compute as pc

        return int(pc.sum(self.table.column("bytes")).as_py() or 0)

    @property
    def total_samples(self) -> int:
        """Samples in all objects together; objects without a count have none."""
        import pyarrow.compute as pc

        return int(pc.sum(self.table.column("samples")).as_py() or 0)

    @cached_property
    def version(self) -> str:
        """The dataset version: SHA-256 over the entries as the module's docstring lays them out."""
        digest = hashlib.sha256()
        for batch in self.table.to_batches(max_chunksize=_BATCH):
            fold(digest, batch)
        return digest.hexdigest()

    def _lower_bound(self, key: str) -> int:
        column, wanted = self.table.column("key"), key.encode()
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if column[middle].as_py().encode() < wanted:
                low = middle + 1
            else:
                high = middle
        return low


def read_batches(source: Any, *, where: str = "manifest") -> Iterator[pa.RecordBatch]:
    """The rows of a manifest's file, checked, a bounded number at a time.

    Args:
        source (pyarrow.NativeFile): The file; it is read as it is needed.
        where (str): Names it in errors.

    Raises:
        FormatError: Not Parquet, not these columns, unsorted or repeated keys.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    names, last = schema().names, None
    try:
        file = pq.ParquetFile(source, buffer_size=1 << 20, pre_buffer=False)
        if missing := [name for name in names if name not in file.schema_arrow.names]:
            raise pa.ArrowInvalid(f"it has no column {missing[0]}")
        for raw in file.iter_batches(_BATCH, columns=names, use_threads=False):
            batch = raw.select(names).cast(schema())
            keys = batch.column("key")
            if any(batch.column(name).null_count for name in ("key", "bytes", "sha256")):
                raise FormatError(f"{where} has rows without a key, a size or a digest")
            if not len(keys):
                continue
            first = keys[0].as_py().encode()
            rising = len(keys) < 2 or pc.all(pc.less(keys[:-1], keys[1:])).as_py()
            if not rising or (last is not None and first <= last):
                raise FormatError(f"{where} has keys that are repeated or out of order")
            last = keys[-1].as_py().encode()
            yield batch
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowKeyError, OSError, ValueError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(
            f"{where} is not a manifest: {error}",
            mend="replicate or shard the dataset again to write a new one",
        ) from error


def fold(digest: Any, batch: pa.RecordBatch) -> None:
    """Add rows, in their order, to the SHA-256 that becomes the version."""
    parts: list[bytes] = []
    keys, sizes = batch.column("key").to_pylist(), batch.column("bytes").to_pylist()
    for key, size, sha in zip(keys, sizes, batch.column("sha256").to_pylist(), strict=True):
        raw = key.encode()
        parts += (_HEAD.pack(len(raw)), raw, _SIZE.pack(size), sha)
    digest.update(b"".join(parts))


def schema() -> pa.Schema:
    """The columns of a manifest."""
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("key", pa.string(), nullable=False),
            pa.field("bytes", pa.uint64(), nullable=False),
            pa.field("crc32c", pa.uint32()),
            pa.field("sha256", pa.binary(32), nullable=False),
            pa.field("samples", pa.uint64()),
        ]
    )


def _batch(rows: list[tuple[str, int, int | None, bytes, int | None]]) -> Any:
    import pyarrow as pa

    columns = list(zip(*rows, strict=True)) if rows else [()] * 5
    arrays = [pa.array(values, field.type) for values, field in zip(columns, schema(), strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema())


def _raw_digest(entry: ManifestEntry) -> bytes:
    """The digest's 32 bytes, after checking the entry."""
    try:
        raw = bytes.fromhex(entry.sha256)
        entry.key.encode()
    except UnicodeEncodeError as error:
        raise FormatError(
            f"the name {entry.key!r} is not UTF-8 and no object store can hold it", mend="rename the file"
        ) from error
    except ValueError as error:
        raise FormatError(f"{entry.key}: sha256 {entry.sha256!r} is not hex") from error
    if len(raw) != 32 or not entry.key or entry.bytes < 0:
        raise FormatError(f"{entry.key!r}: an entry needs a key, a size and 64 hex digits of SHA-256")
    return raw


def _unique(table: pa.Table) -> pa.Table:
    """`table` without repeated rows; the same key with other content is an error."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    keys = table.column("key").combine_chunks() if table.num_rows else table.column("key")
    if table.num_rows < 2:
        return table
    same = pc.equal(keys[1:], keys[:-1]).to_numpy(zero_copy_only=False)
    if not same.any():
        return table
    for at in np.flatnonzero(same):
        first, second = table.slice(int(at), 1).to_pylist()[0], table.slice(int(at) + 1, 1).to_pylist()[0]
        if (first["bytes"], first["sha256"]) != (second["bytes"], second["sha256"]):
            raise FormatError(f"{first['key']} is listed twice, with different content")
    return table.filter(pa.array(np.concatenate([[True], ~same])))
