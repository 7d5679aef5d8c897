"""From what a source reads to rows of the dataset: project, transform, check media, name, split.

    Row / Table ──► transform ──► project to the schema ──► media ──► rows that a shard can take, or Bad

A table that needs nothing done row by row stays a table and goes to the shard column by column; its bad rows
are found by masks. Both ways give the same bytes.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from shards import media
from shards.errors import UsageError
from shards.infer import is_file_struct
from shards.options import ConvertOptions
from shards.plan import load_transform
from shards.schema import MEDIA_ENCODINGS, Column, Schema
from shards.sources.base import Bad, Item, Row, Table, reason

if TYPE_CHECKING:
    import pyarrow as pa

    from shards.resolve import Resolver

_KEPT = 4096
_INTEGERS = frozenset(
    {"int", "str_int", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))}
)
_FLOATS = frozenset({"float16", "float32", "float64", "str_float"})


class Rows:
    """What is done to each row between source and shard.

    Args:
        schema (Schema): Columns of the dataset.
        options (ConvertOptions): What the user asked for.
        strict (bool): A row with a column that the schema does not know is bad. Default: ``True``.
        known (frozenset[str]): Columns of the source, also those that are left out on purpose.
        checked (bool): The source has checked its media. Default: ``False``.
        root (str): The corpus, for columns that name files.
        access (Mapping[str, Any]): What fsspec needs to reach it.
    """

    def __init__(
        self,
        schema: Schema,
        options: ConvertOptions,
        *,
        strict: bool = True,
        known: frozenset[str] = frozenset(),
        checked: bool = False,
        root: str = "",
        access: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._resolver = _resolver(options, root, access) if options.media else None
        self._columns = [column for column in schema.columns if not column.made]
        self._sources = frozenset(column.source for column in self._columns)
        self._known = known
        self._strict = strict
        self._options = options
        self._check = (
            media.NONE if checked and options.transform is None else options.media_check or media.KIND
        )
        self._transform = load_transform(options.transform)
        self._edit = media_editor(options)
        self._info = [column for column in self._columns if column.media] if options.media_info else []

    @property
    def whole_tables(self) -> bool:
        """Whether a table may stay one."""
        options = self._options
        simple = self._transform is None and self._edit is None and self._resolver is None
        by_row = options.media_info or options.split or options.tokenizer or options.shuffle_seed is not None
        return simple and not by_row

    def rows(self, items: Iterable[Item]) -> Iterator[Row | Bad]:
        """The rows of items, with the dataset's columns, or why one is bad."""
        for row in self.raw(items):
            yield row if isinstance(row, Bad) else self._row(row)

    def raw(self, items: Iterable[Item]) -> Iterator[Row | Bad]:
        """The rows of items as the transform leaves them: what columns are inferred from."""
        rows = (row for item in items for row in _as_rows(item))
        for row in rows if self._resolver is None else self._resolver.resolve(rows):
            if isinstance(row, Bad):
                yield row
            else:
                yield from self._transformed(row)

    def _transformed(self, row: Row) -> Iterator[Row | Bad]:
        if self._transform is None:
            yield row
            return
        try:
            # Standard output is for results; what the user's code prints goes where logs go.
            with contextlib.redirect_stdout(sys.stderr):
                made = self._transform(dict(row.values))
                several = [] if made is None else [made] if isinstance(made, Mapping) else list(made)
        except (Exception, SystemExit) as error:  # noqa: BLE001  whatever the code raises makes the row bad
            yield _bad(f"the transform raised {type(error).__name__}: {error}", row)
            return
        for number, values in enumerate(several):
            if not isinstance(values, Mapping):
                yield _bad(f"the transform gave {type(values).__name__}, not a row", row)
                return
            strange = next((name for name in values if not isinstance(name, str)), "")
            if strange != "":
                yield _bad(f"the transform gave a column called {strange!r}, which is no text", row)
                return
            key = row.key if len(several) == 1 or row.key is None else f"{row.key}#{number}"
            yield row._replace(values=dict(values), key=key)

    def _row(self, row: Row) -> Row | Bad:
        values: dict[str, Any] = {}
        for column in self._columns:
            value = row.values.get(column.source)
            if column.text and value == "":
                value = None
            if value is None and not column.nullable:
                what = "is null" if column.source in row.values else "is missing"
                return _bad(f"the column {column.source!r} {what}", row)
            try:
                values[column.name] = _value(value, column)
            except ValueError as error:
                return _bad(f"the column {column.source!r}: {reason(error)}", row)
        if self._strict and len(row.values) > len(self._sources):
            for name in row.values:
                if name not in self._sources and name not in self._known:
                    return _bad(
                        f"the column {name!r} was not in the rows that the columns were found from", row
                    )
        return self._media(row._replace(values=values))

    def _media(self, row: Row) -> Row | Bad:
        values = row.values
        try:
            for column in self._columns:
                if column.media and isinstance(values[column.name], bytes):
                    media.check(values[column.name], column.media, level=self._check)
                    if self._edit is not None:
                        values[column.name] = self._edit(values[column.name], column.media)
            for column in self._info:
                facts = media.INFO[column.media](values[column.name])
                values.update({f"{column.name}.{name}": fact for name, fact in facts.items()})
        except media.MediaError as error:
            return _bad(f"the column {column.source!r}: {reason(error)}", row)
        return row

    def table(self, table: Table) -> tuple[pa.RecordBatch, list[Bad]]:
        """The good rows of a table, with the dataset's columns, and the bad ones."""
        import pyarrow as pa

        batch = table.batch
        arrays, bad = [], np.zeros(batch.num_rows, bool)
        reasons: dict[int, str] = {}

        def refuse(mask: np.ndarray[Any, np.dtype[np.bool_]], why: Callable[[int], str]) -> None:
            for number in np.flatnonzero(mask & ~bad):
                reasons[int(number)] = why(int(number))
            np.logical_or(bad, mask, out=bad)

        for column in self._columns:
            array = _column(batch, column.source)
            if array is None:
                if not column.nullable:
                    refuse(~bad, lambda _, name=column.source: f"the column {name!r} is missing")  # type: ignore[misc]
                array = pa.nulls(batch.num_rows)
            array = arrow_value(array, column.encoding)
            if not column.nullable and array.null_count:
                nulls = array.is_null().to_numpy(zero_copy_only=False)
                refuse(nulls, lambda _, name=column.source: f"the column {name!r} is null")  # type: ignore[misc]
            if column.media and self._check != "none":
                problems = _check_media(array, column, self._check)
                mask = np.zeros(batch.num_rows, bool)
                mask[list(problems)] = True
                refuse(mask, lambda number, found=problems: found[number])  # type: ignore[misc]
            arrays.append(array)
        names = [column.name for column in self._columns]
        good = pa.RecordBatch.from_arrays(arrays, names=names)
        if reasons:
            good = good.filter(pa.array(~bad))
        return good, [Bad(reasons[at], table.file, table.first + at) for at in sorted(reasons)]


