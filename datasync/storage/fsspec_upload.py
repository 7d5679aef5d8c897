"""Large objects on their way through fsspec: written in order, visible when the last part is there.

fsspec has files to write into, and no parts that outlive a process. So parts are put one after the other into
one open file, which object stores make visible when it is closed and folders when it is moved; a part that
comes early waits for its turn. A killed process leaves nothing that could be gone on with.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from typing import TYPE_CHECKING, Any

from datasync.errors import ConflictError, CorruptError, NotFoundError, StoreError, UnsupportedError
from datasync.storage.base import Buffer, ObjectInfo
from datasync.storage.s3_upload import part_bytes_for
from shards.digests import crc32c as crc32c_of

if TYPE_CHECKING:
    from datasync.storage.fsspec_store import FsspecStore

_live: dict[str, FsspecUpload] = {}


class FsspecUpload:
    """One object on its way; see `datasync.storage.base.Upload`.

    Args:
        store (FsspecStore): Where.
        key (str): Its key.
        size (int): Its bytes.
    """

    def __init__(self, store: FsspecStore, key: str, size: int) -> None:
        self.key = key
        self.upload_id = uuid.uuid4().hex
        self.part_bytes = part_bytes_for(size)
        self._store = store
        self._size = size
        self._target = store.hidden_path() if store.moves else store.full_path(key)
        self._parts: dict[int, tuple[str, int]] = {}
        self._turn = threading.Condition()
        self._failure: BaseException | None = None
        with store.translated(key):
            if store.moves:
                store.fs.makedirs(store.fs._parent(self._target), exist_ok=True)
            self._file: Any = store.fs.open(self._target, "wb", block_size=self.part_bytes)
        _live[self.upload_id] = self

    @staticmethod
    def resumed(store: FsspecStore, key: str, upload_id: str) -> FsspecUpload:
        """An upload that this process has begun.

        Raises:
            NotFoundError: Another one has, and it ended with that.
        """
        found = _live.get(upload_id)
        if found is not None and found._failure is not None:
            found.abort()
            found = None
        if found is None or found.key != key:
            raise NotFoundError(f"no upload {upload_id} of {key} at {store.url}", mend="begin it again")
        return found

    def put(self, number: int, data: Buffer, *, crc32c: int | None = None) -> str:
        view = memoryview(data).cast("B")
        value = crc32c_of(view)
        if crc32c is not None and value != crc32c:
            raise CorruptError(
                f"part {number} for {self._store.url}/{self.key} is not what was meant", mend="read it again"
            )
        tag = f"{len(view):x}-{value:08x}"
        self.wait_turn(number)
        with self._turn:
            if self._failure is not None:
                raise self._broken()
            if number in self._parts:
                if self._parts[number][0] == tag:
                    return tag
                raise UnsupportedError(f"{self._store.url} cannot replace a part", mend="begin it again")
            try:
                with self._store.translated(self.key):
                    self._file.write(bytes(view))  # the caller's memory is used again
            except BaseException as error:
                self._failure = error  # how much of it has arrived is not known
                self._turn.notify_all()
                raise self._broken() from error
            self._parts[number] = tag, len(view)
            self._turn.notify_all()
        return tag

    def wait_turn(self, number: int) -> None:
        with self._turn:
            while len(self._parts) + 1 < number and self._failure is None:
                self._turn.wait()

    def give_up(self) -> None:
        """A part will not come: those that wait for it need not."""
        with self._turn:
            self._failure = self._failure or StoreError("a part did not come")
            self._turn.notify_all()

    def parts(self) -> dict[int, tuple[str, int]]:
        with self._turn:
            return dict(self._parts)

    def complete(
        self, tags: dict[int, str], *, if_absent: bool = False, if_match: str | None = None
    ) -> ObjectInfo:
        store = self._store
        if if_absent or if_match is not None:
            raise UnsupportedError(f"{store.url} has no conditional uploads", mend="write the object whole")
        if tags != {number: tag for number, (tag, _) in self._parts.items()}:
            raise ConflictError(f"the parts of {store.url}/{self.key} are others", mend="begin it again")
        if self._failure is not None:
            raise self._broken()
        if _live.pop(self.upload_id, None) is not None:
            with store.translated(self.key):
                self._file.close()
                if store.moves:
                    path = store.full_path(self.key)
                    store.fs.makedirs(store.fs._parent(path), exist_ok=True)
                    store.replace(self._target, path)
        return store.checked(self.key, self._size)

    def abort(self) -> None:
        if _live.pop(self.upload_id, None) is None:
            return
        self.give_up()
        # What is not closed is not visible; the rest is tidying.
        with contextlib.suppress(Exception), self._store.translated(self.key):
            if self._store.moves:
                self._file.close()
                self._store.fs.rm_file(self._target)
            else:
                self._file.closed = True  # without the last block, which would make it visible
                self._file.discard()

    def _broken(self) -> StoreError:
        return StoreError(
            f"the upload of {self._store.url}/{self.key} broke off: {self._failure}",
            mend="run again: it begins anew",
        )
