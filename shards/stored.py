"""The values of a sample as the bytes that are stored, not decoded."""

from __future__ import annotations

import struct

from shards.index import ShardInfo
from shards.mds import Shard


class Stored:
    """Takes the samples of a shard apart.

    Args:
        shard (Shard): An open shard.
    """

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        info: ShardInfo = shard.info
        self._columns = list(zip(info.column_names, info.column_sizes, strict=True))
        self._head = struct.Struct(f"<{sum(size is None for size in info.column_sizes)}I")

    def __getitem__(self, row: int) -> dict[str, bytes]:
        """Column -> bytes of the sample at `row`."""
        data = self._shard.sample_bytes(row)
        lengths = iter(self._head.unpack_from(data))
        at, values = self._head.size, {}
        for name, size in self._columns:
            stop = at + (next(lengths) if size is None else size)
            values[name] = data[at:stop]
            at = stop
        return values
