"""What an encoding is, and the encodings of single values: bytes, text, numbers, JSON, pickle.

`shards.encodings` lists them by name; arrays and images have files of their own. An encoding refuses what it
cannot hold without loss (300 in a uint8, 1.5 in an int64) in place of wrapping or truncating it.
"""

from __future__ import annotations

import json
import math
import operator
import pickle
import struct
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np

Buffer = bytes | bytearray | memoryview


class EncodingError(ValueError):
    """A value that its column's encoding cannot hold, or bytes that it cannot read."""


class Encoding:
    """How values of one column become bytes and come back. Subclass it and `register` the class.

    Attributes:
        size: Bytes of every encoded value where they are all the same, else None.
        safe: False where decoding bytes of an attacker could run code.
        passes_bytes: True where a value that is bytes is stored as it is, whatever it holds.
        is_file: True where what is stored may be a media file as it is.
    """

    size: int | None = None
    safe: bool = True
    passes_bytes: bool = False
    is_file: bool = False

    @classmethod
    def parse(cls, arguments: str) -> Encoding:
        """Make one from what follows the colon in its name; most encodings take nothing."""
        raise EncodingError(f"it takes no arguments, got {arguments!r}")

    def encode(self, value: Any) -> bytes:
        """Bytes of `value`; `EncodingError` if it cannot be held without loss."""
        raise NotImplementedError

    def decode(self, data: Buffer) -> Any:
        """The value of these bytes; `EncodingError` if they are none."""
        raise NotImplementedError

    def decode_array(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
        """All values at once from uint8[n, size], where `size` is fixed; None where there is no such way."""
        return None


class Bytes(Encoding):
    """Bytes as they are."""

    passes_bytes = True
    is_file = True

    def encode(self, value: Any) -> bytes:
        return _bytes(value)

    def decode(self, data: Buffer) -> bytes:
        return bytes(data)


class Str(Encoding):
    """Text as UTF-8."""

    def encode(self, value: Any) -> bytes:
        if isinstance(value, str):
            try:
                return value.encode()
            except UnicodeEncodeError as error:
                raise EncodingError(f"it is no valid Unicode: {error}") from error
        data = _bytes(value, "str")
        self.decode(data)
        return data

    def decode(self, data: Buffer) -> str:
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError as error:
            raise EncodingError(f"it is no valid UTF-8: {error}") from error


class Scalar(Encoding):
    """One number of a NumPy type, little-endian."""

    def __init__(self, dtype: str) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.size = self.dtype.itemsize
        self._signed = self.dtype.kind == "i"
        self._low, self._high = (0, 0) if self.dtype.kind == "f" else _limits(self.dtype)
        self._pack = {"float32": struct.Struct("<f").pack, "float64": struct.Struct("<d").pack}.get(dtype)

    def encode(self, value: Any) -> bytes:
        if isinstance(value, bytes | bytearray):
            return bytes(_sized(value, self.size))
        if self.dtype.kind == "f":
            return self._encode_float(value)
        number = _integer(value)
        if not self._low <= number <= self._high:
            raise EncodingError(f"{number} is outside {self.dtype.name}: {self._low} to {self._high}")
        return number.to_bytes(self.dtype.itemsize, "little", signed=self._signed)

    def decode(self, data: Buffer) -> Any:
        return np.frombuffer(_sized(data, self.size), self.dtype)[0]

    def decode_array(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
        values: np.ndarray[Any, Any] = rows.view(self.dtype)
        return values.reshape(len(rows))

    def _encode_float(self, value: Any) -> bytes:
        if self._pack is not None and type(value) is float:
            try:
                return self._pack(value)
            except OverflowError:
                pass  # too large for a float32: NumPy makes it infinite
        if value is None or isinstance(value, str) or np.ndim(value):
            raise EncodingError(f"expected a number, got {kind(value)}")
        try:
            with np.errstate(over="ignore"):
                return bytes(np.float64(value).astype(self.dtype).tobytes())
        except (TypeError, ValueError, OverflowError) as error:
            raise EncodingError(f"expected a number, got {kind(value)}") from error


class Int(Scalar):
    """An int64 that comes back as a Python integer."""

    def __init__(self) -> None:
        super().__init__("int64")

    def decode(self, data: Buffer) -> int:
        return int.from_bytes(_sized(data, self.size), "little", signed=True)


class StrInt(Encoding):
    """An integer of any size, as decimal digits."""

    passes_bytes = True

    def encode(self, value: Any) -> bytes:
        if isinstance(value, bytes):
            return value
        return _digits(_integer(value)).encode()

    def decode(self, data: Buffer) -> int:
        return int(_read_text(data, int))


class StrFloat(Encoding):
    """A float as the shortest digits that give it back."""

    passes_bytes = True

    def encode(self, value: Any) -> bytes:
        if isinstance(value, bytes):
            return value
        if isinstance(value, bool | str) or not hasattr(value, "__float__"):
            raise EncodingError(f"expected a float, got {kind(value)}")
        return str(float(value)).encode()

    def decode(self, data: Buffer) -> float:
        return float(_read_text(data, float))


class StrDecimal(Encoding):
    """A decimal number, exactly."""

    passes_bytes = True

    def encode(self, value: Any) -> bytes:
        if isinstance(value, bytes):
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            value = Decimal(value)
        if not isinstance(value, Decimal):
            raise EncodingError(f"expected a Decimal, got {kind(value)}")
        return str(value).encode()

    def decode(self, data: Buffer) -> Decimal:
        return Decimal(_read_text(data, Decimal))


class Json(Encoding):
    """Anything that JSON can say."""

    def encode(self, value: Any) -> bytes:
        if isinstance(value, bytes):
            self.decode(value)
            return value
        if isinstance(value, np.ndarray | np.generic):
            value = value.tolist()
        try:
            return json.dumps(value).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise EncodingError(f"JSON cannot hold it: {error}") from error

    def decode(self, data: Buffer) -> Any:
        try:
            return json.loads(str(data, "utf-8"))
        except (ValueError, RecursionError) as error:
            raise EncodingError(f"it is no JSON: {error}") from error


class Pickle(Encoding):
    """Any Python object. Reading one runs whatever its writer wanted to run."""

    safe = False

    def encode(self, value: Any) -> bytes:
        try:
            return pickle.dumps(value)
        except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
            raise EncodingError(f"it cannot be pickled: {error}") from error

    def decode(self, data: Buffer) -> Any:
        return pickle.loads(data)


def _bytes(value: Any, expected: str = "bytes") -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    raise EncodingError(f"expected {expected}, got {kind(value)}")


def _sized(data: Buffer, size: int | None) -> Buffer:
    if len(data) != size:
        raise EncodingError(f"expected {size} bytes, got {len(data)}")
    return data


def _integer(value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        pass
    if isinstance(value, float | np.floating) and math.isfinite(value) and value == int(value):
        return int(value)
    raise EncodingError(f"expected a whole number, got {kind(value)}")


def _digits(number: int) -> str:
    try:
        return str(number)
    except ValueError as error:
        raise EncodingError("an integer of more than 4,300 digits cannot be read back") from error


def _read_text(data: Buffer, make: Callable[[str], Any]) -> Any:
    try:
        return make(str(data, "ascii"))
    except (ValueError, InvalidOperation) as error:
        raise EncodingError(f"it is no number: {bytes(data[:40])!r}") from error


def _limits(dtype: np.dtype[Any]) -> tuple[int, int]:
    info = np.iinfo(dtype)
    return int(info.min), int(info.max)


def kind(value: Any) -> str:
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool | int | float | complex | str):
        return f"{type(value).__name__} {value!r:.40}"
    return f"a value of type {type(value).__name__}"
