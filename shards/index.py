"""`index.json`: which shards a dataset has, how large they are, and what their bytes must hash to.

    {"version": 2, "shards": [entry, …], "datasync": {…}}

The index is the only pointer to a dataset's data (invariant 1) and comes from places that nobody vouches for
(invariant 10): names that would leave the dataset, sizes that cannot be, and versions from the future are
refused here, by name, so that no other code has to look.

What we write carries `sha256` and `xxh3_64` of every file that is stored, and `xxh3_64` of what a compressed
shard becomes: the first proves identity, the second is checked before a shard is used. Entries hold exactly
the keys that MosaicML's reader accepts; ours are in the one top-level key `datasync`.

An index of a million shards stays cheap: its text is scanned once and kept, an entry becomes an object when
it is asked for.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, overload

import numpy as np

from shards.errors import FormatError

VERSION = 2
BASENAME = "index.json"
EXTRA_KEY = "datasync"

_U32 = 1 << 32
# Parts between slashes: none empty, none a dot or two, no backslash and no NUL.
_NAME = re.compile(r"(?!\.\.?(?:/|\Z))[^/\\\0]+(?:/(?!\.\.?(?:/|\Z))[^/\\\0]+)*", re.DOTALL)
_NEWER = "install a newer datasync"
_DAMAGED = "fetch the index again, or write the dataset again"


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file of a shard.

    Args:
        basename (str): Relative to the dataset, '/'-separated.
        bytes (int): Its size.
        hashes (Mapping[str, str]): Algorithm -> hexadecimal digest.
    """

    basename: str
    bytes: int
    hashes: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As in the index."""
        return {"basename": self.basename, "bytes": self.bytes, "hashes": dict(self.hashes)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInfo:
    """One shard.

    Args:
        samples (int): How many samples it holds.
        size_limit (int | None): Bytes that its writer would not exceed.
        compression (str | None): Such as ``zstd:3``; None where it is stored raw.
        hashes (tuple[str, ...]): Names of the algorithms used.
        column_names (tuple[str, ...]): In the order of the bytes.
        column_encodings (tuple[str, ...]): One a column.
        column_sizes (tuple[int | None, ...]): Bytes of a value where all have the same; one a column.
        raw (FileInfo): The uncompressed file.
        zip (FileInfo | None): The compressed file, where there is one.
    """

    samples: int
    size_limit: int | None
    compression: str | None
    hashes: tuple[str, ...]
    column_names: tuple[str, ...]
    column_encodings: tuple[str, ...]
    column_sizes: tuple[int | None, ...]
    raw: FileInfo
    zip: FileInfo | None

    @property
    def stored(self) -> FileInfo:
        """The file that the dataset holds: the compressed one where there is one."""
        return self.raw if self.zip is None else self.zip

    @property
    def columns(self) -> dict[str, str]:
        """Column -> encoding."""
        return dict(zip(self.column_names, self.column_encodings, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """The entry of the index."""
        return {
            "column_encodings": list(self.column_encodings),
            "column_names": list(self.column_names),
            "column_sizes": list(self.column_sizes),
            "compression": self.compression,
            "format": "mds",
            "hashes": list(self.hashes),
            "raw_data": self.raw.to_dict(),
            "samples": self.samples,
            "size_limit": self.size_limit,
            "version": VERSION,
            "zip_data": None if self.zip is None else self.zip.to_dict(),
        }

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any], *, where: str = "shard entry") -> ShardInfo:
        """Read an entry of an index; `FormatError` naming `where` if it is not sound."""
        _check_entry(entry, where)
        _check_columns(entry, where)
        zipped = entry.get("zip_data")
        return cls(
            samples=entry["samples"],
            size_limit=_size_limit(entry.get("size_limit"), where),
            compression=entry.get("compression"),
            hashes=tuple(entry.get("hashes") or ()),
            column_names=tuple(entry["column_names"]),
            column_encodings=tuple(entry["column_encodings"]),
            column_sizes=tuple(entry["column_sizes"]),
            raw=_file(entry["raw_data"]),
            zip=None if zipped is None else _file(zipped),
        )


class Index:
    """The shards of a dataset, in order.

    Args:
        shards (Iterable[ShardInfo]): One after another.
        extra (Mapping[str, Any] | None): The `datasync` key. Default: ``None``.
    """

    def __init__(self, shards: Iterable[ShardInfo], extra: Mapping[str, Any] | None = None) -> None:
        self.shards: Sequence[ShardInfo] = tuple(shards)
        self.extra: dict[str, Any] = dict(extra or {})
        self.sizes: np.ndarray[Any, np.dtype[np.int64]] = np.array([s.samples for s in self.shards], np.int64)

    @property
    def samples(self) -> int:
        """Samples of the whole dataset."""
        return int(self.sizes.sum())

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the shards in order: names, sizes, digests, samples, columns."""
        digest = hashlib.sha256()
        for info in self.shards:
            file = info.stored
            columns = _columns_text(info.column_names, info.column_encodings)
            _fold(digest, file.basename, file.bytes, file.hashes, info.samples, columns)
        return digest.hexdigest()

    @property
    def columns(self) -> dict[str, str]:
        """Column -> encoding of the first shard; empty where there is none."""
        return self.shards[0].columns if len(self.shards) else {}

    def dumps(self) -> bytes:
        """The text of `index.json`: one shard a line, the same for the same content."""
        lines = ",\n".join(json.dumps(info.to_dict(), sort_keys=True) for info in self.shards)
        extra = f'"{EXTRA_KEY}": {json.dumps(self.extra, sort_keys=True)},\n' if self.extra else ""
        return f'{{{extra}"shards": [\n{lines}\n],\n"version": {VERSION}}}\n'.encode()

    @classmethod
    def parse(cls, data: bytes | str, *, where: str) -> Index:
        """Read the text of an index.

        Args:
            data (bytes | str): The text.
            where (str): Its path or URL, for messages.

        Raises:
            FormatError: It is no index, is from a newer version, or has an entry that is not sound.
        """
        try:
            text = data if isinstance(data, str) else str(data, "utf-8")
            return cls._scan(text, where)
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise FormatError(f"{where} is no JSON: {error}", mend=_DAMAGED) from error

    @classmethod
    def _scan(cls, text: str, where: str) -> Index:
        scan = _Scan(text, where)
        top = scan.run()
        _check_version(top.get("version"), where)
        if not scan.found:
            raise FormatError(
                f"{where} has no list of shards", mend="is it the index.json of an MDS dataset?"
            )
        extra = top.get(EXTRA_KEY)
        index = cls((), extra if isinstance(extra, dict) else None)
        index.shards = _LazyShards(text, scan.spans, where)
        index.sizes = np.array(scan.samples, np.int64)
        index.__dict__["fingerprint"] = scan.digest.hexdigest()
        return index


