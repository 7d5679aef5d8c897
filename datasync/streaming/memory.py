"""A place for one shard in anonymous memory, for when the cache folder cannot be written.

It offers the part of `Cache` that a download needs, over a file that has no name and is gone with its map.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from datasync.streaming.room import Need, Temp
from datasync.streaming.stamps import Item


class MemoryPlace:
    """Holds what is placed in it.

    Args:
        root (Path): The folder that it stands in for, for messages.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._map: mmap.mmap | None = None

    @contextlib.contextmanager
    def reserve(self, bytes: int, need: Need) -> Iterator[Temp]:
        """An empty anonymous file."""
        fd = os.memfd_create("datasync")
        try:
            yield Temp(fd=fd, path="")
        finally:
            os.close(fd)

    def place(self, temp: Temp, item: Item, digests: Mapping[str, str]) -> None:
        """Keep the verified file."""
        self._map = mmap.mmap(temp.fd, 0, access=mmap.ACCESS_READ)

    def taken(self) -> memoryview:
        """What was placed."""
        assert self._map is not None
        return memoryview(self._map)