def _resolver(options: ConvertOptions, root: str, access: Mapping[str, Any]) -> Resolver:
    from shards.resolve import Resolver  # with all that HTTP needs

    return Resolver(options.media, root, access, _bad)


def _bad(why: str, row: Row) -> Bad:
    return Bad(why[:300], row.file, row.at, _describe(row.values))


def _describe(values: Mapping[str, Any]) -> bytes:
    """A row for the quarantine, as JSON, as far as it is small."""
    text = json.dumps({str(name): _short(value) for name, value in values.items()})
    return text.encode(errors="replace")[:_KEPT]


def _short(value: Any) -> Any:
    if isinstance(value, bytes):
        return f"<{len(value):,} bytes>"
    if isinstance(value, str):
        return value[:256]
    try:
        return json_safe(value)
    except ValueError:
        return f"<{type(value).__name__}>"


def _as_rows(item: Item) -> Iterator[Row | Bad]:
    if not isinstance(item, Table):
        yield item
        return
    columns = {
        name: _objects(item.batch.column(number)) for number, name in enumerate(item.batch.schema.names)
    }
    for at in range(item.batch.num_rows):
        yield Row({name: values[at] for name, values in columns.items()}, item.file, item.first + at)


def _objects(array: pa.Array) -> list[Any]:
    """Python values of a column; what Python cannot hold as text, lists of numbers as arrays."""
    import pyarrow as pa

    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind = array.type
    if pa.types.is_temporal(kind) or is_file_struct(kind):
        array = arrow_value(array, "str" if pa.types.is_temporal(kind) else "bytes")
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        leaf = kind.value_type
        if pa.types.is_integer(leaf) or pa.types.is_floating(leaf):
            return [
                None
                if value.as_py() is None
                else np.array(value.values.to_numpy(zero_copy_only=False))
                if value.values.null_count == 0
                else value.as_py()
                for value in array
            ]
    values: list[Any] = array.to_pylist()
    return values