def merge(parts: Iterable[tuple[str, Index]]) -> Index:
    """One index over several, each in a folder of its own below the merged dataset.

    Args:
        parts (Iterable[tuple[str, Index]]): Folder relative to the merged dataset ('' for its root, nested
            folders '/'-separated) and the index found there.
    """
    shards: list[ShardInfo] = []
    for folder, index in parts:
        prefix = folder.strip("/")
        for info in index.shards:
            shards.append(_moved(info, prefix) if prefix else info)
    return Index(shards)


def _moved(info: ShardInfo, prefix: str) -> ShardInfo:
    from dataclasses import replace

    files = [
        None if f is None else replace(f, basename=f"{prefix}/{f.basename}") for f in (info.raw, info.zip)
    ]
    for file in files:
        if file is not None:
            check_basename(file.basename, where=f"merged index, folder {prefix!r}")
    raw, zipped = files
    assert raw is not None
    return replace(info, raw=raw, zip=zipped)


def check_basename(name: object, *, where: str) -> str:
    """Return a file's name if it stays below its dataset; else `FormatError` naming `where`."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise FormatError(
            f"{where}: the file name {name!r} leaves the dataset or is no name",
            mend="do not use this index; get it from someone you trust",
        )
    return name


class _Scan:
    """One walk over the text of an index: checks every entry, keeps where each stands."""

    def __init__(self, text: str, where: str) -> None:
        self.text = text
        self.where = where
        self.found = False
        self.spans = array("q")
        self.samples = array("q")
        self.digest = hashlib.sha256()
        self._decode = json.JSONDecoder().raw_decode
        self._at = 0
        self._seen: dict[tuple[tuple[Any, ...], ...], str] = {}

    def run(self) -> dict[str, Any]:
        """The top-level keys other than `shards`."""
        top: dict[str, Any] = {}
        self._expect("{")
        while self._peek() != "}":
            key = self._value()
            self._expect(":")
            if key == "shards" and self._peek() == "[":
                self.found = True
                self._shards()
            else:
                top[str(key)] = self._value()
            if not self._more("}"):
                break
        self._expect("}")
        if self._peek():
            raise json.JSONDecodeError("extra text after the index", self.text, self._at)
        return top

    def _shards(self) -> None:
        self._expect("[")
        while self._peek() != "]":
            start = self._at
            entry = self._value()
            self._entry(entry, f"{self.where}, shard {len(self.samples)}")
            self.spans.append(start)
            self.spans.append(self._at)
            if not self._more("]"):
                break
        self._expect("]")

    def _entry(self, entry: Any, where: str) -> None:
        _check_entry(entry, where)
        file = entry.get("zip_data") or entry["raw_data"]
        columns = self._columns(entry, where)
        _fold(
            self.digest, file["basename"], file["bytes"], file.get("hashes") or {}, entry["samples"], columns
        )
        self.samples.append(entry["samples"])

    def _columns(self, entry: dict[str, Any], where: str) -> str:
        """The text of an entry's columns; nearly all entries have the same, which are checked once."""
        try:
            key = (
                tuple(entry["column_names"]),
                tuple(entry["column_encodings"]),
                tuple(entry["column_sizes"]),
            )
            return self._seen[key]
        except (KeyError, TypeError):
            _check_columns(entry, where)
            key = (
                tuple(entry["column_names"]),
                tuple(entry["column_encodings"]),
                tuple(entry["column_sizes"]),
            )
            return self._seen.setdefault(key, _columns_text(*key[:2]))

    def _peek(self) -> str:
        text, at = self.text, self._at
        while at < len(text) and text[at] in " \t\r\n":
            at += 1
        self._at = at
        return text[at : at + 1]

    def _expect(self, char: str) -> None:
        if self._peek() != char:
            raise json.JSONDecodeError(f"expected {char!r}", self.text, self._at)
        self._at += 1

    def _more(self, end: str) -> bool:
        """Step over a comma; False before the end of the object or list."""
        if self._peek() == end:
            return False
        self._expect(",")
        if self._peek() == end:
            raise json.JSONDecodeError("a comma with nothing after it", self.text, self._at)
        return True

    def _value(self) -> Any:
        self._peek()
        value, self._at = self._decode(self.text, self._at)
        return value


