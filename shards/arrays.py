"""The `ndarray` encoding: NumPy arrays; dtype and shape are fixed by the column or stored with each value."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from shards.values import Buffer, Encoding, EncodingError, kind


class NDArray(Encoding):
    """A NumPy array. What the column does not fix is stored with each value:

        [dtype: u8] [ndim << 2 | log2(bytes of a dimension): u8] [dimensions] values, C order, little-endian

    Args:
        dtype (str | None): One of `DTYPES` where it is the same for all values. Default: ``None``.
        shape (tuple[int, ...] | None): The shape where it is the same for all values; needs `dtype`.
            Default: ``None``.
    """

    DTYPES: ClassVar[dict[str, int]] = {
        "uint8": 8,
        "int8": 9,
        "uint16": 16,
        "int16": 17,
        "float16": 18,
        "uint32": 32,
        "int32": 33,
        "float32": 34,
        "uint64": 64,
        "int64": 65,
        "float64": 66,
    }
    _NAMES: ClassVar[dict[int, str]] = {code: name for name, code in DTYPES.items()}

    def __init__(self, dtype: str | None = None, shape: tuple[int, ...] | None = None) -> None:
        if dtype is not None and dtype not in self.DTYPES:
            raise EncodingError(f"no array type {dtype!r}; there are {', '.join(self.DTYPES)}")
        if shape is not None and (dtype is None or not shape or min(shape) < 1):
            raise EncodingError(f"a fixed shape needs a dtype and dimensions of at least 1, got {shape}")
        self.dtype = None if dtype is None else np.dtype(dtype).newbyteorder("<")
        self.shape = shape
        if self.dtype is not None and shape is not None:
            self.size = math.prod(shape) * self.dtype.itemsize

    @classmethod
    def parse(cls, arguments: str) -> NDArray:
        dtype, colon, dims = arguments.partition(":")
        try:
            shape = tuple(int(dim) for dim in dims.split(",")) if colon else None
        except ValueError as error:
            raise EncodingError(f"the shape {dims!r} is no list of numbers") from error
        return cls(dtype or None, shape)

    def encode(self, value: Any) -> bytes:
        if isinstance(value, bytes):
            self.decode(value)
            return value
        array = self._array(value)
        if self.shape is not None:
            if array.shape != self.shape:
                raise EncodingError(f"expected the shape {self.shape}, got {array.shape}")
            return array.tobytes()
        head = b"" if self.dtype is not None else bytes([self.DTYPES[array.dtype.name]])
        return head + shape_bytes(array.shape) + array.tobytes()

    def decode(self, data: Buffer) -> np.ndarray[Any, Any]:
        at, dtype, shape = 0, self.dtype, self.shape
        try:
            if dtype is None:
                dtype = np.dtype(self._NAMES[data[0]]).newbyteorder("<")
                at = 1
            if shape is None:
                width = 1 << (data[at] & 3)
                stop = at + 1 + (data[at] >> 2) * width
                dims = data[at + 1 : stop]
                if len(dims) != stop - at - 1:
                    raise IndexError
                shape = tuple(int(dim) for dim in np.frombuffer(dims, f"<u{width}"))
                at = stop
        except (IndexError, KeyError) as error:
            raise EncodingError("it is no array: its head is damaged") from error
        if len(data) - at != math.prod(shape) * dtype.itemsize:
            raise EncodingError(
                f"it is no array of {dtype.name}{list(shape)}: {len(data) - at} bytes of values"
            )
        # A copy, so that the array is writable and outlives the shard that it came from.
        return np.frombuffer(data, dtype, offset=at).reshape(shape).copy()

    def decode_array(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
        if self.dtype is None or self.shape is None:
            return None
        values: np.ndarray[Any, Any] = rows.view(self.dtype)
        return values.reshape(len(rows), *self.shape)

    def _array(self, value: Any) -> np.ndarray[Any, Any]:
        """`value` as a contiguous little-endian array of the column's type."""
        if isinstance(value, list | tuple):
            if self.dtype is None:
                raise EncodingError(
                    "a list has no array type: name one (ndarray:int32) or give a NumPy array"
                )
            try:
                with np.errstate(over="ignore"):
                    array = np.array(value, self.dtype)
            except (TypeError, ValueError, OverflowError) as error:
                raise EncodingError(f"the list does not fit {self.dtype.name}: {error}") from error
            if self.shape is not None and array.shape == (math.prod(self.shape),):
                array = array.reshape(self.shape)
            if array.size and np.asarray(value).dtype.kind not in (
                "iubf" if self.dtype.kind == "f" else "iub"
            ):
                raise EncodingError(f"the list does not hold only numbers that fit {self.dtype.name}")
            return array
        if not isinstance(value, np.ndarray):
            raise EncodingError(f"expected a NumPy array, got {kind(value)}")
        if value.dtype.name not in self.DTYPES:
            raise EncodingError(f"no array type {value.dtype.name}; there are {', '.join(self.DTYPES)}")
        if self.dtype is not None and value.dtype.name != self.dtype.name:
            raise EncodingError(f"expected an array of {self.dtype.name}, got {value.dtype.name}")
        return value.astype(value.dtype.newbyteorder("<"), copy=False)


def shape_bytes(shape: tuple[int, ...]) -> bytes:
    """A shape as it is stored: the dimensions in the narrowest type that holds the largest of them."""
    if len(shape) > 63:
        raise EncodingError(f"an array has at most 63 dimensions, got {len(shape)}")
    largest = max(shape, default=0)
    log2 = next(log2 for log2 in range(4) if largest < 1 << (8 << log2))
    return bytes([len(shape) << 2 | log2]) + np.array(shape, f"<u{1 << log2}").tobytes()
