"""Rows of an Arrow batch as samples, without a Python object per value where the encoding allows.

    column ──► Fixed(uint8[n, size]) or Variable(bytes, starts, lengths) ──► samples in one buffer and sizes

Numbers, text, bytes and one-dimensional arrays are copied in C from Arrow's buffers to their places in the
samples; everything else goes through `to_pylist` and the encoding, value by value. Both ways give the same
bytes as encoding each row alone (invariant 3).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from shards.arrays import NDArray
from shards.mds import U32_MAX as _U32_MAX
from shards.mds import Bytes1D, Ints, Layout, RowError, bad_value, too_large, window
from shards.values import Encoding, EncodingError, Json, Pickle, Scalar, Str

_PIECE_BYTES = 16 << 20
# Values at least this long on average are copied one by one, shorter ones in groups of equal length.
_LONG = 1024
_GROUP_ROWS = 16


@dataclass(frozen=True, slots=True)
class Fixed:
    """Values of one size: uint8[n, size]."""

    values: np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of each value: `lengths[i]` bytes of `data` from `starts[i]` on."""

    data: Bytes1D
    starts: Ints
    lengths: Ints


@dataclass(frozen=True, slots=True)
class Variable:
    """Values of any size: the segments of a value follow each other."""

    segments: tuple[Segment, ...]

    @property
    def lengths(self) -> Ints:
        """Bytes of each value."""
        total = self.segments[0].lengths
        for segment in self.segments[1:]:
            total = total + segment.lengths
        return total


