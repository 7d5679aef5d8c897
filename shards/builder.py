"""Rows in, finished shards out: the heart of `datasync shard` and of `ShardWriter`.

    rows, Arrow batches ──► ShardCutter ──► drafts ──► seal: compress, digest, name ──► FinishedShard

Where a shard ends depends on nothing but the rows before it: a shard takes rows until the next one would make
it larger than the limit, and is larger only if a single row is. So the same rows give the same bytes, by
whatever path and in whatever batches they come (invariant 3). A shard is named by its content (invariant 1):

    shards/NNNNN-<first 16 digits of the SHA-256 of the stored file>.mds[.zstd]

Everything here is in memory; who builds decides where finished shards go.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shards import compression as _compression
from shards import scratch
from shards.digests import Buffer, check_algorithm, digest_bytes
from shards.errors import UsageError
from shards.index import FileInfo, ShardInfo
from shards.mds import U32_MAX, Bytes1D, Ints, Layout, RowError, header, too_large
from shards.sizes import parse_bytes

if TYPE_CHECKING:
    import pyarrow as pa

DEFAULT_SIZE_LIMIT = 1 << 26
# sha256 names a shard and proves identity; xxh3_64 is what readers check before use.
STORED_HASHES = ("sha256", "xxh3_64")
RAW_HASHES = ("xxh3_64",)

# Pieces of at least this many bytes on average are copied one by one.
_LARGE = 1 << 12


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedShard:
    """A shard ready to be stored.

    Args:
        info (ShardInfo): Its entry in the index.
        data (Buffer): The bytes of `info.stored`.
    """

    info: ShardInfo
    data: Buffer


@dataclass(frozen=True, slots=True)
class Draft:
    """The rows of one shard: their bytes in pieces, and the size of each."""

    pieces: Sequence[Buffer]
    sizes: Ints


class Recipe:
    """What all shards of a dataset have in common; checked before any work.

    Args:
        columns (Mapping[str, str]): Column -> encoding.
        compression (str | None): Such as ``zstd:3``. Default: ``None``.
        hashes (Sequence[str] | None): Digests to keep for raw and stored files, beside those that are always
            kept. Default: ``None``.
        size_limit (int | str | None): Bytes that a raw shard does not exceed; None for what fits in 4 GiB.
            Default: 64 MiB.
        ordinal (int): The number that leads the names. Default: ``0``.
    """

    def __init__(
        self,
        columns: Mapping[str, str],
        *,
        compression: str | None = None,
        hashes: Sequence[str] | None = None,
        size_limit: int | str | None = DEFAULT_SIZE_LIMIT,
        ordinal: int = 0,
    ) -> None:
        if ordinal < 0:
            raise UsageError(f"a shard cannot have the number {ordinal}", mend="count from 0")
        self.layout = Layout(columns)
        self.compression = compression or None
        self.suffix = f".{_compression.extension(self.compression)}" if self.compression else ""
        asked = [check_algorithm(name) for name in hashes or ()]
        self.stored_hashes = tuple(sorted({*asked, *STORED_HASHES}))
        self.raw_hashes = tuple(sorted({*asked, *RAW_HASHES}))
        self.size_limit = _size_limit(size_limit)
        self.ordinal = ordinal
        self.config = self.layout.config(
            compression=self.compression, hashes=self.stored_hashes, size_limit=self.size_limit
        )

    def seal(self, draft: Draft) -> FinishedShard:
        """Assemble, compress, digest and name one shard. Pure: the same draft gives the same bytes."""
        offsets = np.zeros(len(draft.sizes) + 1, np.int64)
        np.cumsum(draft.sizes, out=offsets[1:])
        raw = _join([header(offsets, self.config), *draft.pieces])
        stored: Buffer = raw if self.compression is None else _compression.compress(raw, self.compression)
        hashes = digest_bytes(stored, self.stored_hashes)
        name = f"shards/{self.ordinal:05d}-{hashes['sha256'][:16]}.mds"
        stored_info = FileInfo(name + self.suffix, len(stored), hashes)
        zipped = self.compression is not None
        info = ShardInfo(
            samples=len(draft.sizes),
            size_limit=self.size_limit,
            compression=self.compression,
            hashes=self.stored_hashes,
            column_names=self.layout.names,
            column_encodings=self.layout.encodings,
            column_sizes=self.layout.sizes,
            raw=FileInfo(name, len(raw), digest_bytes(raw, self.raw_hashes)) if zipped else stored_info,
            zip=stored_info if zipped else None,
        )
        return FinishedShard(info=info, data=stored)


class ShardCutter:
    """Rows in, drafts out.

    Args:
        recipe (Recipe): Columns and limit.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._layout = recipe.layout
        self._empty = 8 + len(recipe.config)
        self._limit = U32_MAX if recipe.size_limit is None else recipe.size_limit
        self._done: list[Draft] = []
        self._start()

    @property
    def pending(self) -> int:
        """Rows taken that are in no draft yet."""
        return len(self._sizes)

    def write(self, row: Mapping[str, Any]) -> list[Draft]:
        """Take one row; the drafts that are now complete. `RowError` leaves everything as it was."""
        parts = self._layout.parts(row)
        size = sum(map(len, parts))
        if size < _LARGE * len(parts):
            return self.write_sample(b"".join(parts))
        return self._write(parts, size)

    def write_sample(self, sample: Buffer) -> list[Draft]:
        """Take one row that is encoded already; the drafts that are now complete."""
        return self._write((sample,), len(sample))

    def _write(self, parts: Sequence[Buffer], size: int) -> list[Draft]:
        self._check(size)
        if self.pending and self._bytes + 4 + size > self._limit:
            self._cut()
        self._pieces += parts
        self._sizes.append(size)
        self._bytes += 4 + size
        return self._take()

    def write_batch(self, batch: pa.RecordBatch) -> list[Draft]:
        """Take the rows of an Arrow batch; the drafts that are now complete.

        Raises:
            RowError: Some row cannot be held. The first `written` rows were taken, and drafts that they made
                come with the next call. Go on from there, one row at a time to find the bad one.
        """
        from shards.arrow import encode_batch

        written = 0
        try:
            for data, sizes in encode_batch(self._layout, batch):
                self._check(int(sizes.max()))
                self._add(data, sizes)
                written += len(sizes)
        except RowError as error:
            error.written = written
            raise
        return self._take()

    def finish(self) -> list[Draft]:
        """The drafts that are left; the cutter is then empty and may be used again."""
        if self.pending:
            self._cut()
        return self._take()

    def _add(self, data: Bytes1D, sizes: Ints) -> None:
        """Append samples, cutting as `write` would for each of them."""
        ends = np.cumsum(sizes)
        costs = ends + 4 * np.arange(1, len(sizes) + 1)
        row = 0
        while row < len(sizes):
            spent = int(costs[row - 1]) if row else 0
            stop = int(np.searchsorted(costs, spent + self._limit - self._bytes, side="right"))
            if stop <= row:
                if self.pending:
                    self._cut()
                    continue
                stop = row + 1
            begin, end = int(ends[row - 1]) if row else 0, int(ends[stop - 1])
            self._pieces.append(data[begin:end].data)
            self._sizes.frombytes(np.ascontiguousarray(sizes[row:stop]).tobytes())
            self._bytes += int(costs[stop - 1]) - spent
            row = stop

    def _check(self, size: int) -> None:
        if self._empty + 4 + size > U32_MAX:
            raise too_large(size)

    def _cut(self) -> None:
        self._done.append(Draft(self._pieces, np.array(self._sizes, np.int64)))
        self._start()

    def _start(self) -> None:
        self._pieces: list[Buffer] = []
        self._sizes = array("q")
        self._bytes = self._empty

    def _take(self) -> list[Draft]:
        done, self._done = self._done, []
        return done


