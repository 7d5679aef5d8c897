"""Batches of values of fixed size: each column of a batch is one gather out of all its shards, a single copy.

    window     the memory from the first open shard to the last as one array, with an item at every byte
    place      of a sample in it: where its shard begins + row * bytes of a sample
    batch      window[places]

NumPy gathers out of one array, and the rows of a batch lie in as many shards as it has lanes; the window
makes one array of those. Nothing is looked up but places inside of shards: tables were checked when they were
opened (`Shard.cells`), rows are compared with the number of samples, and the tables are held meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from datasync.streaming.fetch import ShardSource
from datasync.streaming.permute import Ints
from datasync.streaming.plan import Chunk
from shards import encodings
from shards.mds import Shard

Array = np.ndarray[Any, Any]

_PIECE_BYTES = 256 << 10  # copied at a time into memory that is there: half of what the CPU keeps at hand
_MOST_BYTES = 1 << 62  # that NumPy may count in a window, where every item counts in full


class Gather:
    """Gathers out of the shards of some streams, as long as all are tables of the same columns.

    Args:
        sources (Sequence[ShardSource]): Of each stream.
        first_shard (Ints): The number of each stream's first shard among all streams'.
        samples (Ints): Of each shard of all streams.
    """

    def __init__(self, sources: Sequence[ShardSource], first_shard: Ints, samples: Ints) -> None:
        self._sources, self._first_shard, self._samples = sources, first_shard, samples
        self._begin = np.zeros(len(samples), np.int64)  # where the first row of each open shard lies
        self._columns: list[_Column] = []
        self._format: tuple[Any, ...] = ()  # names, encodings and sizes of the columns
        self._tables: list[list[Array]] = []  # held, so that nothing is unmapped
        self.sample_bytes = 0
        self.bytes_copied = 0

    def places(self, chunk: Chunk) -> Ints | None:
        """Open the shards of a chunk; where its samples lie in the window, (n,), until the next call.

        None if the shards are no tables, or not of the same columns: then they have to be read one by one.
        """
        number = self._first_shard[chunk.stream] + chunk.shard
        if ((chunk.row < 0) | (chunk.row >= self._samples[number])).any():
            raise IndexError("a row to read is not in its shard")
        used, at = np.unique(number, return_index=True)
        by_use = np.argsort(at)
        wanted = [(int(chunk.stream[i]), int(chunk.shard[i])) for i in at[by_use].tolist()]
        self.release()
        for stream, shard in wanted:
            self._sources[stream].open(shard)
        # Now all at once, if they are still open: where room is short, each is let go for the next one.
        end = 0
        for place, (stream, shard) in zip(used[by_use].tolist(), wanted, strict=True):
            opened = self._sources[stream].opened(shard)
            cells = None if opened is None else opened.cells
            if opened is None or cells is None or not self._fits(opened, cells):
                self.release()
                return None
            self._tables.append(cells)
            self._begin[place] = _address(cells[0])
            end = max(end, int(self._begin[place]) + len(cells[0]) * self.sample_bytes)
        low = int(self._begin[used].min())
        if not self._open_window(low, end):
            return None
        return np.asarray(self._begin[number] - low + chunk.row * self.sample_bytes, dtype=np.int64)

    def take(self, places: Ints) -> dict[str, Array]:
        """The columns of the samples at these places, in new memory."""
        self.bytes_copied += len(places) * self.sample_bytes
        return {column.name: column.values(column.window[places]) for column in self._columns}

    def take_into(self, places: Ints, room: Callable[[tuple[int, ...]], Array]) -> dict[str, Array]:
        """The same, in memory that `room` gives for a shape in bytes; copied twice."""
        self.bytes_copied += 2 * len(places) * self.sample_bytes
        taken = {}
        for column in self._columns:
            out = room((len(places), column.size))
            items = out.view(np.dtype((np.void, column.size))).reshape(len(places))
            step = max(1, _PIECE_BYTES // column.size)
            for first in range(0, len(places), step):
                items[first : first + step] = column.window[places[first : first + step]]
            taken[column.name] = column.decode(out)
        return taken

    def release(self) -> None:
        """Let go of the shards; their places are no longer to be looked up."""
        self._tables = []

    def _fits(self, shard: Shard, cells: list[Array]) -> bool:
        """Whether the shard has the columns of those before; the first one makes them."""
        info = shard.info
        has = (info.column_names, info.column_encodings, info.column_sizes)
        if not self._format:
            self._format = has
            self._columns = _columns(shard, cells)
            self.sample_bytes = sum(cell.itemsize for cell in cells)
        return bool(self._columns) and has == self._format

    def _open_window(self, low: int, high: int) -> bool:
        """Let the columns' windows be this memory; False if it is too wide for NumPy."""
        if any((high - low) * column.size >= _MOST_BYTES for column in self._columns):
            return False
        for column in self._columns:
            column.window = np.asarray(_Memory(low + column.offset, high - low - column.offset, column.size))
        return True


@dataclass(slots=True)
class _Column:
    """A column of the tables.

    Args:
        name (str): Its name.
        size (int): Bytes of a value.
        offset (int): Bytes of a sample before it.
        decode (Callable): Values of (n, size) bytes, as an array of them over the same memory.
        window (Array): Items of `size` bytes.
    """

    name: str
    size: int
    offset: int
    decode: Callable[[Array], Any]
    window: Any = None

    def values(self, items: Array) -> Array:
        values: Array = self.decode(items.view(np.uint8).reshape(len(items), self.size))
        return values


class _Memory:
    """Memory that is there, as NumPy is told of it: an item at every byte, none to be written."""

    def __init__(self, address: int, bytes: int, size: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, True),
            "typestr": f"|V{size}",
            "shape": (bytes - size + 1,),
            "strides": (1,),
        }


def _columns(shard: Shard, cells: list[Array]) -> list[_Column]:
    """The columns of a table; none if values of one are no array."""
    columns, offset = [], 0
    for name, encoding, cell in zip(shard.info.column_names, shard.info.column_encodings, cells, strict=True):
        decode = encodings.get(encoding).decode_array if encodings.known(encoding) else None
        if decode is None or decode(np.empty((0, cell.itemsize), np.uint8)) is None:
            return []
        columns.append(_Column(name, cell.itemsize, offset, decode))
        offset += cell.itemsize
    return columns


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])
