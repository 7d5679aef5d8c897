"""Parquet: row groups, read a few megabytes of rows at a time.

Row groups are what tasks are cut at; neighbours in one file share a task until they hold a shard's worth of
rows, and small files share one too. Which rows a task has follows from the footers alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from shards.sources.arrow import unify
from shards.sources.base import Bad, Item, Source, Table, Task, content_error, reason
from shards.sources.files import FileList

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_BATCH_BYTES = 4 << 20
_BATCH_ROWS = 65_536
_FOOTERS_AT_ONCE = 16
_ROW_BYTES = 16  # what a shard has for each row besides its values
_WIDTHS = {
    **{"INT_8": 1, "UINT_8": 1, "INT_16": 2, "UINT_16": 2},
    **{"BOOLEAN": 1, "INT32": 4, "INT64": 8, "FLOAT": 4, "DOUBLE": 8},
}


class _Footer(NamedTuple):
    """What of a footer is needed more than once, in little memory: there may be very many files."""

    sizes: tuple[int, ...]  # bytes of each row group in shards
    schema: pa.Schema  # one object for all files that have the same
    nullable: frozenset[str]  # columns that have a null, or may have one


class Parquet(Source):
    """Parquet files. A payload is (files, parts); a part is (number of the file, row groups or why not)."""

    name = "parquet"
    summary = "Parquet (.parquet .pq), nested, dictionary and large types too"
    extensions = frozenset({".parquet", ".pq"})

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._found: list[_Footer | str] | None = None

    def tasks(self) -> Iterator[Task]:
        files, target = self.mine(), self.options.target_bytes
        parts: list[tuple[int, list[int] | str]] = []
        held = 0
        for number, footer in enumerate(self._footers()):
            if isinstance(footer, str):
                parts.append((number, footer))
                continue
            for row_group, size in enumerate(footer.sizes):
                if held and held + size > target:
                    yield _task(files, parts, held)
                    parts, held = [], 0
                last = parts[-1] if parts else None
                if last is not None and last[0] == number and isinstance(last[1], list):
                    last[1].append(row_group)
                else:
                    parts.append((number, [row_group]))
                held += size
        if parts:
            yield _task(files, parts, held)

    def columns(self) -> pa.Schema | None:
        """What the files declare; a column that differs between them has the type that holds both."""
        distinct = {
            id(footer.schema): footer.schema for footer in self._footers() if not isinstance(footer, str)
        }
        return unify(list(distinct.values())) if distinct else None

    def nullable(self) -> set[str]:
        """The columns that have a null somewhere, or may have one, as the footers count them."""
        return set().union(*(footer.nullable for footer in self._footers() if not isinstance(footer, str)))

    def _footers(self) -> list[_Footer | str]:
        """What the footer of each file says, read once, or why it has none."""
        if self._found is None:
            files = self.mine()
            schemas: dict[str, pa.Schema] = {}

            def look(number: int) -> _Footer | str:
                footer = _footer(files, number)
                return footer if isinstance(footer, str) else _facts(footer, self.options.columns, schemas)

            if files.remote and len(files) > 1:
                with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
                    self._found = list(pool.map(look, range(len(files))))
            else:
                self._found = [look(number) for number in range(len(files))]
        return self._found

    def read(self, payload: tuple[FileList, list[tuple[int, list[int] | str]]]) -> Iterator[Item]:
        files, parts = payload
        for number, what in parts:
            if isinstance(what, str):
                yield Bad(what, files.names[number])
                continue
            try:
                yield from self._row_groups(files, number, what)
                files.check_unchanged(number)
            except Exception as error:
                if not content_error(error):
                    raise
                yield Bad(reason(error), files.names[number])

    def _row_groups(self, files: FileList, number: int, row_groups: list[int]) -> Iterator[Item]:
        import pyarrow.parquet as pq

        with _opened(files, number) as file:
            parquet = pq.ParquetFile(file, pre_buffer=files.remote)
            columns = self.options.columns
            if columns is not None:
                present = set(parquet.schema_arrow.names)
                columns = tuple(name for name in columns if name in present)
            first = sum(parquet.metadata.row_group(group).num_rows for group in range(row_groups[0]))
            for row_group in row_groups:
                group = parquet.metadata.row_group(row_group)
                size = _bytes(parquet.metadata, row_group, columns)
                rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES * group.num_rows // max(size, 1)))
                for batch in parquet.iter_batches(
                    rows, row_groups=[row_group], columns=columns, use_threads=False
                ):
                    yield Table(batch, files.names[number], first)
                    first += batch.num_rows


def _task(files: FileList, parts: list[tuple[int, list[int] | str]], size: int) -> Task:
    """A task over `parts`, carrying only the files it needs."""
    first, last = parts[0][0], parts[-1][0]
    own = files.slice(range(first, last + 1))
    return Task(payload=(own, [(number - first, what) for number, what in parts]), bytes=size)


def _opened(files: FileList, number: int) -> Any:
    """A file that Arrow reads by itself where it is local; not mapped: one cut short would end us."""
    import pyarrow as pa

    return files.open(number) if files.remote else pa.OSFile(files.path(number))


def _footer(files: FileList, number: int) -> pq.FileMetaData | str:
    import pyarrow.parquet as pq

    try:
        with files.open(number) as file:
            return pq.read_metadata(file)
    except Exception as error:
        if not content_error(error):
            raise
        return reason(error)


def _facts(
    footer: pq.FileMetaData, columns: tuple[str, ...] | None, schemas: dict[str, pa.Schema]
) -> _Footer:
    schema = footer.schema.to_arrow_schema()
    nullable = set()
    for row_group in range(footer.num_row_groups):
        group = footer.row_group(row_group)
        for index in range(group.num_columns):
            column = group.column(index)
            statistics = column.statistics
            if statistics is None or not statistics.has_null_count or statistics.null_count:
                nullable.add(column.path_in_schema.split(".")[0])
    return _Footer(
        sizes=tuple(_bytes(footer, row_group, columns) for row_group in range(footer.num_row_groups)),
        schema=schemas.setdefault(schema.remove_metadata().to_string(), schema),
        nullable=frozenset(nullable),
    )


def _bytes(footer: pq.FileMetaData, number: int, columns: tuple[str, ...] | None) -> int:
    """About how many bytes the wanted columns of a row group have in shards: exact for numbers.

    Numbers have less in the file where a dictionary holds them, and more where they have less than 32 bits.
    """
    row_group = footer.row_group(number)
    size = _ROW_BYTES * row_group.num_rows
    for index in range(row_group.num_columns):
        part = row_group.column(index)
        if columns is None or part.path_in_schema.split(".")[0] in columns:
            kind = footer.schema.column(index)
            width = _WIDTHS.get(kind.converted_type) or _WIDTHS.get(kind.physical_type, 0)
            size += part.num_values * width if width else part.total_uncompressed_size
    return int(size)
