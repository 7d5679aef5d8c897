"""Arrow IPC files and streams, Feather, and Hugging Face datasets on disk (`save_to_disk`).

In a folder with a `state.json`, the files are those that it names, in its order; where it also names indices
(what was saved is a view: shuffled, filtered, sorted), the rows are those that they choose, in their order. A
file is cut between its record batches; a stream cannot be cut.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shards.errors import FormatError, UsageError
from shards.sources.base import Bad, Item, Source, SourceOptions, Table, Task, content_error, reason
from shards.sources.files import FileList

if TYPE_CHECKING:
    import pyarrow as pa

_MAGIC = b"ARROW1"
_STATE = "state.json"
_ROWS = 65_536
_VIEW_BYTES = 4 << 20


def unify(schemas: list[pa.Schema]) -> pa.Schema:
    """The columns of all files; one that differs between them has the type that holds both.

    Raises:
        UsageError: There is no such type, or a file has two columns of one name.
    """
    import pyarrow as pa

    for schema in schemas:
        twice = next((name for name in schema.names if schema.names.count(name) > 1), None)
        if twice is not None:
            raise UsageError(f"a file has two columns called {twice!r}", mend="rename one at the source")
    try:
        return pa.unify_schemas(schemas, promote_options="permissive")
    except pa.ArrowException as error:
        raise UsageError(
            f"the files do not have the same columns: {reason(error)}",
            mend="shard those of one kind at a time",
        ) from error


class Arrow(Source):
    """Arrow files. A payload is (files of one, begin, end): record batches, or None for all of a stream."""

    name = "arrow"
    summary = "Arrow IPC files and streams, Feather (.arrow .feather .ipc)"
    extensions = frozenset({".arrow", ".feather", ".ipc"})

    def __init__(self, files: FileList, options: SourceOptions) -> None:
        super().__init__(files, options)
        self._looked: tuple[pa.Schema | None, set[str]] | None = None

    def tasks(self) -> Iterator[Task]:
        files, target = self.mine(), self.options.target_bytes
        for number in range(len(files)):
            own, size = files.slice(range(number, number + 1)), max(int(files.sizes[number]), 0)
            batches = self._batches(own)
            if batches is None or size <= target:
                yield Task(payload=(own, 0, None), bytes=size)
                continue
            count = min(-(-size // target), batches)
            edges = [batches * part // count for part in range(count + 1)]
            for begin, end in pairwise(edges):
                yield Task(payload=(own, begin, end), bytes=size // count)

    def _batches(self, file: FileList) -> int | None:
        """Record batches of a file; None for a stream, or for a file that will be refused."""
        try:
            with _opened(file) as reader:
                return getattr(reader, "num_record_batches", None)
        except Exception as error:
            if not content_error(error):
                raise
            return None

    def columns(self) -> pa.Schema | None:
        return self._look()[0]

    def nullable(self) -> set[str]:
        return self._look()[1]

    def _look(self) -> tuple[pa.Schema | None, set[str]]:
        """The columns of all files, and those with a null: in all local batches, in the first remote one."""

        if self._looked is None:
            files = self.mine()
            schemas: list[pa.Schema] = []
            nulls: set[str] = set()
            for number in range(len(files)):
                try:
                    with _opened(files.slice(range(number, number + 1)), mapped=True) as reader:
                        schemas.append(reader.schema)
                        for batch in _each(reader, 0, 1 if files.remote else None):
                            nulls.update(n for n in batch.schema.names if batch.column(n).null_count)
                except Exception as error:
                    if not content_error(error):
                        raise
            self._looked = unify(schemas) if schemas else None, nulls
        return self._looked

    def read(self, payload: tuple[FileList, int, int | None]) -> Iterator[Item]:
        file, begin, end = payload
        (name,) = file.names
        try:
            with _opened(file) as reader:
                first = 0
                for number, batch in enumerate(_each(reader, 0, end)):
                    if number >= begin:
                        batch.validate(full=True)  # a damaged file may point anywhere in memory
                        for start in range(0, batch.num_rows, _ROWS):
                            yield Table(batch.slice(start, _ROWS), name, first + start)
                    first += batch.num_rows
            file.check_unchanged(0)
        except Exception as error:
            if not content_error(error):
                raise
            yield Bad(reason(error), name)


class HuggingFace(Arrow):
    """A Hugging Face dataset on disk."""

    name = "hf"
    summary = "Hugging Face datasets on disk (a folder with state.json)"
    marked = True

    @classmethod
    def claims(cls, files: FileList) -> bool:
        folders = {name.rpartition("/")[0] for name in files.names if name.rpartition("/")[2] == _STATE}
        return any(name.rpartition("/")[0] in folders and name.endswith(".arrow") for name in files.names)

    @classmethod
    def separable(cls, files: FileList) -> bool:
        return False

    def mine(self) -> FileList:
        """The files that `state.json` names."""
        return self._named("_data_files")

    def _named(self, part: str) -> FileList:
        states = [n for n, name in enumerate(self.files.names) if name.rpartition("/")[2] == _STATE]
        if len(states) != 1:
            folders = ", ".join(self.files.names[n].rpartition("/")[0] for n in states) or "none"
            raise UsageError(
                f"{self.files.root} does not hold one dataset: {folders}", mend="name one folder"
            )
        (state,) = states
        folder = self.files.names[state].removesuffix(_STATE)
        try:
            names = [folder + file["filename"] for file in json.loads(self.files.read(state)).get(part) or []]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FormatError(
                f"{self.files.names[state]} is damaged: {error}", mend="copy it again"
            ) from error
        index = self.files.index()
        missing = [name for name in names if name not in index]
        if missing:
            raise UsageError(
                f"{self.files.root} lacks {missing[0]}, which state.json names", mend="copy it again"
            )
        return self.files.select([index[name] for name in names])

    def tasks(self) -> Iterator[Task]:
        chosen = self._named("_indices_data_files")
        if not len(chosen):
            yield from super().tasks()
            return
        files = self.mine()
        if files.remote:
            raise UsageError(
                f"{files.root} is a view of a dataset, whose rows lie anywhere in its files",
                mend="copy it to a local disk first, or save it again after flatten_indices()",
            )
        numbers = _indices(chosen)
        rows = _rows(files)
        if len(numbers) and int(numbers.max()) >= rows:
            raise FormatError(
                f"{chosen.names[0]} names row {int(numbers.max()):,} of {rows:,}", mend="copy it again"
            )
        size = files.total_bytes * len(numbers) // max(rows, 1)
        count = max(1, min(-(-size // self.options.target_bytes), len(numbers)))
        edges = [len(numbers) * part // count for part in range(count + 1)]
        for begin, end in pairwise(edges):
            yield Task(payload=View(files, chosen.names[0], begin, numbers[begin:end]), bytes=size // count)

    def read(self, payload: Any) -> Iterator[Item]:
        if not isinstance(payload, View):
            yield from super().read(payload)
            return
        import pyarrow as pa

        files, numbers = payload.files, payload.numbers
        try:
            tables = []
            for number in range(len(files)):
                with _opened(files.slice(range(number, number + 1)), mapped=True) as reader:
                    tables.append(pa.Table.from_batches(_each(reader, 0, None), schema=reader.schema))
            table = pa.concat_tables(tables)
            table.validate()
            step = max(1, min(_ROWS, _VIEW_BYTES * table.num_rows // max(table.nbytes, 1)))
            for start in range(0, len(numbers), step):
                taken = table.take(pa.array(numbers[start : start + step])).combine_chunks()
                for batch in taken.to_batches():
                    batch.validate(full=True)
                    yield Table(batch, payload.name, payload.first + start)
                    start += batch.num_rows
            for number in range(len(files)):
                files.check_unchanged(number)
        except Exception as error:
            if not content_error(error):
                raise
            yield Bad(reason(error), payload.name)


class View(NamedTuple):
    """A task of a view: the rows of all files that it has, by number; the first of them is row `first`."""

    files: FileList
    name: str
    first: int
    numbers: np.ndarray[Any, np.dtype[np.int64]]


def _indices(files: FileList) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The numbers of the rows that a view chooses."""
    parts = [np.empty(0, np.int64)]
    for number in range(len(files)):
        with _opened(files.slice(range(number, number + 1))) as reader:
            parts += [batch.column(0).to_numpy().astype(np.int64) for batch in _each(reader, 0, None)]
    return np.concatenate(parts)


def _rows(files: FileList) -> int:
    count = 0
    for number in range(len(files)):
        with _opened(files.slice(range(number, number + 1)), mapped=True) as reader:
            count += sum(batch.num_rows for batch in _each(reader, 0, None))
    return count


@contextmanager
def _opened(file: FileList, *, mapped: bool = False) -> Iterator[Any]:
    """A reader of the one file; mapped where only the heads of its batches are wanted and it is local."""
    import pyarrow as pa

    local = pa.memory_map if mapped else pa.OSFile
    source = file.open(0) if file.remote else local(file.path(0))
    with source:
        magic = bytes(source.read(len(_MAGIC)))
        if magic.startswith(b"FEA1"):
            raise ValueError("Feather of version 1, which Arrow gives up: write it again as version 2")
        is_file = magic == _MAGIC
        source.seek(0)
        with pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source) as reader:
            yield reader


def _each(reader: Any, begin: int, end: int | None) -> Iterator[pa.RecordBatch]:
    count = getattr(reader, "num_record_batches", None)
    if count is not None:
        for number in range(begin, count if end is None else min(end, count)):
            yield reader.get_batch(number)
        return
    for number, batch in enumerate(reader):
        if end is not None and number >= end:
            return
        if number >= begin:
            yield batch
