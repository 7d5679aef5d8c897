"""Existing MDS datasets: to change columns, compression or shard size, to merge, to shuffle, to split.

Columns and encodings are those of the dataset. Images go over as the bytes that they are. A column of pickles
is refused: reading it could run anything (invariant 10).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from shards import encodings
from shards.errors import FormatError, UsageError
from shards.index import BASENAME, Index, ShardInfo
from shards.mds import Shard, unpack
from shards.sources.base import Bad, Item, Row, Source, SourceOptions, Task
from shards.sources.files import FileList
from shards.stored import Stored

_AS_BYTES = ("jpeg", "png", "pil", "list[", "jpeg_array", "jpegarray")


class Part(NamedTuple):
    """One shard in a task."""

    file: int
    info: ShardInfo
    first: int


class Mds(Source):
    """MDS datasets. A payload is (files, parts)."""

    name = "mds"
    summary = "existing MDS datasets (a folder with index.json)"
    extensions = frozenset({".mds"})
    marked = True

    def __init__(self, files: FileList, options: SourceOptions) -> None:
        super().__init__(files, options)
        self._indexes: list[tuple[str, Index]] | None = None

    @classmethod
    def claims(cls, files: FileList) -> bool:
        return any(
            name.rpartition("/")[2] == BASENAME
            and b'"shards"' in files.read(number)
            and b'"mds"' in files.read(number)
            for number, name in enumerate(files.names)
        )

    @classmethod
    def separable(cls, files: FileList) -> bool:
        return False

    def indexes(self) -> list[tuple[str, Index]]:
        """Every index with the folder that it is in."""
        if self._indexes is None:
            found = [n for n, name in enumerate(self.files.names) if name.rpartition("/")[2] == BASENAME]
            if not found:
                raise UsageError(
                    f"{self.files.root} has no {BASENAME}", mend="name the folder of the dataset"
                )
            self._indexes = [
                (
                    self.files.names[number].removesuffix(BASENAME),
                    Index.parse(self.files.read(number), where=self.files.path(number)),
                )
                for number in found
            ]
        return self._indexes

    def columns(self) -> dict[str, str]:
        columns: dict[str, str] = {}
        for folder, index in self.indexes():
            for info in index.shards:
                if columns and info.columns != columns:
                    raise FormatError(
                        f"{self.files.root}/{folder} has shards with other columns",
                        mend="shard them one by one",
                    )
                columns = info.columns
        for name, encoding in columns.items():
            if not encodings.is_safe(encoding) and (
                self.options.columns is None or name in self.options.columns
            ):
                raise UsageError(
                    f"the column {name!r} is {encoding}, whose reading could run code",
                    mend="--select the other columns",
                )
        return columns

    def tasks(self) -> Iterator[Task]:
        numbers = self.files.index()
        for folder, index in self.indexes():
            held: list[tuple[str, ShardInfo, int]] = []
            size = first = 0
            for info in index.shards:
                if held and size + info.raw.bytes > self.options.target_bytes:
                    yield self._task(numbers, held, size)
                    held, size = [], 0
                held.append((folder + info.stored.basename, info, first))
                size += info.raw.bytes
                first += info.samples
            if held:
                yield self._task(numbers, held, size)

    def _task(self, numbers: dict[str, int], held: list[tuple[str, ShardInfo, int]], size: int) -> Task:
        files = self.files.select([numbers[name] for name, _, _ in held if name in numbers])
        places = files.index()
        parts = [Part(places.get(name, -1), info, first) for name, info, first in held]
        return Task(payload=(files, parts), bytes=size)

    def read(self, payload: tuple[FileList, list[Part]]) -> Iterator[Item]:
        files, parts = payload
        for part in parts:
            name = part.info.stored.basename
            if part.file < 0:
                yield Bad("the index names it, and it is not there", name)
                continue
            try:
                raw = unpack(files.read(part.file), part.info, where=name)
                with Shard(raw, part.info, allow_unsafe_types=True, where=name) as shard:
                    stored, columns = Stored(shard), part.info.columns
                    for row in range(len(shard)):
                        yield Row(self._values(stored, columns, row), name, part.first + row)
            except FormatError as error:
                yield Bad(error.message, name)
            except ValueError as error:
                yield Bad(str(error).splitlines()[0], name)

    def _values(self, stored: Stored, columns: dict[str, str], row: int) -> dict[str, Any]:
        """The values of a row: images and the like as bytes, the others decoded."""
        wanted = self.options.columns
        values: dict[str, Any] = {}
        for name, data in stored[row].items():
            if wanted is None or name in wanted:
                encoding = columns[name]
                values[name] = (
                    data if encoding.startswith(_AS_BYTES) else encodings.get(encoding).decode(data)
                )
        return values
