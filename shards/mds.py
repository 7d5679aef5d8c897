"""The bytes of one MDS shard: how rows are laid out, and a reader that maps the file.

    shard    [samples n: u32] [offset: u32 × (n + 1)] [config: JSON] [sample 0] … [sample n-1]
    sample   [bytes of the value: u32, for each column without a fixed size] [value of each column]

Everything is little-endian. Offsets count from the beginning of the file; the first points behind the config,
the last to the end of the file. Columns stand sorted by name. A shard stays below 4 GiB, since offsets have
32 bits: `Layout` and the builder check it, nothing wraps.

A `Shard` trusts nothing that its file says (invariant 10): its size, its count and its offsets are checked
when it is opened, the sizes inside a sample when that sample is read.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shards import compression, encodings
from shards.digests import check_bytes, check_size
from shards.encodings import Buffer, Encoding, EncodingError
from shards.errors import CorruptError, FormatError, UsageError
from shards.index import VERSION, ShardInfo

Bytes1D = np.ndarray[Any, np.dtype[np.uint8]]
Ints = np.ndarray[Any, np.dtype[np.int64]]

U32_MAX = (1 << 32) - 1
_REFETCH = "fetch it again from a good replica (datasync repair)"


class RowError(FormatError):
    """A row that its columns cannot hold; the rows before it are kept.

    Args:
        message (str): What is wrong, naming the column.
        mend (str): What the user can do about it. Default: ``""``.
        written (int): Of the rows given in this call, how many were taken before the error. Default: ``0``.
    """

    def __init__(self, message: str, *, mend: str = "", written: int = 0) -> None:
        super().__init__(message, mend=mend)
        self.written = written


class Layout:
    """How the columns of a dataset stand in a sample.

    Args:
        columns (Mapping[str, str]): Column -> encoding.

    Raises:
        UsageError: No column, or an encoding that is unknown.
    """

    def __init__(self, columns: Mapping[str, str]) -> None:
        if not columns:
            raise UsageError("a dataset needs at least one column", mend='name them: {"text": "str"}')
        self.names: tuple[str, ...] = tuple(sorted(columns))
        self.encodings: tuple[str, ...] = tuple(columns[name] for name in self.names)
        self.coders: tuple[Encoding, ...] = tuple(encodings.get(encoding) for encoding in self.encodings)
        self.sizes: tuple[int | None, ...] = tuple(coder.size for coder in self.coders)
        self.head_bytes = 4 * self.sizes.count(None)
        self._head = struct.Struct(f"<{self.sizes.count(None)}I")
        self._columns = tuple(zip(self.names, self.coders, self.sizes, strict=True))

    def encode(self, row: Mapping[str, Any]) -> bytes:
        """The bytes of one sample; `RowError` naming the column that cannot hold its value."""
        return b"".join(self.parts(row))

    def parts(self, row: Mapping[str, Any]) -> list[bytes]:
        """`encode` before its last step, which copies: what stands in front of the values, and each value."""
        sizes: list[int] = []
        parts = [b""]
        for name, coder, size in self._columns:
            try:
                value = coder.encode(row[name])
            except KeyError as error:
                if name in row:
                    raise
                raise RowError(f"a row has no column {name!r}; it has {_list(row)}", mend=_MISSING) from error
            except (EncodingError, AttributeError, TypeError, ValueError) as error:
                raise bad_value(name, coder, error, row[name]) from error
            if size is None:
                sizes.append(len(value))
            elif len(value) != size:
                raise bad_value(name, coder, EncodingError(f"expected {size} bytes, got {len(value)}"), None)
            parts.append(value)
        parts[0] = self._head.pack(*sizes)
        total = sum(map(len, parts))
        if total > U32_MAX:
            raise too_large(total)
        return parts

    def config(self, *, compression: str | None, hashes: Sequence[str], size_limit: int | None) -> bytes:
        """The JSON between offsets and samples."""
        return json.dumps(
            {
                "column_encodings": self.encodings,
                "column_names": self.names,
                "column_sizes": self.sizes,
                "compression": compression,
                "format": "mds",
                "hashes": list(hashes),
                "size_limit": size_limit,
                "version": VERSION,
            },
            sort_keys=True,
        ).encode()


_MISSING = "every row needs every column; name other columns or leave the row out"


def bad_value(column: str, coder: Encoding, error: Exception, value: Any) -> RowError:
    """The error for a value that its column cannot hold."""
    shown = (
        "" if value is None else f" (value: {value!r:.60})" if isinstance(value, int | float | str) else ""
    )
    name = type(coder).__name__.lower()
    return RowError(
        f"column {column!r} ({name}) cannot hold a value: {error}{shown}",
        mend="mend or leave out the row, or choose another encoding for the column",
    )


def too_large(size: int) -> RowError:
    """The error for a sample that offsets of 32 bits cannot reach."""
    return RowError(f"a sample of {size:,} bytes does not fit in a shard (4 GiB)", mend="split the sample")


def header(offsets: Ints, config: bytes) -> bytes:
    """What stands before the samples; `offsets` (n + 1 of them) count from the first sample."""
    count = len(offsets) - 1
    absolute = offsets + (8 + 4 * count + len(config))
    assert int(absolute[-1]) <= U32_MAX
    return b"".join((struct.pack("<I", count), absolute.astype("<u4").tobytes(), config))


def window(data: Bytes1D, size: int) -> np.ndarray[Any, Any]:
    """`data` as overlapping items of `size` bytes, one at each byte: indexing it gathers or scatters in C."""
    return np.ndarray((max(len(data) - size + 1, 0),), np.dtype((np.void, size)), buffer=data, strides=(1,))


def gather(data: Bytes1D, starts: Ints, size: int) -> Bytes1D:
    """uint8[n, size]: the `size` bytes from each of `starts` on."""
    if size == 0 or len(starts) == 0:
        return np.empty((len(starts), size), np.uint8)
    return window(data, size)[starts].view(np.uint8).reshape(len(starts), size)


class Shard:
    """The samples of one uncompressed shard. Thread-safe; does not pickle.

    Args:
        source (str | Path | Buffer): The raw file, which is mapped, or its bytes.
        info (ShardInfo): What the index says of it.
        allow_unsafe_types (bool): Open it even if reading a column may run code. Default: ``False``.
        where (str | None): What to call it in messages. Default: its path, or its name in the index.

    Raises:
        CorruptError: It is truncated, or its head does not fit the index.
        UsageError: A column may run code, and `allow_unsafe_types` is not set.
    """

    def __init__(
        self,
        source: str | Path | Buffer,
        info: ShardInfo,
        *,
        allow_unsafe_types: bool = False,
        where: str | None = None,
    ) -> None:
        self.info = info
        self.where = where or (str(source) if isinstance(source, str | Path) else info.raw.basename)
        check_safe(info, allow_unsafe_types=allow_unsafe_types, where=self.where)
        self._columns = [
            _Column(*column, where=self.where)
            for column in zip(info.column_names, info.column_encodings, info.column_sizes, strict=True)
        ]
        self._names = {column.name: i for i, column in enumerate(self._columns)}
        self._head = struct.Struct(f"<{sum(column.size is None for column in self._columns)}I")
        self._data: Bytes1D | None = np.frombuffer(self._map(source), np.uint8)
        self._view = self._data.data
        self._offsets = self._check_head(self._data)
        self._cells = self._find_cells(self._data)

    def __len__(self) -> int:
        return self.info.samples

    def __getitem__(self, row: int) -> dict[str, Any]:
        """The sample at `row`, decoded: column -> value."""
        view = self._sample(row)
        sizes = iter(self._sizes(view, row))
        at, sample = self._head.size, {}
        for column in self._columns:
            stop = at + (next(sizes) if column.size is None else column.size)
            sample[column.name] = self._decode(column, view[at:stop], row)
            at = stop
        return sample

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[row] for row in range(len(self)))

    def sample_bytes(self, row: int) -> bytes:
        """The sample at `row` as it is stored."""
        return bytes(self._sample(row))

    def batch(
        self,
        rows: Sequence[int] | Ints,
        columns: Iterable[str] | None = None,
        files: Collection[str] = (),
    ) -> dict[str, list[Any] | np.ndarray[Any, Any]]:
        """Several samples at once: column -> one array where values have a fixed size, else a list.

        Args:
            rows (Sequence[int] | np.ndarray): Which samples, in any order, repeats allowed.
            columns (Iterable[str] | None): Which columns. Default: all.
            files (Collection[str]): Columns whose values are given as they are stored, as views of the shard,
                if they are media files (`bytes`, `jpeg`, `png`); for who decodes them itself. Default: none.
        """
        data = self._open()
        which = np.asarray(rows, np.int64)
        if len(which) and not (int(which.min()) >= 0 and int(which.max()) < len(self)):
            raise IndexError(f"{self.where} has {len(self)} samples, got rows up to {int(which.max())}")
        wanted = set(self._names) if columns is None else set(columns)
        if not wanted <= set(self._names):
            raise UsageError(
                f"{self.where} has no column {sorted(wanted - set(self._names))[0]!r}",
                mend=f"it has {_list(self._names)}",
            )
        if self._cells is not None:
            return {
                column.name: self._fixed(column, cells[which], which)
                for column, cells in zip(self._columns, self._cells, strict=True)
                if column.name in wanted
            }
        out: dict[str, list[Any] | np.ndarray[Any, Any]] = {}
        for column, starts, stops in self._walk(data, which):
            if column.name not in wanted:
                continue
            if column.size is not None:
                out[column.name] = self._fixed(column, gather(data, starts, column.size), which)
                continue
            spans = zip(which.tolist(), starts.tolist(), stops.tolist(), strict=True)
            if column.name in files and column.coder().is_file:
                out[column.name] = [self._view[a:b] for _, a, b in spans]
                continue
            out[column.name] = [self._decode(column, self._view[a:b], row) for row, a, b in spans]
        return out

    @property
    def cells(self) -> list[np.ndarray[Any, Any]] | None:
        """Each column as items to be indexed by row, where all samples have the same size; else None.

        They hold the file for as long as they live.
        """
        return self._cells

    def close(self) -> None:
        """Let go of the file. Values that were read stay valid."""
        self._data = self._cells = None
        self._view = memoryview(b"")

    def __enter__(self) -> Shard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _map(self, source: str | Path | Buffer) -> Any:
        if not isinstance(source, str | Path):
            size = len(source) if isinstance(source, bytes | bytearray) else source.nbytes
            check_size(size, size=self.info.raw.bytes, where=self.where)
            return source
        with open(source, "rb") as file:
            size = file.seek(0, 2)
            check_size(size, size=self.info.raw.bytes, where=self.where)
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""

    def _check_head(self, data: Bytes1D) -> np.ndarray[Any, Any]:
        count = self.info.samples
        first = 8 + 4 * count
        if len(data) < first or int(data[:4].view("<u4")[0]) != count:
            raise self._corrupt(f"does not begin with the {count} samples that the index says")
        offsets = data[4:first].view("<u4")
        if (
            int(offsets[0]) < first
            or int(offsets[-1]) != len(data)
            or bool((offsets[1:] < offsets[:-1]).any())
        ):
            raise self._corrupt("has offsets that do not lie in order inside it")
        return offsets

    def _open(self) -> Bytes1D:
        if self._data is None:
            raise ValueError(f"{self.where} is closed")
        return self._data

    def _sample(self, row: int) -> memoryview:
        self._open()
        if not 0 <= row < self.info.samples:
            raise IndexError(f"{self.where} has {self.info.samples} samples, there is no row {row}")
        begin, end = struct.unpack_from("<2I", self._view, 4 + 4 * row)
        return self._view[begin:end]

    def _sizes(self, view: memoryview, row: int) -> tuple[int, ...]:
        """Bytes of each value without a fixed size; all values together must be the sample."""
        if len(view) >= self._head.size:
            sizes: tuple[int, ...] = self._head.unpack_from(view)
            if self._head.size + sum(sizes) + self._fixed_bytes() == len(view):
                return sizes
        raise self._bad_sample(row)

    def _fixed_bytes(self) -> int:
        return sum(column.size or 0 for column in self._columns)

    def _walk(self, data: Bytes1D, rows: Ints) -> Iterator[tuple[_Column, Ints, Ints]]:
        """Where the values of each column stand, for many rows at once."""
        begins = self._offsets[rows].astype(np.int64)
        ends = self._offsets[rows + 1].astype(np.int64)
        short = begins + self._head.size > ends
        if short.any():
            raise self._bad_sample(int(rows[int(short.argmax())]))
        heads = gather(data, begins, self._head.size).view("<u4").astype(np.int64)
        wrong = begins + self._head.size + heads.sum(axis=1) + self._fixed_bytes() != ends
        if wrong.any():
            raise self._bad_sample(int(rows[int(wrong.argmax())]))
        at, variable = begins + self._head.size, 0
        for column in self._columns:
            if column.size is None:
                stop = at + heads[:, variable]
                variable += 1
            else:
                stop = at + column.size
            yield column, at, stop
            at = stop

    def _find_cells(self, data: Bytes1D) -> list[np.ndarray[Any, Any]] | None:
        """What `cells` gives."""
        stride, count = self._fixed_bytes(), self.info.samples
        sizes = self._offsets[1:] - self._offsets[:-1]
        empty = any(column.size == 0 for column in self._columns)
        if self._head.size or not count or empty or bool((sizes != stride).any()):
            return None
        at = int(self._offsets[0])
        cells: list[np.ndarray[Any, Any]] = []
        for column in self._columns:
            item = np.dtype((np.void, column.size or 0))
            cells.append(np.ndarray((count,), item, buffer=data, offset=at, strides=(stride,)))
            at += column.size or 0
        return cells

    def _fixed(
        self, column: _Column, items: np.ndarray[Any, Any], rows: Ints
    ) -> list[Any] | np.ndarray[Any, Any]:
        """Values of one size: as an array where the encoding has one."""
        values = items.view(np.uint8).reshape(len(rows), column.size or 0)
        array = column.coder().decode_array(values)
        if array is not None:
            return array
        return [
            self._decode(column, value.data, row) for row, value in zip(rows.tolist(), values, strict=True)
        ]

    def _decode(self, column: _Column, view: memoryview, row: int) -> Any:
        try:
            return column.coder().decode(view)
        except (EncodingError, EOFError, LookupError, OSError) as error:
            raise FormatError(
                f"{self.where}, row {row}: cannot read {column.name!r} ({column.encoding}): {error}",
                mend="the bytes are as they were written: look at the row's source, or leave the row out",
            ) from error

    def _bad_sample(self, row: int) -> CorruptError:
        return self._corrupt(f"has a sample whose sizes do not add up: row {row}")

    def _corrupt(self, what: str) -> CorruptError:
        return CorruptError(f"{self.where} {what}", mend=_REFETCH)


class _Column:
    """One column of an open shard. An unknown encoding is an error only when a value is decoded."""

    def __init__(self, name: str, encoding: str, size: int | None, *, where: str) -> None:
        self.name = name
        self.encoding = encoding
        self.size = size
        self._coder: Encoding | None = None
        if encodings.known(encoding):
            self._coder = encodings.get(encoding)
            if self._coder.size != size:
                raise FormatError(
                    f"{where}: column {name!r} ({encoding}) has values of {size} bytes in the index, "
                    f"this encoding has {self._coder.size}",
                    mend="the index or the shard comes from another dataset",
                )

    def coder(self) -> Encoding:
        return self._coder if self._coder is not None else encodings.get(self.encoding)


def check_safe(info: ShardInfo, *, allow_unsafe_types: bool, where: str) -> None:
    """`UsageError` if reading a column of the shard may run code and that is not allowed."""
    if allow_unsafe_types:
        return
    for name, encoding in info.columns.items():
        if not encodings.is_safe(encoding):
            raise UsageError(
                f"{where}: reading the column {name!r} ({encoding}) can run code of whoever wrote it",
                mend="if you trust its writer, pass allow_unsafe_types=True",
            )


def unpack(stored: Buffer, info: ShardInfo, *, where: str | None = None, verify: bool = True) -> Buffer:
    """The raw bytes of a shard from the file that the dataset holds, both checked against the index.

    Args:
        stored (Buffer): The stored file.
        info (ShardInfo): What the index says of it.
        where (str | None): What to call it in messages. Default: its name in the index.
        verify (bool): Check the cheapest digest of each side; sizes always are. Default: ``True``.

    Raises:
        CorruptError: A size or digest differs, or it cannot be decompressed to what the index says.
    """
    name = where or info.stored.basename
    algorithms = None if verify else ()
    check_bytes(stored, size=info.stored.bytes, hashes=info.stored.hashes, where=name, algorithms=algorithms)
    if info.zip is None:
        return stored
    assert info.compression is not None
    raw = compression.decompress(stored, info.compression, limit=info.raw.bytes, where=name)
    check_bytes(
        raw,
        size=info.raw.bytes,
        hashes=info.raw.hashes,
        where=f"{name}, decompressed,",
        algorithms=algorithms,
    )
    return raw


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(map(str, names))) or "none"
