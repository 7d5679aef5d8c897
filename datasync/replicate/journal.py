"""The journal of a run: what it has finished, kept at the destination so that any machine can go on.

    _datasync/journal/<token>-<part>-<n>.jsonl        one record a line, a file a flush

    {"done": key, "bytes": n, "sha256": hex, "crc32c": n, "tag": source tag or null, "adopted": bool}
    {"upload": key, "id": upload id, "bytes": n, "part_bytes": n, "sha256": hex or null}
    {"part": key, "id": upload id, "number": n, "tag": tag, "crc32c": n}
    {"dropped": key, "id": upload id}
    {"removed": key}

    _datasync/journal/<token>-keys-<n>.json           what the run set out to write, before it wrote any of it

Files are never rewritten, so a kill at any instant leaves whole ones. Records are collected and flushed
every few seconds; the start of an upload at once, since its id is what lets a later run adopt or abort it.
What was finished after the last flush is found by looking: an object that is in place without a record is
checked where it is, not sent again; it is this tool's own if a run had set out to write it. The journal goes
when its run has published, and outlives a run that did not.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from datasync.errors import StoreError
from datasync.replicate.layout import JOURNAL
from datasync.replicate.retry import retrying
from datasync.storage.base import Store
from datasync.storage.retry import inheriting

log = logging.getLogger(__name__)

_SOONEST, _LATEST = 1.0, 20.0
_KEYS, _KEYS_A_FILE = "-keys-", 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """An object that is finished at the destination."""

    bytes: int
    sha256: str
    crc32c: int | None
    tag: str | None = None
    adopted: bool = False


@dataclass(slots=True, kw_only=True)
class Begun:
    """An upload that was begun: its parts so far, number -> (tag, crc32c)."""

    key: str
    upload_id: str
    bytes: int
    part_bytes: int
    sha256: str | None
    parts: dict[int, tuple[str, int]] = field(default_factory=dict)


@dataclass(slots=True)
class Past:
    """What the journal files of earlier runs say."""

    done: dict[str, Done] = field(default_factory=dict)
    uploads: dict[str, Begun] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)


def replay(lines: list[dict[str, Any]], past: Past) -> None:
    """Add records, in the order in which they were written, to `past`. Pure."""
    for line in lines:
        if "done" in line:
            past.done[line["done"]] = Done(
                bytes=line["bytes"],
                sha256=line["sha256"],
                crc32c=line["crc32c"],
                tag=line.get("tag"),
                adopted=bool(line.get("adopted")),
            )
            for upload_id in [i for i, begun in past.uploads.items() if begun.key == line["done"]]:
                del past.uploads[upload_id]
        elif "upload" in line:
            past.uploads[line["id"]] = Begun(
                key=line["upload"],
                upload_id=line["id"],
                bytes=line["bytes"],
                part_bytes=line["part_bytes"],
                sha256=line["sha256"],
            )
        elif "part" in line and line["id"] in past.uploads:
            past.uploads[line["id"]].parts[line["number"]] = line["tag"], line["crc32c"]
        elif "dropped" in line:
            past.uploads.pop(line["id"], None)
        elif "removed" in line:
            past.done.pop(line["removed"], None)


def load(store: Store) -> Past:
    """What earlier runs at this place have left; an unreadable line ends its file."""
    past = Past()
    for info in store.list(JOURNAL):
        past.files.append(info.key)
        if _KEYS in info.key:
            continue
        for text in store.read(info.key).splitlines():
            try:
                replay([json.loads(text)], past)
            except (ValueError, TypeError, KeyError, AttributeError):
                log.warning("%s/%s is damaged; its objects are looked at again", store.url, info.key)
                break
    return past


def set_out(store: Store) -> Iterator[list[str]]:
    """Keys that runs which have not published set out to write, some thousands at a time."""
    for info in retrying(lambda: list(store.list(JOURNAL))):
        if _KEYS in info.key:
            data = retrying(lambda key=info.key: store.read(key))  # type: ignore[misc]  # bound now
            try:
                yield [str(key) for key in json.loads(data)]
            except (ValueError, TypeError):
                log.warning("%s/%s is damaged; what it names is taken for others'", store.url, info.key)


class Journal:
    """Writes records; thread-safe.

    Args:
        store (Store): The destination.
        token (int): Fencing token of the run, which names its files.
        part (int): Which of several writers of one run this is. Default: ``0``.
    """

    def __init__(self, store: Store, token: int, *, part: int = 0) -> None:
        self.store = store
        self.token = token
        self._part = part
        self._lines: list[str] = []
        self._files: list[str] = []
        self._number = 0
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._stop = threading.Event()
        self._began = time.monotonic()
        self._thread: threading.Thread | None = None

    def set_out(self, keys: Iterator[str]) -> None:
        """Record what the run is about to write, on the store before this returns.

        Raises:
            StoreError: It could not be written.
        """
        while some := list(itertools.islice(keys, _KEYS_A_FILE)):
            name = f"{JOURNAL}{self.token:08d}{_KEYS}{len(self._files):06d}.json"
            data = json.dumps(some, ensure_ascii=False).encode()
            retrying(lambda name=name, data=data: self.store.write(name, data))  # type: ignore[misc]  # bound now
            self._files.append(name)

    def done(self, key: str, done: Done) -> None:
        record = {"done": key, "bytes": done.bytes, "sha256": done.sha256, "crc32c": done.crc32c}
        self._add({**record, "tag": done.tag, "adopted": done.adopted})

    def upload(self, begun: Begun) -> None:
        """Record the start of an upload, on the store before this returns."""
        self._add(
            {
                "upload": begun.key,
                "id": begun.upload_id,
                "bytes": begun.bytes,
                "part_bytes": begun.part_bytes,
                "sha256": begun.sha256,
            }
        )
        self.flush()

    def part(self, key: str, upload_id: str, number: int, tag: str, crc32c: int) -> None:
        self._add({"part": key, "id": upload_id, "number": number, "tag": tag, "crc32c": crc32c})

    def dropped(self, key: str, upload_id: str) -> None:
        self._add({"dropped": key, "id": upload_id})

    def removed(self, keys: Iterable[str]) -> None:
        """Record that finished objects are about to go, on the store before this returns."""
        for key in keys:
            self._add({"removed": key})
        self.flush()

    def flush(self) -> None:
        """Write what was collected; on failure it is kept for the next time."""
        with self._writing:
            with self._lock:
                lines, self._lines = self._lines, []
            if not lines:
                return
            name = f"{JOURNAL}{self.token:08d}-{self._part:04d}-{self._number:06d}.jsonl"
            try:
                self.store.write(name, "".join(lines).encode())
            except BaseException:
                with self._lock:
                    self._lines = lines + self._lines
                raise
            self._number += 1
            self._files.append(name)

    def close(self) -> None:
        """Stop flushing and write the rest."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.flush()

    def clear(self, past: Past) -> None:
        """Remove every file, the earlier runs' too: what they say is in the manifest now."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._lines = []
        # Listed again: other writers of this run may have added theirs.
        self.store.delete(
            sorted({*past.files, *self._files, *(info.key for info in self.store.list(JOURNAL))})
        )

    def _add(self, record: dict[str, Any]) -> None:
        with self._lock:
            self._lines.append(json.dumps(record, ensure_ascii=False) + "\n")
            if self._thread is None:
                flush = inheriting(self._flush_loop)
                self._thread = threading.Thread(target=flush, name="journal", daemon=True)
                self._thread.start()

    def _flush_loop(self) -> None:
        # A run of hours has no more files than one of minutes has lines of sight: the pause grows with it.
        while not self._stop.wait(min(max(_SOONEST, (time.monotonic() - self._began) / 50), _LATEST)):
            try:
                self.flush()
            except StoreError as error:
                log.warning(
                    "the journal at %s could not be written and will be tried again: %s",
                    self.store.url,
                    error,
                )
