"""Columns and encodings found by looking: at the types a format declares, or at the values of rows.

    numbers          their own type; integers beyond 64 bits as `str_int`, decimals as `str_decimal`
    text, dates      `str`, dates as ISO 8601
    true and false   `uint8`
    bytes            `jpeg` or `png` where the values are images (any image goes into `jpeg`), else `bytes`
    arrays           lists of numbers that a format declares: `ndarray:<type>`, with a shape that is fixed
    everything else  `json`: mixed types, nested values, lists, and every plain column that has nulls

MDS has no null. A plain column with nulls becomes `json`, which has; in bytes, images and arrays a null makes
a row bad.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np

from shards import media
from shards.schema import Column

if TYPE_CHECKING:
    import pyarrow as pa

_INT64 = range(-(1 << 63), 1 << 63)


class Inference:
    """Columns of rows, seen one after another.

    Args:
        declared (Mapping[str, str]): Column -> encoding, where that is known and only media is looked for.
        textual (bool): All values are text; find the numbers in it. Default: ``False``.
    """

    def __init__(self, declared: Mapping[str, str] | None = None, *, textual: bool = False) -> None:
        self._textual = textual
        self._declared = dict(declared or {})
        self._seen: dict[str, _Values] = {name: _Values() for name in self._declared}
        self._rows = 0

    @property
    def rows(self) -> int:
        """Rows seen."""
        return self._rows

    def see(self, row: Mapping[str, Any]) -> None:
        """Look at one row."""
        for name, value in row.items():
            values = self._seen.get(name)
            if values is None:
                values = self._seen[name] = _Values()
                values.missing = self._rows > 0
            values.see(_number(value) if self._textual else value)
        self._rows += 1
        for values in self._seen.values():
            if values.count < self._rows:
                values.missing = True
                values.count = self._rows

    def columns(self) -> list[Column]:
        """What was found, in the order in which columns came."""
        return [
            Column(name=name, source=name, **self._found(name, values)) for name, values in self._seen.items()
        ]

    def _found(self, name: str, values: _Values) -> dict[str, Any]:
        if not self._textual:
            return values.column(self._declared.get(name))
        kinds = values.kinds
        if not kinds or not kinds <= {"int", "bigint", "float"}:
            return {"encoding": "str"}
        return {**values.column(None), "text": "float" if "float" in kinds else "int"}


def _number(text: str) -> Any:
    """A field of delimited text as a number where it is one, as null where it is empty."""
    if not text:
        return None
    if _INT.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


# A leading zero or plus is part of a code or a telephone number.
_INT = re.compile(r"-?(?:0|[1-9][0-9]{0,400})")
_FLOAT = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,3})?")


class _Values:
    """The values of one column, by kind."""

    def __init__(self) -> None:
        self.kinds: set[str] = set()
        self.null = self.missing = False
        self.count = 0
        self.exact = True  # whether every integer is also a float
        self.images: set[str] = set()
        self.other_bytes = ""

    def see(self, value: Any) -> None:
        self.count += 1
        if value is None:
            self.null = True
            return
        kind = _kind(value)
        self.kinds.add(kind)
        if kind == "int" and abs(value) > 1 << 53:
            self.exact = False
        if kind == "bytes":
            found = media.sniff(value)
            if found.startswith("image/"):
                self.images.add(found)
            else:
                self.other_bytes = found.partition("/")[0] or "bytes"

    def column(self, declared: str | None) -> dict[str, Any]:
        """Encoding, media and nullable."""
        nullable = self.null or self.missing
        if declared is not None:
            if declared == "bytes" and self.images and not self.other_bytes:
                return {"encoding": self._image(), "media": "image"}
            if declared == "bytes" and self.other_bytes in media.KINDS and not self.images:
                return {"encoding": "bytes", "media": self.other_bytes}
            return {"encoding": declared, "nullable": declared == "json"}
        encoding = self._encoding()
        if (
            nullable
            and encoding not in ("bytes", *self._media_encodings())
            and not encoding.startswith("ndarray")
        ):
            encoding = "json"
        kind = ""
        if self.kinds == {"bytes"}:
            kind = "image" if self.images and not self.other_bytes else self.other_bytes
        return {
            "encoding": encoding,
            "media": kind if kind in media.KINDS else "",
            "nullable": encoding == "json",
        }

    def _media_encodings(self) -> tuple[str, ...]:
        return ("jpeg", "png") if self.images else ()

    def _image(self) -> str:
        return "png" if self.images == {"image/png"} else "jpeg"

    def _encoding(self) -> str:
        kinds = self.kinds
        if kinds == {"bytes"}:
            return self._image() if self.images and not self.other_bytes else "bytes"
        if kinds == {"int", "bigint"}:
            return "str_int"
        if kinds == {"int", "float"} and self.exact:
            return "float64"
        if len(kinds) != 1:
            return "json"
        (kind,) = kinds
        if kind.startswith("ndarray"):
            return kind
        return _ENCODING.get(kind, "json")


_ENCODING = {
    "bool": "uint8",
    "int": "int",
    "bigint": "str_int",
    "float": "float64",
    "str": "str",
    "decimal": "str_decimal",
    "pil": "png",
}


def _kind(value: Any) -> str:
    """What a value is, for the purpose of choosing an encoding."""
    if isinstance(value, bool | np.bool_):
        return "bool"
    if isinstance(value, int | np.integer):
        return "int" if int(value) in _INT64 else "bigint"
    if isinstance(value, float | np.floating):
        return "float"
    if isinstance(value, str):
        return "str"
    if isinstance(value, bytes | bytearray | memoryview):
        return "bytes"
    if isinstance(value, np.ndarray):
        return f"ndarray:{value.dtype.name}"
    if isinstance(value, Decimal):
        return "decimal"
    if type(value).__module__.startswith("PIL."):
        return "pil"
    return "json"


def arrow_columns(schema: pa.Schema, *, nullable: Iterable[str]) -> list[Column]:
    """Columns by what an Arrow schema declares; `nullable` are the columns that have a null somewhere."""
    with_nulls = set(nullable)
    columns = []
    for field in schema:
        encoding = arrow_encoding(field.type)
        has_null = field.name in with_nulls
        if has_null and encoding != "bytes" and not encoding.startswith("ndarray"):
            encoding = "json"
        columns.append(
            Column(name=field.name, source=field.name, encoding=encoding, nullable=encoding == "json")
        )
    return columns


def arrow_encoding(kind: pa.DataType) -> str:
    """The encoding of an Arrow type without nulls."""
    import pyarrow as pa

    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return arrow_encoding(kind.storage_type)
    if types.is_dictionary(kind):
        return arrow_encoding(kind.value_type)
    if types.is_boolean(kind):
        return "uint8"
    if types.is_integer(kind) or types.is_floating(kind):
        return {"halffloat": "float16", "float": "float32", "double": "float64"}.get(str(kind), str(kind))
    if types.is_decimal(kind):
        return "str_decimal"
    if (
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_string_view(kind)
        or types.is_temporal(kind)
    ):
        return "str"
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return "bytes"
    if types.is_binary_view(kind) or is_file_struct(kind):
        return "bytes"
    return _array_encoding(kind) or "json"


def is_file_struct(kind: pa.DataType) -> bool:
    """Whether a type is how Hugging Face stores a file: a struct of its bytes and its path."""
    import pyarrow as pa

    return bool(pa.types.is_struct(kind)) and {field.name for field in kind} == {"bytes", "path"}


def _array_encoding(kind: pa.DataType) -> str | None:
    """`ndarray:…` of a list of numbers; with the shape where all lists have one length."""
    import pyarrow as pa

    types = pa.types
    shape: list[int] = []
    fixed = True
    depth = 0
    while types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        depth += 1
        if types.is_fixed_size_list(kind):
            shape.append(kind.list_size)
        else:
            fixed = False
        kind = kind.value_type
    if not depth or not (types.is_integer(kind) or types.is_floating(kind)):
        return None
    name = arrow_encoding(kind)
    if fixed and all(shape):
        return f"ndarray:{name}:{','.join(map(str, shape))}"
    return f"ndarray:{name}" if depth == 1 else None
