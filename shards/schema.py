"""The columns of a dataset: what they are called, where they come from, how their values are encoded.

    source column ──rename──► column : encoding

A schema is inferred (`shards.infer`) and then changed by what the user says: `--columns` gives encodings,
`--select` and `--drop` choose, `--rename` names. All of it is known, and shown, before work starts.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shards import encodings
from shards.errors import UsageError

MEDIA_ENCODINGS = ("jpeg", "png")


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column.

    Args:
        name (str): In the dataset.
        encoding (str): MDS encoding.
        source (str): In the source.
        media (str): ``image``, ``audio`` or ``video`` if its values are such files, else empty.
        nullable (bool): Rows may lack it. Default: ``False``.
        made (bool): It is made on the way and not read. Default: ``False``.
        text (str): ``int`` or ``float`` if its values are numbers written as text, else empty.
    """

    name: str
    encoding: str
    source: str
    media: str = ""
    nullable: bool = False
    made: bool = False
    text: str = ""


@dataclass(frozen=True, slots=True)
class Schema:
    """The columns of a dataset, sorted by name as they are in a shard."""

    columns: tuple[Column, ...]

    @property
    def encodings(self) -> dict[str, str]:
        """Column -> encoding of those that are stored; a column without an encoding is only read."""
        return {column.name: column.encoding for column in self.columns if column.encoding}

    def identity(self) -> list[list[str]]:
        """What of a schema decides the bytes of a dataset."""
        return [
            [column.name, column.encoding, column.source, column.media, column.text]
            for column in self.columns
        ]

    def plus(self, columns: Iterable[Column]) -> Schema:
        """With further columns."""
        return Schema(tuple(sorted((*self.columns, *columns), key=lambda column: column.name)))


def make_schema(
    inferred: Sequence[Column],
    *,
    given: Mapping[str, str],
    select: Sequence[str] = (),
    drop: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
) -> Schema:
    """The schema that comes of what was inferred and what the user says; names in options are the source's.

    `given` may use a column's new name too. With `given` alone, only the columns it names are taken.

    Raises:
        UsageError: An option names a column or an encoding that there is not, or one name twice.
    """
    rename = dict(rename or {})
    found = {column.source: column for column in inferred}
    new_names = {new: old for old, new in rename.items()}
    given = {new_names.get(name, name): encoding for name, encoding in given.items()}
    for option, names in (("columns", given), ("select", select), ("drop", drop), ("rename", rename)):
        for name in names:
            if name not in found:
                raise no_column(name, found, option)
    chosen = list(select) or (list(given) if given else [*found])
    chosen += [name for name in given if name not in chosen]
    columns = []
    for source in chosen:
        if source in drop:
            continue
        column = found[source]
        encoding = given.get(source)
        if encoding is not None:
            check_encoding(encoding, source)
            media = "image" if encoding in MEDIA_ENCODINGS else column.media
            column = replace(column, encoding=encoding, media=media, nullable=encoding == "json")
        columns.append(replace(column, name=rename.get(source, column.name)))
    if not columns:
        raise UsageError("no column is left", mend="drop fewer columns, or select at least one")
    names = [column.name for column in columns]
    for name in names:
        if not _is_text(name):
            raise UsageError(f"the column name {name!r} is no valid Unicode", mend="--rename or --drop it")
        if names.count(name) > 1:
            raise UsageError(f"two columns are called {name!r}", mend="rename one of them")
    return Schema(tuple(sorted(columns, key=lambda column: column.name)))


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_encoding(encoding: str, column: str) -> None:
    """Refuse an encoding that there is not, naming the nearest."""
    if encodings.known(encoding):
        return
    family = encoding.partition(":")[0]
    near = difflib.get_close_matches(family, encodings.names(), 1)
    raise UsageError(
        f"column {column!r}: there is no encoding {encoding!r}",
        mend=f"did you mean {near[0]!r}?" if near else f"use one of: {', '.join(encodings.names())}",
    )


def parse_columns(text: str) -> dict[str, str]:
    """Read ``caption:str,image:jpeg,tokens:ndarray:int32:2,3`` as column -> encoding."""
    columns: dict[str, str] = {}
    last = ""
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, colon, encoding = part.partition(":")
        if not colon and last and columns[last].startswith("ndarray:") and part.isdecimal():
            columns[last] += f",{part}"  # a further dimension
            continue
        if not colon or not name or not encoding:
            raise UsageError(f"--columns: {part!r} is not NAME:ENCODING", mend="write caption:str,image:jpeg")
        if name in columns:
            raise UsageError(f"--columns: {name!r} stands twice", mend="name each column once")
        columns[name] = encoding
        last = name
    return columns


def parse_rename(text: str) -> dict[str, str]:
    """Read ``old=new,old2=new2``."""
    renamed: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        old, equals, new = part.partition("=")
        if not equals or not old or not new:
            raise UsageError(f"--rename: {part!r} is not OLD=NEW", mend="write text=caption")
        renamed[old] = new
    return renamed


def parse_names(text: str) -> list[str]:
    """Read ``a,b,c``."""
    return [part.strip() for part in text.split(",") if part.strip()]


def no_column(name: str, found: Iterable[str], option: str) -> UsageError:
    """The error of an option that names a column that the source does not have."""
    found = list(found)
    near = difflib.get_close_matches(name, found, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UsageError(
        f"--{option}: the source has no column {name!r}", mend=f"{hint}it has {', '.join(map(repr, found))}"
    )