def _column(batch: pa.RecordBatch, name: str) -> pa.Array | None:
    found = batch.schema.get_all_field_indices(name)
    if len(found) > 1:
        raise UsageError(
            f"the source has {len(found)} columns called {name!r}", mend="rename them at the source"
        )
    return batch.column(found[0]) if found else None


def arrow_value(array: pa.Array, encoding: str) -> pa.Array:
    """A column as its encoding takes it: dates as text, files out of their structs, nested values as JSON."""
    import pyarrow as pa

    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    kind = array.type
    if pa.types.is_dictionary(kind):
        array = array.dictionary_decode()
        kind = array.type
    if is_file_struct(kind):
        return (
            array.field("bytes")
            if not array.null_count
            else pa.array([_file_bytes(v) for v in array], pa.binary())
        )
    if encoding == "str" and pa.types.is_temporal(kind):
        return _iso(array)
    if encoding == "str" and (pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        return array.cast(pa.string())
    if encoding == "json" and not _plain(kind):
        if pa.types.is_temporal(kind):
            return _iso(array)
        values = (json.dumps(json_safe(value)).encode() for value in array.to_pylist())
        return pa.array(list(values), pa.large_binary())
    return array


def _file_bytes(value: Any) -> bytes | None:
    found = value.as_py()
    return None if found is None else found["bytes"]


def _iso(array: pa.Array) -> pa.Array:
    """Dates and times as ISO 8601; time zones as UTC."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type
    if pa.types.is_timestamp(kind):
        text = array.cast(pa.timestamp(kind.unit)).cast(pa.string())
        text = pc.replace_substring(text, " ", "T")
        return pc.binary_join_element_wise(text, "Z", "") if kind.tz else text
    if pa.types.is_duration(kind) or pa.types.is_interval(kind):
        return pa.array([None if value is None else str(value) for value in array.to_pylist()], pa.string())
    return array.cast(pa.string())


def _plain(kind: pa.DataType) -> bool:
    """Whether JSON holds values of this type as they are."""
    import pyarrow as pa

    types = pa.types
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _plain(kind.value_type)
    if types.is_struct(kind):
        return all(_plain(field.type) for field in kind)
    return bool(
        types.is_null(kind)
        or types.is_boolean(kind)
        or types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_string(kind)
        or types.is_large_string(kind)
    )


def _check_media(array: pa.Array, column: Column, level: str) -> dict[int, str]:
    """Row -> why its media is bad."""
    problems = {}
    for number, value in enumerate(array):
        data = value.as_buffer() if value.is_valid else None
        if data is None:
            continue
        try:
            media.check(data.to_pybytes(), column.media, level=level)
        except media.MediaError as error:
            problems[number] = f"the column {column.source!r}: {reason(error)}"
    return problems


def _value(value: Any, column: Column) -> Any:
    """A value as its encoding takes it."""
    encoding = column.encoding
    if encoding == "json":
        if column.text and isinstance(value, str):
            return int(value) if column.text == "int" else float(value)
        return json_safe(value)
    if isinstance(value, str):
        if encoding in _INTEGERS:
            return int(value)
        if encoding in _FLOATS:
            return float(value)
        if encoding == "str_decimal":
            return Decimal(value)
        if encoding == "bytes":
            return value.encode()
        if encoding in MEDIA_ENCODINGS:
            raise ValueError(f"no image but text: {value[:40]!r}")
    elif encoding == "str":
        if isinstance(value, datetime.date | datetime.time):
            return value.isoformat()
        if isinstance(value, bool | int | float | Decimal | np.number):
            return str(value)
        if isinstance(value, dict | list):
            return json.dumps(json_safe(value), ensure_ascii=False)
    return value


def json_safe(value: Any) -> Any:
    """`value` with what JSON lacks as text: dates in ISO 8601, decimals as digits, bytes in base64."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Mapping):
        return {str(name): json_safe(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return json_safe(value.tolist())
    if isinstance(value, bytes | bytearray):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, set | frozenset):
        return sorted(map(json_safe, value), key=repr)  # the order of a set is another in every process
    kind: Any = type(value)
    if (kind.__str__, kind.__repr__) == (object.__str__, object.__repr__):
        raise ValueError(f"a value of type {kind.__name__} has no place in JSON")
    return str(value)


def media_editor(options: ConvertOptions) -> Callable[[bytes, str], bytes] | None:
    """What changes media, where the user asked for that."""
    if options.max_image_size is None and options.image_format is None and options.resample is None:
        return None
    from shards.edit import editor

    return editor(options)


def items(source: Iterable[Item]) -> Iterator[Item]:
    """`source`, with empty tables left out."""
    return (item for item in source if not isinstance(item, Table) or item.batch.num_rows)
