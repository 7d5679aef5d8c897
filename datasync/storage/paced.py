"""A store that keeps to a byte rate: the same store, and each transfer waits for its share first.

The rate is that of the cluster, in both directions together, and holds for one process: everything opened at
one root with one timetable shares it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from datasync.errors import TransientError
from datasync.storage.base import Abilities, Buffer, Filled, ObjectInfo, Store, Upload, UploadInfo
from datasync.storage.rate import Pace, Timetable
from datasync.storage.retry import patience

_LOCK = threading.Lock()
_PACES: dict[tuple[str, Timetable], Pace] = {}


class PacedStore:
    """`store`, at most as fast as `timetable` allows.

    Args:
        store (Store): The store itself.
        timetable (Timetable): Bytes a second, by time of day.
        shared (str | None): What shares the rate; None is the root of `store`.
    """

    def __init__(self, store: Store, timetable: Timetable, *, shared: str | None = None) -> None:
        self.store = store
        self._timetable = timetable
        self._shared = store.url if shared is None else shared

    @property
    def url(self) -> str:
        return self.store.url

    def __repr__(self) -> str:
        return f"PacedStore({self.store!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PacedStore) and (other.store, other._timetable) == (
            self.store,
            self._timetable,
        )

    def __hash__(self) -> int:
        return hash((self.store, self._timetable))

    @property
    def _pace(self) -> Pace:
        with _LOCK:
            return _PACES.setdefault((self._shared, self._timetable), Pace(self._timetable))

    def child(self, prefix: str) -> PacedStore:
        return PacedStore(self.store.child(prefix), self._timetable, shared=self._shared)

    def abilities(self) -> Abilities:
        return self.store.abilities()

    def stat(self, key: str) -> ObjectInfo:
        return self.store.stat(key)

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        return self.store.list(prefix, after=after)

    def read(self, key: str, *, start: int = 0, length: int | None = None, etag: str | None = None) -> bytes:
        if length is not None:
            self._take(key, length)
            return self.store.read(key, start=start, length=length, etag=etag)
        # The size is known only afterwards: the next transfer waits for this one.
        data = self.store.read(key, start=start, length=length, etag=etag)
        self._take(key, len(data))
        return data

    def read_into(
        self,
        key: str,
        buffer: memoryview,
        *,
        start: int | None = None,
        etag: str | None = None,
        sha256: bool = False,
    ) -> Filled:
        self._take(key, len(buffer))
        return self.store.read_into(key, buffer, start=start, etag=etag, sha256=sha256)

    @contextlib.contextmanager
    def stream(
        self,
        key: str,
        *,
        start: int = 0,
        length: int | None = None,
        etag: str | None = None,
        chunk: int = 1 << 20,
    ) -> Iterator[Iterator[Buffer]]:
        with self.store.stream(key, start=start, length=length, etag=etag, chunk=chunk) as pieces:
            yield self._slowly(key, pieces)

    def _slowly(self, key: str, pieces: Iterator[Buffer]) -> Iterator[Buffer]:
        for piece in pieces:
            self._take(key, len(piece))
            yield piece

    def _take(self, key: str, count: int) -> None:
        """Wait for the share of `count` bytes; this tool's own small records are written also at the end.

        Raises:
            TransientError: The work is to end, and this had not begun.
        """
        self._pace.take(count)
        if patience().stopped and not key.startswith("_datasync/"):
            raise TransientError(f"{self.url}/{key}: stopped before its turn", mend="run again")

    def write(
        self,
        key: str,
        data: Buffer,
        *,
        crc32c: int | None = None,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> ObjectInfo:
        self._take(key, memoryview(data).nbytes)
        return self.store.write(key, data, crc32c=crc32c, if_absent=if_absent, if_match=if_match)

    def write_file(self, key: str, path: Path, *, if_absent: bool = False) -> ObjectInfo:
        self._take(key, path.stat().st_size)
        return self.store.write_file(key, path, if_absent=if_absent)

    def begin(self, key: str, *, bytes: int) -> Upload:
        return _PacedUpload(self.store.begin(key, bytes=bytes), self._take)

    def resume(self, key: str, upload_id: str, *, bytes: int) -> Upload:
        return _PacedUpload(self.store.resume(key, upload_id, bytes=bytes), self._take)

    def uploads(self, prefix: str = "") -> Iterator[UploadInfo]:
        return self.store.uploads(prefix)

    def copy(self, source: Store, source_key: str, key: str) -> ObjectInfo:
        inner = source.store if isinstance(source, PacedStore) else source
        return self.store.copy(inner, source_key, key)

    def delete(self, keys: Iterable[str]) -> None:
        self.store.delete(keys)


class _PacedUpload:
    """An upload whose parts wait for their share."""

    def __init__(self, upload: Upload, take: Callable[[str, int], None]) -> None:
        self._upload = upload
        self._take = take
        self.key = upload.key
        self.upload_id = upload.upload_id
        self.part_bytes = upload.part_bytes

    def put(self, number: int, data: Buffer, *, crc32c: int | None = None) -> str:
        self._take(self.key, memoryview(data).nbytes)
        return self._upload.put(number, data, crc32c=crc32c)

    def wait_turn(self, number: int) -> None:
        self._upload.wait_turn(number)

    def give_up(self) -> None:
        self._upload.give_up()

    def parts(self) -> dict[int, tuple[str, int]]:
        return self._upload.parts()

    def complete(
        self, tags: dict[int, str], *, if_absent: bool = False, if_match: str | None = None
    ) -> ObjectInfo:
        return self._upload.complete(tags, if_absent=if_absent, if_match=if_match)

    def abort(self) -> None:
        self._upload.abort()