class ShardBuilder:
    """Rows in, finished shards out, each as soon as it is complete.

        builder = ShardBuilder({"text": "str"}, compression="zstd:3", ordinal=task)
        for batch in batches:
            for shard in builder.write_batch(batch):
                store.write(shard.info.stored.basename, shard.data)
        for shard in builder.finish(): …

    Args are those of `Recipe`.
    """

    def __init__(
        self,
        columns: Mapping[str, str],
        *,
        compression: str | None = None,
        hashes: Sequence[str] | None = None,
        size_limit: int | str | None = DEFAULT_SIZE_LIMIT,
        ordinal: int = 0,
    ) -> None:
        self.recipe = Recipe(
            columns, compression=compression, hashes=hashes, size_limit=size_limit, ordinal=ordinal
        )
        self._cutter = ShardCutter(self.recipe)

    @property
    def pending(self) -> int:
        """Rows taken that are in no finished shard yet."""
        return self._cutter.pending

    def write(self, row: Mapping[str, Any]) -> list[FinishedShard]:
        """Take one row; the shards that are now finished. `RowError` leaves everything as it was."""
        return [self.recipe.seal(draft) for draft in self._cutter.write(row)]

    def write_sample(self, sample: Buffer) -> list[FinishedShard]:
        """Take one row as `recipe.layout.encode` gave it; the shards that are now finished."""
        return [self.recipe.seal(draft) for draft in self._cutter.write_sample(sample)]

    def write_batch(self, batch: pa.RecordBatch) -> list[FinishedShard]:
        """Take the rows of an Arrow batch; the shards that are now finished.

        Raises:
            RowError: Some row cannot be held. The first `written` rows were taken, and shards that they made
                come with the next call. Go on from there, one row at a time to find the bad one.
        """
        return [self.recipe.seal(draft) for draft in self._cutter.write_batch(batch)]

    def finish(self) -> list[FinishedShard]:
        """The shards that are left; the builder is then empty and may be used again."""
        return [self.recipe.seal(draft) for draft in self._cutter.finish()]


def _join(pieces: Sequence[Buffer]) -> Buffer:
    """All pieces as one."""
    total = sum(map(len, pieces))
    if total < _LARGE * len(pieces):
        return b"".join(pieces)
    out = scratch.take(total)
    at = 0
    for piece in pieces:
        out[at : at + len(piece)] = piece
        at += len(piece)
    return out.toreadonly()


def _size_limit(value: int | str | None) -> int | None:
    if not value:
        return None
    limit = parse_bytes(value)
    if limit > U32_MAX:
        raise UsageError(
            f"size_limit is {limit:,} bytes; a shard is below 4 GiB, since its offsets have 32 bits",
            mend="choose less; 64mb is a good size",
        )
    return limit