def encode_batch(layout: Layout, batch: pa.RecordBatch) -> Iterator[tuple[Bytes1D, Ints]]:
    """Yield the samples of `batch` in pieces of some MiB: their bytes, one after another, and their sizes.

    Raises:
        RowError: A column is missing or cannot hold a value; nothing of that piece was yielded.
    """
    rows = max(1, _PIECE_BYTES * batch.num_rows // max(batch.nbytes, 1))
    for start in range(0, batch.num_rows, rows):
        yield _encode_piece(layout, batch.slice(start, rows))


def _encode_piece(layout: Layout, batch: pa.RecordBatch) -> tuple[Bytes1D, Ints]:
    count = batch.num_rows
    columns = [
        _encode_column(_find(batch, name), coder, name)
        for name, coder in zip(layout.names, layout.coders, strict=True)
    ]
    if len(columns) == 1 and isinstance(columns[0], Fixed):
        values = columns[0].values
        return values.reshape(-1), np.full(count, values.shape[1], np.int64)

    lengths = [column.lengths for column in columns if isinstance(column, Variable)]
    heads = np.stack(lengths, axis=1) if lengths else np.empty((count, 0), np.int64)
    fixed = sum(column.values.shape[1] for column in columns if isinstance(column, Fixed))
    sizes = heads.sum(axis=1, dtype=np.int64) + (layout.head_bytes + fixed)
    if count and int(sizes.max()) > _U32_MAX:
        raise too_large(int(sizes.max()))
    out = np.empty(int(sizes.sum()), np.uint8)
    at = np.cumsum(sizes) - sizes
    _put_rows(out, at, heads.astype("<u4").view(np.uint8).reshape(count, layout.head_bytes))
    at = at + layout.head_bytes
    for column in columns:
        if isinstance(column, Fixed):
            _put_rows(out, at, column.values)
            at = at + column.values.shape[1]
            continue
        for segment in column.segments:
            _put_segment(out, at, segment)
            at = at + segment.lengths
    return out, sizes


def _find(batch: pa.RecordBatch, name: str) -> pa.Array:
    found = batch.schema.get_all_field_indices(name)
    if len(found) != 1:
        what = "no column" if not found else f"{len(found)} columns called"
        raise RowError(
            f"the batch has {what} {name!r}; it has {', '.join(batch.schema.names)}",
            mend="every row needs every column once",
        )
    return batch.column(found[0])


def _put_rows(out: Bytes1D, at: Ints, values: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """Copy row i of `values` to `out[at[i]:]`."""
    count, size = values.shape
    if count and size:
        flat = np.ascontiguousarray(values).reshape(-1)
        window(out, size)[at] = flat.view(np.dtype((np.void, size)))


def _put_segment(out: Bytes1D, at: Ints, segment: Segment) -> None:
    """Copy part i of a segment to `out[at[i]:]`."""
    lengths = segment.lengths
    if not len(lengths):
        return
    order = np.argsort(lengths, kind="stable")
    ordered = lengths[order]
    edges = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    if int(lengths.sum()) >= _LONG * len(lengths) or len(edges) * _GROUP_ROWS > len(lengths):
        target, source = out.data, segment.data.data
        spans = zip(at.tolist(), segment.starts.tolist(), lengths.tolist(), strict=True)
        for to, start, length in spans:
            target[to : to + length] = source[start : start + length]
        return
    for group in np.split(order, edges):
        size = int(lengths[group[0]])
        if size:
            window(out, size)[at[group]] = window(segment.data, size)[segment.starts[group]]


def _encode_column(array: pa.Array, coder: Encoding, name: str) -> Fixed | Variable:
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if array.null_count and not isinstance(coder, Json | Pickle):
        raise bad_value(name, coder, EncodingError(f"{array.null_count} of {len(array)} are null"), None)
    try:
        column = _encode_fast(array, coder)
    except (EncodingError, pa.ArrowInvalid) as error:
        raise bad_value(name, coder, error, None) from error
    return column if column is not None else _encode_each(array, coder, name)


def _encode_fast(array: pa.Array, coder: Encoding) -> Fixed | Variable | None:
    """A column by its buffers; None where there is no such way for this type and encoding."""
    kind = array.type
    if isinstance(coder, Scalar) and _is_number(kind):
        numbers = _cast(array.to_numpy(zero_copy_only=False), coder.dtype)
        return None if numbers is None else Fixed(numbers.view(np.uint8).reshape(len(array), -1))
    if isinstance(coder, NDArray) and _is_list(kind) and _is_number(kind.value_type):
        return _encode_lists(array, coder)
    if isinstance(coder, Str) and (_is_text(kind) or _is_binary(kind)):
        return Variable((_text_segment(array),))
    if coder.passes_bytes and _is_binary(kind) and coder.size is None:
        return Variable((_binary_segment(array),))
    return None


def _encode_each(array: pa.Array, coder: Encoding, name: str) -> Fixed | Variable:
    """A column value by value, as rows are encoded."""
    values, value = [], None
    try:
        for value in _objects(array, coder):
            values.append(coder.encode(value))
            if coder.size is not None and len(values[-1]) != coder.size:
                raise EncodingError(f"expected {coder.size} bytes, got {len(values[-1])}")
    except (EncodingError, AttributeError, TypeError, ValueError) as error:
        raise bad_value(name, coder, error, value) from error
    data = np.frombuffer(b"".join(values), np.uint8)
    if coder.size is not None:
        return Fixed(data.reshape(len(values), coder.size))
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    return Variable((Segment(data, np.cumsum(lengths) - lengths, lengths),))


def _objects(array: pa.Array, coder: Encoding) -> list[Any]:
    """Python values; nested lists as arrays of their leaves' type, where the encoding does not name one."""
    values: list[Any] = array.to_pylist()
    leaf = array.type
    if isinstance(coder, NDArray) and coder.dtype is None and _is_list(leaf):
        while _is_list(leaf):
            leaf = leaf.value_type
        if _is_number(leaf):
            return [np.array(value, leaf.to_pandas_dtype()) for value in values]
    return values


def _encode_lists(array: pa.Array, coder: NDArray) -> Fixed | Variable | None:
    """Lists of numbers as one-dimensional arrays."""
    count = len(array)
    values = array.flatten()
    if values.null_count:
        raise EncodingError(f"{values.null_count} of its numbers are null")
    flat = values.to_numpy(zero_copy_only=False)
    if coder.dtype is None and flat.dtype.name not in NDArray.DTYPES:
        return None
    numbers = _cast(flat, coder.dtype or flat.dtype.newbyteorder("<"))
    if numbers is None:
        return None
    if pa.types.is_fixed_size_list(array.type):
        lengths = np.full(count, array.type.list_size, np.int64)
    else:
        lengths = array.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
    data = numbers.view(np.uint8)
    if coder.size is not None:
        wrong = lengths * numbers.itemsize != coder.size
        if wrong.any():
            first = int(lengths[int(wrong.argmax())])
            raise EncodingError(f"expected the shape {coder.shape}, got ({first},)")
        return Fixed(data.reshape(count, coder.size))
    sizes = lengths * numbers.itemsize
    body = Segment(data, np.cumsum(sizes) - sizes, sizes)
    code = None if coder.dtype is not None else NDArray.DTYPES[flat.dtype.name]
    return Variable((_array_heads(lengths, code), body))


def _array_heads(lengths: Ints, code: int | None) -> Segment:
    """What stands before the values of one-dimensional arrays of these lengths (see `NDArray`)."""
    before = 1 if code is None else 2
    log2 = (lengths >= 1 << 8).astype(np.int64) + (lengths >= 1 << 16) + (lengths >= 1 << 32)
    heads = np.empty((len(lengths), before + 8), np.uint8)
    if code is not None:
        heads[:, 0] = code
    heads[:, before - 1] = 1 << 2 | log2
    heads[:, before:] = lengths.astype("<u8").view(np.uint8).reshape(len(lengths), 8)
    starts = np.arange(len(lengths), dtype=np.int64) * (before + 8)
    return Segment(heads.reshape(-1), starts, before + (1 << log2))


def _cast(numbers: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any] | None:
    """`numbers` as `dtype`, as each alone would be encoded; None where that has to be tried one by one."""
    numbers = np.ascontiguousarray(numbers)
    if numbers.dtype == dtype:
        return numbers
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            return numbers.astype(np.float64).astype(dtype)
    if numbers.dtype.kind not in "iub":
        return None
    if len(numbers):
        limits = np.iinfo(dtype)
        low, high = int(numbers.min()), int(numbers.max())
        if low < limits.min or high > limits.max:
            bad = low if low < limits.min else high
            raise EncodingError(f"{bad} is outside {dtype.name}: {limits.min} to {limits.max}")
    return numbers.astype(dtype)


def _text_segment(array: pa.Array) -> Segment:
    if pa.types.is_fixed_size_binary(array.type):
        array = array.cast(pa.binary())
    if _is_binary(array.type) or not _has_offsets(array.type):
        array = array.cast(pa.large_string())
    array.validate(full=True)
    return _offsets_segment(array)


def _binary_segment(array: pa.Array) -> Segment:
    if not _has_offsets(array.type):
        array = array.cast(pa.large_binary())
    return _offsets_segment(array)


def _offsets_segment(array: pa.Array) -> Segment:
    """The bytes of a (large) string or binary array, where they stand."""
    _, offsets_buffer, data_buffer = array.buffers()
    wide = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    if len(array) == 0 or offsets_buffer is None:
        empty = np.zeros(len(array), np.int64)
        return Segment(np.empty(0, np.uint8), empty, empty)
    dtype = np.dtype("<i8" if wide else "<i4")
    offsets = np.frombuffer(offsets_buffer, dtype, len(array) + 1, array.offset * dtype.itemsize).astype(
        np.int64
    )
    data = np.empty(0, np.uint8) if data_buffer is None else np.frombuffer(data_buffer, np.uint8)
    return Segment(data, offsets[:-1], offsets[1:] - offsets[:-1])


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_binary(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
        or pa.types.is_binary_view(kind)
    )


def _has_offsets(kind: pa.DataType) -> bool:
    return not (
        pa.types.is_fixed_size_binary(kind) or pa.types.is_string_view(kind) or pa.types.is_binary_view(kind)
    )
