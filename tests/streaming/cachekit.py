"""Small datasets, and stores that misbehave on demand, for the tests of the cache."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from datasync.errors import NotFoundError, TransientError
from datasync.storage.base import Buffer, ObjectInfo
from datasync.storage.local import LocalStore
from datasync.streaming.fetch import ShardSource
from shards.builder import Recipe, ShardCutter
from shards.index import Index

COLUMNS = {"id": "int", "text": "str", "tokens": "ndarray:int32:64"}


def row(i: int) -> dict[str, Any]:
    """Sample `i` of every dataset made here."""
    import numpy as np

    return {"id": i, "text": f"sample {i} " * (1 + i % 7), "tokens": np.arange(i, i + 64, dtype=np.int32)}


def make_dataset(
    folder: Path,
    *,
    samples: int = 300,
    size_limit: int = 16 << 10,
    compression: str | None = "zstd:3",
    first: int = 0,
) -> Index:
    """Write samples `first` … as shards, index last."""
    recipe = Recipe(COLUMNS, compression=compression, size_limit=size_limit)
    cutter = ShardCutter(recipe)
    drafts = []
    for i in range(first, first + samples):
        drafts += cutter.write(row(i))
    drafts += cutter.finish()
    store = LocalStore(folder)
    infos = []
    for draft in drafts:
        shard = recipe.seal(draft)
        store.write(shard.info.stored.basename, shard.data)
        infos.append(shard.info)
    index = Index(infos)
    store.write("index.json", index.dumps())
    return index


def read_all(source: ShardSource) -> list[int]:
    """The ids of all samples, in order, each sample checked against what it must be."""
    ids = []
    for shard in range(len(source.index.shards)):
        opened = source.open(shard)
        for i in range(len(opened)):
            sample = opened[i]
            expected = row(sample["id"])
            assert sample["text"] == expected["text"]
            assert (sample["tokens"] == expected["tokens"]).all()
            ids.append(int(sample["id"]))
    return ids


def cached_files(folder: Path) -> list[Path]:
    """The shard files in a cache folder."""
    return sorted(path for path in folder.rglob("*.mds*") if ".datasync-cache" not in path.parts)


def temp_files(folder: Path) -> list[Path]:
    """Files being written in a cache folder."""
    return list((folder / ".datasync-cache" / "tmp").glob("*"))


class FaultyStore:
    """A folder as a store whose reads do what `fault` says.

    Args:
        root (Path): The folder.
        name (str): Its URL.
        fault (Callable): Called with the key before each read: may raise, sleep, or return a function that
            changes the bytes; None leaves them.
    """

    def __init__(
        self,
        root: Path,
        name: str = "",
        fault: Callable[[str], Callable[[bytes], bytes] | None] = lambda key: None,
    ) -> None:
        self._store = LocalStore(root)
        self.url = name or f"faulty://{root}"
        self.fault = fault
        self.reads: list[str] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalStore, (self._store.root,)

    def stat(self, key: str) -> ObjectInfo:
        self.fault(key)
        return self._store.stat(key)

    def read(self, key: str, **options: Any) -> bytes:
        change = self.fault(key)
        self.reads.append(key)
        data = self._store.read(key, **options)
        return change(data) if change else data

    @contextlib.contextmanager
    def stream(self, key: str, *, chunk: int = 1 << 20, **options: Any) -> Iterator[Iterator[Buffer]]:
        data = self.read(key, **options)
        chunk = min(chunk, 1024)
        yield iter([data[at : at + chunk] for at in range(0, len(data), chunk)])


def down(key: str) -> None:
    """A fault: the store does not answer."""
    raise TransientError(f"connection refused: {key}", mend="start it")


def missing(key: str) -> None:
    """A fault: the object is not there."""
    if key.endswith("index.json"):
        return
    raise NotFoundError(f"no object {key}", mend="replicate again")


def flipping(key: str) -> Callable[[bytes], bytes] | None:
    """A fault: a bit of a shard is wrong."""
    if key.endswith("index.json"):
        return None
    return lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


def truncating(key: str) -> Callable[[bytes], bytes] | None:
    """A fault: a shard ends early, and the store does not notice."""
    return None if key.endswith("index.json") else (lambda data: data[: len(data) // 2])


def slow(seconds: float) -> Callable[[str], None]:
    """A fault: it takes long."""

    def fault(key: str) -> None:
        if not key.endswith("index.json"):
            time.sleep(seconds)

    return fault


def datasync_threads(besides: Iterable[threading.Thread] = ()) -> list[str]:
    """Names of this package's threads that are alive, `besides` those that earlier tests have left."""
    alive = set(threading.enumerate()).difference(besides)
    return sorted(thread.name for thread in alive if thread.name.startswith("datasync-"))


def open_files_below(folder: Path) -> int:
    """How many descriptors of this process are open on files below a folder."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{fd}").startswith(str(folder))
    return count
