"""What a source of rows is: four methods, and the things that pass through them.

    claims(files)  ->  is this a corpus of mine?
    tasks()        ->  the corpus cut into tasks, by the input and the options alone (invariant 3)
    read(payload)  ->  the rows of one task, in order; runs in a worker process, on any machine
    columns()      ->  the columns, where the format itself says them; else they are inferred from rows

A source never decides what happens to a row that is bad: it yields `Bad` and goes on where it can. What it
raises is for the whole job: a store that does not answer, a file that changed under it.

A source of another package is found by the entry point group `datasync.sources` (see docs/shard.md).
"""

from __future__ import annotations

import errno
import lzma
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from shards.errors import DatasyncError

if TYPE_CHECKING:
    import pyarrow as pa

    from shards.sources.files import FileList


class Row(NamedTuple):
    """One row.

    Args:
        values (dict[str, Any]): Column -> str, int, float, bool, bytes, None, list, dict or array.
        file (str): Name of the file it came from, relative to the corpus.
        at (str | int): Where in that file: a line, a row, a member; empty where the file is the row.
        key (str | None): What identifies the row as the corpus grows, where known. Default: ``None``.
    """

    values: dict[str, Any]
    file: str
    at: str | int = ""
    key: str | None = None


class Bad(NamedTuple):
    """A row, or the rest of a file, that cannot be had.

    Args:
        reason (str): Why, in a few words.
        file (str): Name of the file, relative to the corpus.
        at (str | int): Where in that file. Default: all of it.
        data (bytes): What was there, as far as it is known and small. Default: ``b""``.
    """

    reason: str
    file: str
    at: str | int = ""
    data: bytes = b""

    @property
    def where(self) -> str:
        """File and place: ``kjv.jsonl:12``."""
        return where(self.file, self.at)


class Table(NamedTuple):
    """Many rows in columns, so that they can reach a shard without a Python object for each value.

    Args:
        batch (pyarrow.RecordBatch): The rows.
        file (str): Name of the file they came from.
        first (int): Number of the first of them in that file.
    """

    batch: pa.RecordBatch
    file: str
    first: int


Item = Row | Bad | Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A piece of work that gives the same shards wherever and whenever it runs.

    Args:
        payload (Any): What `Source.read` needs; pickled to the worker.
        bytes (int): Input bytes, for progress and for balance; may be an estimate.
    """

    payload: Any
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """What a source may be told.

    Args:
        target_bytes (int): About how many bytes of rows a task should hold: one shard's worth.
        columns (tuple[str, ...] | None): Read only these columns, where the format can. Default: all.
        media (Mapping[str, str]): Column -> ``path`` or ``url``: columns that name files to read.
        caption (str): What the column made from sidecar text is called. Default: ``caption``.
        max_line_bytes (int): Longest line accepted as one row. Default: 128 MiB.
        check (str): How far files of media are checked, as in `shards.media`. Default: ``whole``.
        delimiter (str | None): Separator of fields in delimited text. Default: found by looking.
        encoding (str | None): Character set of text. Default: UTF-8, or what a byte order mark says.
        whole_files (bool): One row a file, rather than one a line, for text. Default: ``True``.
    """

    target_bytes: int = 1 << 26
    columns: tuple[str, ...] | None = None
    media: Mapping[str, str] = field(default_factory=dict)
    caption: str = "caption"
    max_line_bytes: int = 1 << 27
    check: str = "whole"
    delimiter: str | None = None
    encoding: str | None = None
    whole_files: bool = True


class Source(ABC):
    """One kind of corpus. See the module's docstring.

    Args:
        files (FileList): The files of the corpus, sorted by name.
        options (SourceOptions): What the user asked for.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    extensions: ClassVar[frozenset[str]] = frozenset()
    marked: ClassVar[bool] = False  # whether `claims` goes by more than extensions, and settles it
    checks: ClassVar[bool] = False  # whether `read` has checked the media that it yields
    textual: ClassVar[bool] = False  # whether all values are text, and numbers are to be found in it
    takes: ClassVar[frozenset[str]] = frozenset()  # of `caption delimiter encoding lines`, those it looks at

    def __init__(self, files: FileList, options: SourceOptions) -> None:
        self.files = files
        self.options = options

    @classmethod
    def claims(cls, files: FileList) -> bool:
        """Whether these files look like a corpus of this kind. Default: one has an extension of ours."""
        return any(files.suffix(number) in cls.extensions for number in range(len(files)))

    @classmethod
    def separable(cls, files: FileList) -> bool:
        """Whether a part of these files is a corpus too. Default: yes."""
        return True

    @abstractmethod
    def tasks(self) -> Iterator[Task]:
        """The corpus in tasks. Looks at names and sizes, or at headers; never at the machine or the clock."""

    @abstractmethod
    def read(self, payload: Any) -> Iterator[Item]:
        """The rows of one task, in a fixed order."""

    def peek(self, payload: Any) -> Iterator[Item]:
        """The rows of one task, for finding out columns; may leave out what costs time. Default: `read`."""
        return self.read(payload)

    def columns(self) -> pa.Schema | Mapping[str, str] | None:
        """The columns as the format declares them, as Arrow types or as encodings; None to infer them."""
        return None

    def nullable(self) -> set[str]:
        """Of declared columns, those that have a null somewhere, or may have one. Default: none."""
        return set()

    def notes(self) -> list[str]:
        """Remarks for the summary: what was left out, and why. Known once `tasks` has been read.

        Default: how many files are not ours, where a kind goes by extensions.
        """
        others = 0 if self.marked else len(self.files) - len(self.mine())
        return other_kinds(others)

    def mine(self) -> FileList:
        """The files with an extension of ours; where none has one, all: the user named the format."""
        files = self.files
        return files.select(
            [number for number in range(len(files)) if files.suffix(number) in self.extensions]
            or range(len(files))
        )


