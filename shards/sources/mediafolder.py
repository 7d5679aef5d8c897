"""Folders of images, of audio or of video, with what is said about each file.

A row has the file's original bytes in the column `image`, `audio` or `video`, its name in `file_name`, and

    a metadata file       metadata.jsonl, .csv or .parquet in a folder, with a column `file_name` relative to
                          that folder: its other columns, and only the files that it names, in its order
    else a text beside    x.txt (or x.caption) for x.png: the column `caption`
    else subfolders       the name of the folder that holds the file: the column `label`

A file that the metadata names and that is not there is refused, and so is one without a text beside it where
others have one.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

from shards import media
from shards.errors import UsageError
from shards.progress import format_count
from shards.sources.base import (
    Bad,
    Item,
    Row,
    Source,
    SourceOptions,
    Task,
    content_error,
    group,
    other_kinds,
    reason,
)
from shards.sources.files import FileList, suffix
from shards.sources.jsonl import parse_row
from shards.sources.streams import lines, open_stream

_METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
_SIDECARS = (".txt", ".caption")
_MAX_FILE = (1 << 32) - 1
_ROW_OVERHEAD = 256

# How files of a kind begin, for finding out columns without reading any.
_TYPICAL = {
    ".png": b"\x89PNG\r\n\x1a\n",
    "image": b"\xff\xd8\xff",
    "audio": b"fLaC",
    "video": b"\0\0\0\x18ftypisom",
}


class Entry(NamedTuple):
    """One line of a metadata file: which, as JSON, and the file that it names."""

    number: int
    data: bytes
    file: int


class Folder(NamedTuple):
    """A task: media files, and for each what is said about it."""

    files: FileList
    texts: FileList | None = None  # the texts beside them
    beside: tuple[bool, ...] = ()  # which of the files has one
    labels: bool = False
    metadata: str = ""
    entries: tuple[tuple[int, bytes, int], ...] = ()  # line, JSON, number of the file or -1


class MediaFolder(Source):
    """What image, audio and video folders have in common."""

    kind: ClassVar[str]
    marked = True
    checks = True
    takes = frozenset({"caption"})

    def __init__(self, files: FileList, options: SourceOptions) -> None:
        super().__init__(files, options)
        self._notes: list[str] = []

    @classmethod
    def claims(cls, files: FileList) -> bool:
        """Our files are most of what is there, the texts beside them and metadata aside."""
        ours = sum(files.suffix(number) in cls.extensions for number in range(len(files)))
        return ours > 0 and 2 * ours >= sum(
            files.suffix(number) not in (*_SIDECARS, ".json") and not _is_metadata(files.names[number])
            for number in range(len(files))
        )

    @classmethod
    def separable(cls, files: FileList) -> bool:
        """Not where a metadata file says what there is."""
        return not any(map(_is_metadata, files.names))

    def tasks(self) -> Iterator[Task]:
        metadata = [number for number, name in enumerate(self.files.names) if _is_metadata(name)]
        if metadata:
            yield from self._by_metadata(metadata)
            return
        ours = self._media()
        texts = self._texts(ours)
        labels = not texts and any("/" in name for name in ours.names)
        for numbers, size in group(
            ours, self.options.target_bytes, size=lambda number: _weight(ours, number)
        ):
            own = ours.slice(numbers)
            if texts:
                found = [texts.get(_stem(name), -1) for name in own.names]
                beside = self.files.select([number for number in found if number >= 0])
                payload = Folder(own, beside, tuple(number >= 0 for number in found))
            else:
                payload = Folder(own, labels=labels)
            yield Task(payload=payload, bytes=size)

    def _media(self) -> FileList:
        """The media files: by extension, and files without one by their first bytes."""
        files, chosen, left_out = self.files, [], 0
        for number in range(len(files)):
            extension = files.suffix(number)
            if extension in self.extensions or (not extension and self._sniffs(number)):
                chosen.append(number)
            elif extension not in (*_SIDECARS, ".json"):
                left_out += 1
        self._notes = other_kinds(left_out)
        return files.select(chosen)

    def _sniffs(self, number: int) -> bool:
        try:
            with self.files.open(number) as file:
                return media.sniff(file.read(64)).startswith(self.kind)
        except OSError:
            return True  # a file that cannot be read is refused as a row, not passed over

    def _texts(self, ours: FileList) -> dict[str, int]:
        """Stem -> number of the text beside it; empty if no file has one."""
        texts = {
            _stem(name): number
            for number, name in enumerate(self.files.names)
            if self.files.suffix(number) in _SIDECARS
        }
        return texts if any(_stem(name) in texts for name in ours.names) else {}

    def _by_metadata(self, metadata: list[int]) -> Iterator[Task]:
        """Tasks over the lines of the metadata files."""
        numbers = self.files.index()
        named: set[int] = set()
        for number in metadata:
            entries: list[Entry] = []
            held = 0
            for entry in self._entries(number, numbers):
                named.add(entry.file)
                weight = len(entry.data) + (_weight(self.files, entry.file) if entry.file >= 0 else 0)
                if entries and held + weight > self.options.target_bytes:
                    yield self._task(number, entries, held)
                    entries, held = [], 0
                entries.append(entry)
                held += weight
            if entries:
                yield self._task(number, entries, held)
        unnamed = sum(
            self.files.suffix(number) in self.extensions and number not in named
            for number in range(len(self.files))
        )
        found = format_count(unnamed, "file")
        self._notes = [f"{found} that the metadata does not name left out"] if unnamed else []

    def _task(self, metadata: int, entries: list[Entry], size: int) -> Task:
        files = self.files.select([entry.file for entry in entries if entry.file >= 0])
        places = iter(range(len(files)))
        rows = tuple((entry.number, entry.data, next(places) if entry.file >= 0 else -1) for entry in entries)
        return Task(payload=Folder(files, metadata=self.files.names[metadata], entries=rows), bytes=size)

    def _entries(self, metadata: int, numbers: dict[str, int]) -> Iterator[Entry]:
        name = self.files.names[metadata]
        folder = name[: name.rfind("/") + 1]
        for number, data in _metadata_rows(self.files, metadata, self.options.max_line_bytes):
            row = parse_row(data, name, number)
            file = row.values.get("file_name") if isinstance(row, Row) else None
            yield Entry(number, data, numbers.get(f"{folder}{file}", -1) if isinstance(file, str) else -1)

    def notes(self) -> list[str]:
        return self._notes

    def peek(self, payload: Folder) -> Iterator[Item]:
        """Rows with the first bytes of a typical file in place of each file's own."""
        if not payload.metadata:
            for name in payload.files.names:
                text = b"" if payload.texts is not None else None
                yield self._values(name, self._typical(name), text, payload.labels)
            return
        for number, line, file in payload.entries:
            row = parse_row(line, payload.metadata, number)
            if isinstance(row, Row) and file >= 0:
                row.values[self.kind] = self._typical(payload.files.names[file])
            yield row

    def _typical(self, name: str) -> bytes:
        return _TYPICAL.get(suffix(name), _TYPICAL[self.kind])

    def read(self, payload: Folder) -> Iterator[Item]:
        return self._read_metadata(payload) if payload.metadata else self._read_files(payload)

    def _read_files(self, folder: Folder) -> Iterator[Item]:
        captions = folder.texts.read_each(limit=_MAX_FILE) if folder.texts is not None else None
        for number, data in folder.files.read_each(limit=_MAX_FILE):
            name = folder.files.names[number]
            text: bytes | Exception | None = None
            if captions is not None:
                missing = ValueError(f"no text beside it: {_stem(name)}.txt is not there")
                text = next(captions)[1] if folder.beside[number] else missing
            problem = next((part for part in (data, text) if isinstance(part, Exception)), None)
            if problem is not None:
                yield Bad(reason(problem), name)
            else:
                assert isinstance(data, bytes)
                yield self._row(name, data, text if isinstance(text, bytes) else None, folder.labels)

    def _row(self, name: str, data: bytes, text: bytes | None, labels: bool) -> Item:
        try:
            media.check(data, self.kind, level=self.options.check)
        except media.MediaError as error:
            return Bad(reason(error), name, data=data[:64])
        return self._values(name, data, text, labels)

    def _values(self, name: str, data: bytes, text: bytes | None, labels: bool) -> Item:
        values: dict[str, Any] = {self.kind: data, "file_name": name}
        if text is not None:
            try:
                values[self.options.caption] = text.decode("utf-8-sig").strip()
            except UnicodeDecodeError as error:
                return Bad(f"the text beside it is not UTF-8: {error.reason} at byte {error.start}", name)
        if labels:
            values["label"] = name.split("/")[-2] if "/" in name else ""
        return Row(values, name, key=name)

    def _read_metadata(self, folder: Folder) -> Iterator[Item]:
        contents = folder.files.read_each(limit=_MAX_FILE)
        for number, line, file in folder.entries:
            row = parse_row(line, folder.metadata, number)
            data = next(contents)[1] if file >= 0 else None
            if isinstance(row, Bad):
                yield row
            elif data is None:
                said = row.values.get("file_name")
                why = f"no such file: {said}" if isinstance(said, str) else "it has no file_name"
                yield Bad(why, folder.metadata, number, line[:4096])
            elif isinstance(data, Exception):
                yield Bad(reason(data), folder.files.names[file])
            else:
                item = self._row(folder.files.names[file], data, None, False)
                yield item._replace(values={**row.values, self.kind: data}) if isinstance(item, Row) else item


