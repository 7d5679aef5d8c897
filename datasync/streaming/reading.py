"""From located samples to values: one by one, or a chunk of batches by one gather for each shard.

Every shard comes through its `ShardSource`, which has it verified and open. A column whose values have a
fixed size becomes one array for the whole chunk, filled shard by shard; its batches are slices of it. Any
other column is a list. Both are the caller's own: nothing points into the cache, but for media files that
are to be decoded next.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from datasync.streaming.buffers import Buffers
from datasync.streaming.fetch import ShardSource
from datasync.streaming.permute import Ints
from datasync.streaming.plan import Chunk

Columns = dict[str, Any]


def read_rows(sources: Sequence[ShardSource], chunk: Chunk) -> Iterator[dict[str, Any]]:
    """The samples of a chunk, one by one, in order."""
    places = zip(chunk.stream.tolist(), chunk.shard.tolist(), chunk.row.tolist(), strict=True)
    for stream, shard, row in places:
        yield sources[stream].open(shard)[row]


def read_columns(
    sources: Sequence[ShardSource], chunk: Chunk, files: Collection[str] = (), *, buffers: Buffers
) -> Columns | None:
    """The samples of a chunk: column -> an array or a list with a value for each sample, in order.

    None where the streams do not have the same columns, so that there is nothing to put together. Values of
    the columns in `files` that are media files are views of the shard (`Shard.batch`). Arrays are made of
    `buffers`.
    """
    gathered: Columns = {}
    for where, part in _parts(sources, chunk, files):
        if not gathered:
            gathered = {name: _room(values, len(chunk.row), buffers) for name, values in part.items()}
        if part.keys() != gathered.keys():
            return None
        for name, values in part.items():
            if not _put(gathered, name, where, values):
                return None
    return gathered


def batches_of(columns: Columns, sizes: Sequence[int]) -> Iterator[Columns]:
    """The chunk's batches: slices of its columns."""
    first = 0
    for size in sizes:
        yield {name: values[first : first + size] for name, values in columns.items()}
        first += size


def rows_of(columns: Columns) -> list[dict[str, Any]]:
    """The samples of a batch of columns, one by one."""
    count = len(next(iter(columns.values()), ()))
    return [{name: values[i] for name, values in columns.items()} for i in range(count)]


def _parts(
    sources: Sequence[ShardSource], chunk: Chunk, files: Collection[str]
) -> Iterator[tuple[Ints, Columns]]:
    """For each shard of the chunk: which of the chunk's samples are from it, and their columns."""
    key = chunk.shard * len(sources) + chunk.stream
    by_shard = np.argsort(key, kind="stable")
    sorted_key = key[by_shard]
    edges = np.flatnonzero(np.diff(sorted_key)) + 1
    for where in np.split(by_shard, edges):
        if len(where):
            shard, stream = divmod(int(key[where[0]]), len(sources))
            yield where, sources[stream].open(shard).batch(chunk.row[where], files=files)


def _room(values: Any, count: int, buffers: Buffers) -> Any:
    """A place for `count` values like these."""
    if isinstance(values, np.ndarray):
        shape = (count, *values.shape[1:])
        return np.empty(shape, values.dtype) if values.dtype.hasobject else buffers.take(shape, values.dtype)
    return [None] * count


def _put(gathered: Columns, name: str, where: Ints, values: Any) -> bool:
    """Put the values of one shard where they belong; False if they are of another kind than those before."""
    room = gathered[name]
    if isinstance(room, np.ndarray):
        same = (
            isinstance(values, np.ndarray)
            and values.dtype == room.dtype
            and values.shape[1:] == room.shape[1:]
        )
        if same:
            room[where] = values
        return same
    for i, value in zip(where.tolist(), values, strict=True):
        room[i] = value
    return True