class ChangedError(DatasyncError):
    """A file is not what it was when the job was planned."""


def changed(where: str) -> ChangedError:
    """The error for a file that was replaced or written to during the job."""
    return ChangedError(
        f"{where} changed while it was being read", mend="run again when nothing writes to the source"
    )


def other_kinds(count: int) -> list[str]:
    """The note that so many files are of other kinds; none where there are none."""
    if count < 2:
        return ["1 file of another kind left out"] * count
    return [f"{count:,} files of other kinds left out"]


def where(file: str, at: str | int) -> str:
    """File and place in one string."""
    return f"{file}:{at}" if at != "" else file


def group(
    files: FileList, target_bytes: int, *, size: Callable[[int], int] | None = None
) -> Iterator[tuple[range, int]]:
    """Runs of consecutive files of about `target_bytes` together, each run with its bytes; never empty."""
    start, held = 0, 0
    for number in range(len(files)):
        weight = size(number) if size is not None else max(int(files.sizes[number]), 0)
        if number > start and held + weight > target_bytes:
            yield range(start, number), held
            start, held = number, 0
        held += weight
    if start < len(files):
        yield range(start, len(files)), held


def content_error(error: Exception) -> bool:
    """Whether `error` says that a file is bad or cannot be opened, rather than that a store failed.

    Libraries raise OSError for bad content too, then without an errno.
    """
    if isinstance(error, ChangedError | MemoryError):
        return False
    if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError):
        return True
    if isinstance(error, OSError):
        return error.errno in (None, errno.ELOOP, errno.ENAMETOOLONG, errno.EPERM)
    kinds = (
        ValueError,
        EOFError,
        KeyError,
        IndexError,
        TypeError,
        SyntaxError,
        NotImplementedError,
        ArithmeticError,
    )
    return isinstance(error, (*kinds, zlib.error, lzma.LZMAError)) or type(error).__module__.split(".")[
        0
    ] in (
        "pyarrow",
        "zstd",
        "zstandard",
        "av",
        "soundfile",
        "_soundfile",
        "tarfile",
        "PIL",
        "struct",
    )


def reason(error: Exception) -> str:
    """An error in one line, for the quarantine."""
    if isinstance(error, DatasyncError):
        return error.message.splitlines()[0]
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, PermissionError):
        return "permission denied"
    if isinstance(error, OSError) and error.errno == errno.ELOOP:
        return "a link that leads to itself"
    text = str(error).strip().splitlines()
    # Addresses of objects differ from run to run, the quarantine must not.
    return _ADDRESS.sub("", text[0])[:300] if text else type(error).__name__


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