class ImageFolder(MediaFolder):
    """A folder of images."""

    name = "images"
    summary = "folder of images, captions by metadata file, by text beside, by folder name"
    extensions = media.IMAGE_EXTENSIONS
    kind = "image"


class AudioFolder(MediaFolder):
    """A folder of audio files."""

    name = "audio"
    summary = "folder of audio files, transcripts likewise"
    extensions = media.AUDIO_EXTENSIONS
    kind = "audio"


class VideoFolder(MediaFolder):
    """A folder of videos."""

    name = "video"
    summary = "folder of videos, captions likewise"
    extensions = media.VIDEO_EXTENSIONS
    kind = "video"


def _is_metadata(name: str) -> bool:
    return name[name.rfind("/") + 1 :] in _METADATA


def _stem(name: str) -> str:
    """A name without its extension."""
    return name[: name.rfind(".")] if "." in name[name.rfind("/") + 1 :] else name


def _weight(files: FileList, number: int) -> int:
    return max(int(files.sizes[number]), 0) + _ROW_OVERHEAD


def _metadata_rows(files: FileList, number: int, limit: int) -> Iterator[tuple[int, bytes]]:
    """The rows of a metadata file as JSON, each with its number; a UsageError if it cannot be read."""
    name = files.names[number]
    try:
        if name.endswith(".parquet"):
            yield from _parquet_rows(files, number)
            return
        with open_stream(files, number) as stream:
            if name.endswith(".csv"):
                yield from _csv_rows(io.TextIOWrapper(stream, encoding="utf-8-sig", newline=""))
            else:
                for line in lines(stream, limit=limit):
                    if line.data.strip():
                        yield line.number, line.data.removeprefix(b"\xef\xbb\xbf")
    except Exception as error:
        if not content_error(error):
            raise
        raise UsageError(f"cannot read {name}: {reason(error)}", mend="mend the metadata file") from error


def _csv_rows(text: io.TextIOWrapper) -> Iterator[tuple[int, bytes]]:
    reader = csv.DictReader(text, strict=True)
    for row in reader:
        row.pop(None, None)  # where csv puts fields that have no header
        yield reader.line_num, json.dumps(row, ensure_ascii=False).encode()


def _parquet_rows(files: FileList, number: int) -> Iterator[tuple[int, bytes]]:
    import pyarrow.parquet as pq

    with files.open(number) as file:
        count = 0
        for batch in pq.ParquetFile(file).iter_batches():
            for row in batch.to_pylist():
                count += 1
                yield count, json.dumps(row, ensure_ascii=False, default=str).encode()