class _LazyShards(Sequence[ShardInfo]):
    """Entries of an index that become objects when they are asked for."""

    def __init__(self, text: str, spans: array[int], where: str) -> None:
        self._text = text
        self._spans = spans
        self._where = where

    def __len__(self) -> int:
        return len(self._spans) // 2

    @overload
    def __getitem__(self, index: int) -> ShardInfo: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[ShardInfo]: ...

    def __getitem__(self, index: int | slice) -> ShardInfo | Sequence[ShardInfo]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = index + len(self) if index < 0 else index
        if not 0 <= i < len(self):
            raise IndexError(f"shard {index} of {len(self)}")
        entry = json.loads(self._text[self._spans[2 * i] : self._spans[2 * i + 1]])
        return ShardInfo.from_dict(entry, where=f"{self._where}, shard {i}")

    def __iter__(self) -> Iterator[ShardInfo]:
        return (self[i] for i in range(len(self)))


def _fold(digest: Any, name: str, size: int, hashes: Mapping[str, str], samples: int, columns: str) -> None:
    digest.update(json.dumps([name, size, sorted(hashes.items()), samples]).encode())
    digest.update(columns.encode())


def _columns_text(names: Sequence[str], encodings: Sequence[str]) -> str:
    return json.dumps(sorted(zip(names, encodings, strict=True)))


