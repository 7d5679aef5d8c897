"""Multipart uploads into a folder.

    <root>/.datasync-tmp/<host>-upload-<uuid>/
        upload.json          the key, the size, when it began
        data                 the object, each part written at its offset
        part-<number>        the tag of a part that is whole: its bytes and CRC-32C

A part's tag file is made after the part's bytes, so a killed process leaves only whole parts behind; `parts`
reads them back against their tags all the same, because after a power failure the order on disk is not known.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from datasync.errors import CorruptError, NotFoundError, StoreError
from datasync.storage.base import Buffer, ObjectInfo, UploadInfo
from datasync.storage.local_errors import translated
from datasync.storage.temp import UPLOAD_MARK
from shards.digests import crc32c as crc32c_of

if TYPE_CHECKING:
    from datasync.storage.local import LocalStore

PART_BYTES = 16 << 20
_READ = 4 << 20


class LocalUpload:
    """One object on its way into a folder; see `datasync.storage.base.Upload`."""

    part_bytes = PART_BYTES

    def __init__(self, store: LocalStore, key: str, upload_id: str, size: int) -> None:
        self.key = key
        self.upload_id = upload_id
        self._store = store
        self._size = size
        self._folder = os.path.join(store.temp_path, upload_id)

    @classmethod
    def begin(cls, store: LocalStore, key: str, size: int) -> LocalUpload:
        with translated(store.url, key):
            folder = store.new_upload_folder()
            with open(os.path.join(folder, "data"), "wb"):
                pass
            meta = {"key": key, "bytes": size, "started": time.time()}
            with open(os.path.join(folder, "upload.json"), "w") as file:
                json.dump(meta, file)
        return cls(store, key, os.path.basename(folder), size)

    @classmethod
    def resume(cls, store: LocalStore, key: str, upload_id: str, size: int) -> LocalUpload:
        upload = cls(store, key, upload_id, size)
        found = _meta(upload._folder) if os.path.basename(upload_id) == upload_id else None
        if found is None or found["key"] != key:
            raise NotFoundError(f"no upload {upload_id} of {key} at {store.url}", mend="begin it again")
        if size and found["bytes"] != size:
            raise StoreError(
                f"upload {upload_id} of {key} at {store.url} is for {found['bytes']} bytes, not {size}",
                mend="abort it and begin again",
            )
        return upload

    def put(self, number: int, data: Buffer, *, crc32c: int | None = None) -> str:
        from datasync.storage.local import check_crc32c, write_all

        view = memoryview(data).cast("B")
        where = f"{self._store.url}/{self.key} part {number}"
        if number < 1 or len(view) > self.part_bytes:
            raise StoreError(f"{where}: parts count from 1 and have at most {self.part_bytes} bytes")
        if crc32c is not None:
            check_crc32c(view, crc32c, where=where)
        tag = f"{len(view):x}-{crc32c if crc32c is not None else crc32c_of(view):08x}"
        with translated(self._store.url, self.key):
            mark = os.path.join(self._folder, f"part-{number}")
            with contextlib.suppress(FileNotFoundError):
                os.unlink(mark)
            with open(os.path.join(self._folder, "data"), "r+b") as file:
                write_all(file.fileno(), view, (number - 1) * self.part_bytes)
            with open(f"{mark}.new", "w") as file:
                file.write(tag)
            os.rename(f"{mark}.new", mark)
        return tag

    def wait_turn(self, number: int) -> None:
        """Parts go in any order."""

    def give_up(self) -> None:
        """Nothing waits for a part here."""

    def parts(self) -> dict[int, tuple[str, int]]:
        found = {}
        with translated(self._store.url, self.key), open(os.path.join(self._folder, "data"), "rb") as data:
            for name in os.listdir(self._folder):
                number = name.removeprefix("part-")
                if number == name or not number.isdigit():
                    continue
                with open(os.path.join(self._folder, name)) as file:
                    tag = file.read()
                size = int(tag.partition("-")[0], 16)
                if _tag_of(data.fileno(), (int(number) - 1) * self.part_bytes, size) == tag:
                    found[int(number)] = tag, size
        return dict(sorted(found.items()))

    def complete(
        self, tags: dict[int, str], *, if_absent: bool = False, if_match: str | None = None
    ) -> ObjectInfo:
        path = os.path.join(self._folder, "data")
        with translated(self._store.url, self.key):
            self._check_whole(tags)
            with open(path, "r+b") as file:
                info = self._store.publish(
                    file.fileno(), path, self.key, if_absent=if_absent, if_match=if_match
                )
        self.abort()
        return info

    def abort(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._store.tidy()

    def _check_whole(self, tags: dict[int, str]) -> None:
        """The parts must be those given, of full size but for the last, and add up to the object."""
        numbers = sorted(tags)
        total = 0
        for number in numbers:
            try:
                with open(os.path.join(self._folder, f"part-{number}")) as file:
                    tag = file.read()
            except FileNotFoundError:
                tag = "nothing"
            if tag != tags[number]:
                raise CorruptError(
                    f"part {number} of {self.key} at {self._store.url} is {tag}, expected {tags[number]}",
                    mend="send the part again",
                )
            size = int(tag.partition("-")[0], 16)
            if number != numbers[-1] and size != self.part_bytes:
                raise StoreError(
                    f"part {number} of {self.key} at {self._store.url} has {size} bytes: too few"
                )
            total += size
        if numbers != list(range(1, len(numbers) + 1)) or total != self._size:
            raise CorruptError(
                f"the parts of {self.key} at {self._store.url} give {total} bytes, expected {self._size}",
                mend="send the missing parts",
            )


def uploads(store: LocalStore, prefix: str) -> Iterator[UploadInfo]:
    """The uploads below a store's root that were begun and not completed, sorted by key."""
    try:
        names = os.listdir(store.temp_path)
    except (FileNotFoundError, NotADirectoryError):
        return
    found = []
    for name in names:
        meta = _meta(os.path.join(store.temp_path, name)) if UPLOAD_MARK in name else None
        if meta is not None and str(meta["key"]).startswith(prefix):
            found.append(
                UploadInfo(key=str(meta["key"]), upload_id=name, started=float(str(meta["started"])))
            )
    yield from sorted(found, key=lambda upload: (upload.key, upload.upload_id))


def _meta(folder: str) -> dict[str, object] | None:
    """What `upload.json` says, or None where the upload is gone or was never begun whole."""
    try:
        with open(os.path.join(folder, "upload.json")) as file:
            found = json.load(file)
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None
    return found if isinstance(found, dict) and {"key", "bytes", "started"} <= found.keys() else None


def _tag_of(fd: int, offset: int, size: int) -> str:
    """The tag of the bytes that are on disk."""
    value, done = 0, 0
    while done < size:
        piece = os.pread(fd, min(_READ, size - done), offset + done)
        if not piece:
            break
        value = crc32c_of(piece, value)
        done += len(piece)
    return f"{done:x}-{value:08x}"
