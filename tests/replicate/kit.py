"""What the tests of replication share: small datasets, and stores that count and fail on demand."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from datasync.replicate import Options
from datasync.storage.base import Store
from shards.digests import crc32c
from shards.index import FileInfo, Index, ShardInfo
from shards.manifest import Manifest, ManifestEntry, manifest_key

QUICK = Options(quiet=True, retry_seconds=8)  # a busy machine may be silent for some seconds


def shard_bytes(seed: object, size: int) -> bytes:
    return random.Random(str(seed)).randbytes(size)


def shard_info(
    basename: str, data: bytes, hashes: dict[str, str] | None = None, samples: int = 10
) -> ShardInfo:
    found = hashes if hashes is not None else {"sha256": hashlib.sha256(data).hexdigest()}
    return ShardInfo(
        samples=samples,
        size_limit=1 << 26,
        compression=None,
        hashes=tuple(found),
        column_names=("x",),
        column_encodings=("bytes",),
        column_sizes=(None,),
        raw=FileInfo(basename, len(data), found),
        zip=None,
    )


def publish_dataset(store: Store, shards: dict[str, bytes]) -> str:
    """Write a dataset as `datasync shard` does; returns its version."""
    entries, infos = [], []
    for name, data in shards.items():
        store.write(name, data)
        sha = hashlib.sha256(data).hexdigest()
        entries.append(ManifestEntry(key=name, bytes=len(data), crc32c=crc32c(data), sha256=sha, samples=10))
        infos.append(shard_info(name, data))
    manifest = Manifest.from_entries(entries)
    store.write(manifest_key(manifest.version), manifest.to_parquet())
    extra = {"version": manifest.version, "manifest": manifest_key(manifest.version), "created_by": "tests"}
    store.write("index.json", Index(infos, extra).dumps())
    return manifest.version


def make_shards(count: int, size: int = 20_000, seed: object = 0) -> dict[str, bytes]:
    found = {}
    for number in range(count):
        data = shard_bytes((seed, number), size + number)
        found[f"shards/{number:05d}-{hashlib.sha256(data).hexdigest()[:16]}.mds"] = data
    return found


def make_dataset(store: Store, count: int = 6, size: int = 20_000, seed: object = 0) -> dict[str, bytes]:
    shards = make_shards(count, size, seed)
    publish_dataset(store, shards)
    return shards


def write_tree(folder: Path, files: dict[str, bytes]) -> None:
    for key, data in files.items():
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(data)


def data_of(store: Store) -> dict[str, bytes]:
    """Everything at a store but this tool's bookkeeping."""
    return {info.key: store.read(info.key) for info in store.list() if not info.key.startswith("_datasync/")}


class Spy:
    """A store that counts what is done to it and fails when told to.

    Args:
        store (Store): The store behind it.
        before (Callable | None): Called with (operation, key) before each; may raise or wait.
    """

    def __init__(self, store: Store, before: Callable[[str, str], None] | None = None) -> None:
        self.inner = store
        self.before = before
        self.calls: list[tuple[str, str]] = []
        self.read_bytes = 0
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def endpoint(self) -> Any:
        return getattr(self.inner, "endpoint", None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __reduce__(self) -> Any:
        raise TypeError("a spy does not pickle")

    def count(self, operation: str, key: str | None = None) -> int:
        return sum(1 for op, where in self.calls if op == operation and key in (None, where))

    def data_writes(self) -> Counter[str]:
        wanted = ("write", "part", "copy", "complete")
        return Counter(key for op, key in self.calls if op in wanted and not key.startswith("_datasync/"))

    def note(self, operation: str, key: str) -> None:
        with self._lock:
            self.calls.append((operation, key))
        if self.before is not None:
            self.before(operation, key)

    def stat(self, key: str) -> Any:
        self.note("stat", key)
        return self.inner.stat(key)

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[Any]:
        self.note("list", prefix)
        return self.inner.list(prefix, after=after)

    def read(self, key: str, **options: Any) -> bytes:
        self.note("read", key)
        data = self.inner.read(key, **options)
        with self._lock:
            self.read_bytes += len(data)
        return data

    def read_into(self, key: str, buffer: memoryview, **options: Any) -> Any:
        self.note("read", key)
        filled = self.inner.read_into(key, buffer, **options)
        with self._lock:
            self.read_bytes += filled.bytes
        return filled

    @contextlib.contextmanager
    def stream(self, key: str, **options: Any) -> Iterator[Iterator[Any]]:
        self.note("stream", key)
        with self.inner.stream(key, **options) as pieces:
            yield pieces

    def write(self, key: str, data: Any, **options: Any) -> Any:
        self.note("write", key)
        return self.inner.write(key, data, **options)

    def begin(self, key: str, *, bytes: int) -> Any:
        self.note("begin", key)
        return SpyUpload(self, self.inner.begin(key, bytes=bytes))

    def resume(self, key: str, upload_id: str, *, bytes: int) -> Any:
        self.note("resume", key)
        return SpyUpload(self, self.inner.resume(key, upload_id, bytes=bytes))

    def copy(self, source: Store, source_key: str, key: str) -> Any:
        self.note("copy", key)
        return self.inner.copy(getattr(source, "inner", source), source_key, key)

    def delete(self, keys: Any) -> None:
        keys = list(keys)
        for key in keys:
            self.note("delete", key)
        self.inner.delete(keys)


class SpyUpload:
    """An upload whose parts are counted."""

    def __init__(self, spy: Spy, upload: Any) -> None:
        self.spy, self.upload = spy, upload

    def __getattr__(self, name: str) -> Any:
        return getattr(self.upload, name)

    def put(self, number: int, data: Any, **options: Any) -> str:
        self.spy.note("part", f"{self.upload.key}#{number}")
        return self.upload.put(number, data, **options)

    def complete(self, tags: dict[int, str], **options: Any) -> Any:
        self.spy.note("complete", self.upload.key)
        return self.upload.complete(tags, **options)


def datasync(
    *arguments: str, cwd: Path, env: dict[str, str] | None = None, check: int | None = 0
) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user does."""
    done = subprocess.run(
        [sys.executable, "-m", "datasync.cli", *arguments],
        cwd=cwd,
        env=environment(env),
        capture_output=True,
        text=True,
        timeout=240,
    )
    if check is not None:
        assert done.returncode == check, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def start(*arguments: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start the command line in the background."""
    return subprocess.Popen(
        [sys.executable, "-m", "datasync.cli", *arguments],
        cwd=cwd,
        env=environment(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    found = {**os.environ, **(extra or {})}
    found["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    found.pop("DATASYNC_CONFIG", None)
    return found
