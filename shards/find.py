"""What a job is about, found before any of it runs: the files, the kind of source, the tasks, the columns.

Columns come from the types that the format declares, else from rows: all of them in a small corpus, those of
tasks spread evenly over it in a large one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from shards import media
from shards.appended import NothingNew, only_new
from shards.errors import FormatError, UsageError
from shards.infer import Inference, arrow_columns
from shards.options import ConvertOptions
from shards.progress import format_count
from shards.rows import Rows
from shards.schema import MEDIA_ENCODINGS, Column, Schema, make_schema, no_column
from shards.sources import Bad, FileList, Item, Row, Source, Table, detect, list_files, load

_SAMPLE_BYTES = 64 << 20
_SAMPLE_ROWS = 100_000
_SAMPLE_SLOW = 2_000  # where there is a transform
_SAMPLE_FETCHED = 64  # where files are fetched for it
_SAMPLE_TASKS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """See the module's docstring.

    Args:
        files (FileList): Every file.
        kind (type[Source]): Kind of source.
        source (Source): The source.
        sizes (numpy.ndarray): Input bytes of each task, int64.
        schema (Schema): Columns of the dataset.
        known (frozenset[str]): Columns of the source, also those that are left out on purpose.
        strict (bool): A row with a column that is not known is bad.
        sampled (int): Rows that the columns were found from; 0 where the format declares them.
        notes (tuple[str, ...]): What is left out of the source.
        label (str): The source in a word.
        label_url (str): The source.
    """

    files: FileList
    kind: type[Source]
    source: Source
    sizes: np.ndarray[Any, np.dtype[np.int64]]
    schema: Schema
    known: frozenset[str]
    strict: bool
    sampled: int
    notes: tuple[str, ...]
    label: str
    label_url: str

    @property
    def tasks(self) -> int:
        """How many tasks there are."""
        return len(self.sizes)


def find(
    source: str | Path | Sequence[str | Path],
    options: ConvertOptions,
    *,
    storage_options: Mapping[str, Any] | None = None,
    known: np.ndarray[Any, Any] | None = None,
) -> Found:
    """Look at a corpus, without the files that are `known` (`shards.appended`).

    Raises:
        NothingNew: It has no other files.
        UsageError: There is none, its kind is not known, or an option does not fit it.
        FormatError: It has no rows.
    """
    asked = [source] if isinstance(source, str | Path) else list(source)
    urls = [os.fspath(part) for part in asked]
    files = list_files(urls, storage_options=storage_options)
    kind = load(options.format) if options.format is not None else detect(files)
    if known is not None and len(known):
        new = only_new(files, kind, known)
        if not len(new):
            raise NothingNew
        left_out = len(files) - len(new)
        already = f"{format_count(left_out, 'file')} that the dataset has already left out"
        notes = (already,) if left_out else ()
        files = replace(new, notes=(*files.notes, *notes))
    _check_options(kind, options)
    opened = kind(files, options.source_options())
    sizes = np.fromiter((task.bytes for task in opened.tasks()), np.int64)
    if not len(sizes):
        raise FormatError(f"{', '.join(urls)} has no rows", mend="give a corpus that holds something")
    inferred, sampled = _columns(opened, options, sizes)
    have = [column.source for column in inferred]
    for name in options.media if options.transform is None else ():
        if name not in have:
            raise no_column(name, have, "media")
    schema = make_schema(
        inferred, given=options.columns, select=options.select, drop=options.drop, rename=options.rename
    )
    chosen = {column.source for column in schema.columns}
    if options.key is not None and options.key not in chosen:
        raise UsageError(
            f"--key: the dataset has no column {options.key!r}", mend="name a column that is kept"
        )
    return Found(
        files=files,
        kind=kind,
        source=opened,
        sizes=sizes,
        schema=_final(schema, options),
        known=frozenset(column.source for column in inferred),
        strict=not options.select and not options.columns,
        sampled=sampled,
        notes=(*files.notes, *opened.notes()),
        label=os.path.basename(urls[0].rstrip("/")) or urls[0],
        label_url=", ".join(url if "://" in url else os.path.abspath(url) for url in urls),
    )


def _check_options(kind: type[Source], options: ConvertOptions) -> None:
    """Refuse an option that this kind of source would not look at."""
    usual = ConvertOptions()
    for name in ("caption", "delimiter", "encoding", "lines"):
        if getattr(options, name) != getattr(usual, name) and name not in kind.takes:
            raise UsageError(
                f"--{name} is not for {kind.name}", mend="leave it out, or name another kind with --format"
            )


def _check_media(schema: Schema, options: ConvertOptions) -> None:
    """Refuse an option about media that there is not."""
    kinds = {column.media for column in schema.columns}
    for name, media_kind in (("max_image_size", "image"), ("image_format", "image"), ("resample", "audio")):
        if getattr(options, name) is not None and media_kind not in kinds:
            raise UsageError(
                f"--{name.replace('_', '-')}: no column is {media_kind}",
                mend="leave it out, or look at the columns with --dry-run",
            )


def _final(schema: Schema, options: ConvertOptions) -> Schema:
    """The schema with the columns that are made and not read."""
    _check_media(schema, options)
    if options.image_format is not None:
        encoding = "png" if options.image_format == "png" else "jpeg"
        schema = Schema(
            tuple(
                replace(column, encoding=encoding) if column.media == "image" else column
                for column in schema.columns
            )
        )
    if options.tokenizer is not None:
        from shards.tokens import token_schema

        return token_schema(schema, options)
    if not options.media_info:
        return schema
    return schema.plus(
        Column(name=f"{column.name}.{fact}", encoding=encoding, source="", made=True)
        for column in schema.columns
        if column.media
        for fact, encoding in media.INFO_COLUMNS[column.media].items()
    )


def _columns(
    source: Source, options: ConvertOptions, sizes: np.ndarray[Any, np.dtype[np.int64]]
) -> tuple[list[Column], int]:
    """The columns of the source, and how many rows they were found from."""
    if options.media and options.transform is None:
        columns, sampled = _columns(source, replace(options, media={}), sizes)
        inference = Inference()
        _look(source, options, sizes, inference, _SAMPLE_BYTES)
        fetched = {column.source: column for column in inference.columns() if column.source in options.media}
        return [fetched.get(column.source, column) for column in columns], sampled
    declared = source.columns() if options.transform is None else None
    if isinstance(declared, Mapping):
        return [_encoded(name, encoding) for name, encoding in declared.items()], 0
    if declared is None:
        inference = Inference(textual=source.textual and options.transform is None)
        _look(source, options, sizes, inference, _SAMPLE_BYTES)
        columns = inference.columns()
        if not columns:
            raise FormatError(
                "the rows of the source have no columns", mend="give rows with at least one name"
            )
        return columns, inference.rows
    columns = arrow_columns(declared, nullable=source.nullable())
    plain = {column.source: column.encoding for column in columns}
    if "bytes" not in plain.values():
        return columns, 0
    inference = Inference(plain)
    _look(source, options, sizes, inference, _SAMPLE_BYTES // 8)
    kinds = {column.source: column for column in inference.columns()}
    return [kinds[column.source] if column.encoding == "bytes" else column for column in columns], 0


def _encoded(name: str, encoding: str) -> Column:
    """A column whose encoding the source says."""
    media = "image" if encoding in MEDIA_ENCODINGS else ""
    return Column(name=name, source=name, encoding=encoding, media=media, nullable=encoding == "json")


def _look(
    source: Source,
    options: ConvertOptions,
    sizes: np.ndarray[Any, np.dtype[np.int64]],
    inference: Inference,
    budget: int,
) -> None:
    """Show rows to `inference`: all, or those at the beginning of tasks spread evenly over the corpus."""
    count = len(sizes)
    if int(sizes.sum()) <= budget:
        chosen = set(range(count))
    else:
        chosen = {count * part // _SAMPLE_TASKS for part in range(_SAMPLE_TASKS)}
    rows = Rows(Schema(()), options, root=source.files.root, access=source.files.storage_options)
    most = _SAMPLE_ROWS if options.transform is None else _SAMPLE_SLOW
    if options.media:
        most = _SAMPLE_FETCHED
    first_bad: Bad | None = None
    for number, task in enumerate(source.tasks()):
        if number not in chosen:
            continue
        items = source.peek(task.payload) if options.transform is None else source.read(task.payload)
        for row in _some(items, rows, budget // len(chosen), most // len(chosen) + 1):
            if isinstance(row, Bad):
                first_bad = first_bad or row
            else:
                inference.see(row.values)
    if not inference.rows:
        if first_bad is not None:
            raise FormatError(
                f"no row could be read; {first_bad.where}: {first_bad.reason}", mend="mend the source"
            )
        files = source.files
        where = files.path(0) if len(files) == 1 else files.root
        raise FormatError(f"{where} has no rows", mend="give a corpus that holds something")


def _some(items: Iterable[Item], rows: Rows, size: int, count: int) -> Iterator[Row | Bad]:
    """Rows of one task until they are enough, by bytes that were read or by count."""
    return islice(rows.raw(_within(items, size)), count)


def _within(items: Iterable[Item], size: int) -> Iterator[Item]:
    for item in items:
        yield item
        if isinstance(item, Table):
            size -= item.batch.nbytes
        else:
            size -= _size(item.values) if isinstance(item, Row) else len(item.data)
        if size < 0:
            return


def _size(values: Mapping[str, Any]) -> int:
    return sum(len(value) if isinstance(value, str | bytes) else 16 for value in values.values())