def _check_version(version: object, where: str) -> None:
    if type(version) is int and version == VERSION:
        return
    if type(version) is int and version > VERSION:
        raise FormatError(
            f"{where} is of version {version}; this datasync reads version {VERSION}", mend=_NEWER
        )
    raise FormatError(
        f"{where} has version {version!r}, expected {VERSION}", mend="write the dataset again as MDS"
    )


def _check_entry(entry: Any, where: str) -> None:
    """Refuse an entry that is not sound; everything later relies on it."""
    if not isinstance(entry, dict):
        raise FormatError(f"{where} is no object", mend=_DAMAGED)
    if entry.get("format") != "mds":
        form = entry.get("format")
        by_hand = form in ("json", "csv", "tsv")
        raise FormatError(
            f"{where} has the format {form!r}, not mds",
            mend=f"convert its shards: datasync shard 'FOLDER/shard.*.{form}' OUT" if by_hand else _DAMAGED,
        )
    _check_version(entry.get("version"), where)
    _check_number(entry.get("samples"), where, "samples")
    _check_file(entry.get("raw_data"), where, "raw_data")
    compression = entry.get("compression")
    if (compression is None) != (entry.get("zip_data") is None):
        raise FormatError(f"{where}: compression and zip_data do not go together", mend=_DAMAGED)
    if compression is not None:
        if not isinstance(compression, str):
            raise FormatError(f"{where}: compression is {compression!r}", mend=_DAMAGED)
        _check_file(entry["zip_data"], where, "zip_data")


def _check_columns(entry: Mapping[str, Any], where: str) -> None:
    lists = [entry.get(key) for key in ("column_names", "column_encodings", "column_sizes")]
    names, encodings, sizes = lists
    if not (isinstance(names, list) and isinstance(encodings, list) and isinstance(sizes, list)):
        raise FormatError(f"{where} has no lists of columns", mend=_DAMAGED)
    if not len(names) == len(encodings) == len(sizes):
        raise FormatError(f"{where}: the lists of columns differ in length", mend=_DAMAGED)
    if not all(isinstance(text, str) for text in (*names, *encodings)) or len(set(names)) != len(names):
        raise FormatError(f"{where}: column names and encodings must be text, each name once", mend=_DAMAGED)
    for name, size in zip(names, sizes, strict=True):
        if size is not None:
            _check_number(size, where, f"the size of column {name!r}")


def _check_file(file: Any, where: str, key: str) -> None:
    if not isinstance(file, dict):
        raise FormatError(f"{where}: {key} is no object", mend=_DAMAGED)
    check_basename(file.get("basename"), where=where)
    _check_number(file.get("bytes"), where, "bytes")
    hashes = file.get("hashes")
    if hashes is None:
        return
    if not isinstance(hashes, dict) or any(type(digest) is not str for digest in hashes.values()):
        raise FormatError(f"{where}: hashes of {key} must be digests by algorithm", mend=_DAMAGED)


def _check_number(value: object, where: str, what: str) -> None:
    if type(value) is not int or not 0 <= value < _U32:
        raise FormatError(
            f"{where}: {what} is {value!r}, expected a whole number below {_U32:,}", mend=_DAMAGED
        )


def _file(file: Mapping[str, Any]) -> FileInfo:
    return FileInfo(file["basename"], file["bytes"], dict(file.get("hashes") or {}))


def _size_limit(value: Any, where: str) -> int | None:
    from shards.sizes import parse_bytes

    if value is None:
        return None
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise FormatError(f"{where}: size_limit is {value!r}", mend=_DAMAGED) from error
