"""Kinds of corpora, by name, and finding out which kind a corpus is.

Each kind is one module with one class (see `shards.sources.base`), imported when it is used. Other packages
add kinds by the entry point group `datasync.sources`, name = class.
"""

from __future__ import annotations

import difflib
import importlib
from collections import Counter
from typing import TYPE_CHECKING

from shards.errors import UsageError
from shards.sources.base import Bad, Item, Row, Source, SourceOptions, Table, Task
from shards.sources.files import FileList, list_files

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

__all__ = [
    "Bad",
    "FileList",
    "Item",
    "Row",
    "Source",
    "SourceOptions",
    "Table",
    "Task",
    "detect",
    "list_files",
    "load",
    "names",
]

GROUP = "datasync.sources"

# In the order in which they are asked: those that know a marker before those that go by extension.
_BUILT_IN = {
    "mds": "shards.sources.mds:Mds",
    "lerobot": "shards.sources.lerobot:LeRobot",
    "hf": "shards.sources.arrow:HuggingFace",
    "images": "shards.sources.mediafolder:ImageFolder",
    "audio": "shards.sources.mediafolder:AudioFolder",
    "video": "shards.sources.mediafolder:VideoFolder",
    "parquet": "shards.sources.parquet:Parquet",
    "arrow": "shards.sources.arrow:Arrow",
    "webdataset": "shards.sources.webdataset:WebDataset",
    "warc": "shards.sources.warc:Warc",
    "csv": "shards.sources.delimited:Delimited",
    "jsonl": "shards.sources.jsonl:JsonLines",
    "text": "shards.sources.text:Text",
}


def names() -> list[str]:
    """Every kind that there is."""
    return [*_BUILT_IN, *(point.name for point in _points() if point.name not in _BUILT_IN)]


def load(name: str) -> type[Source]:
    """The class of a kind.

    Raises:
        UsageError: There is no such kind, or its package does not import.
    """
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        found: type[Source] = getattr(importlib.import_module(module), attribute)
        return found
    for point in _points():
        if point.name == name:
            try:
                return _checked(point.load(), name)
            except ImportError as error:
                raise UsageError(f"the format {name!r} of {point.value} does not import: {error}") from error
    near = difflib.get_close_matches(name, names(), 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UsageError(f"there is no format {name!r}", mend=f"{hint}use one of: {', '.join(names())}")


def _checked(found: object, name: str) -> type[Source]:
    if isinstance(found, type) and issubclass(found, Source):
        return found
    raise UsageError(
        f"the format {name!r} is no shards.sources.Source", mend="see docs/shard.md, Your own source"
    )


def detect(files: FileList) -> type[Source]:
    """The kind that these files are.

    Raises:
        UsageError: None claims them, or two that go by extension do.
    """
    claims = [kind for kind in map(load, names()) if kind.claims(files)]
    if not claims:
        raise UsageError(
            f"no kind of corpus is known in {_where(files)}: it holds {_describe(files)}",
            mend=f"name it with --format: {', '.join(names())}",
        )
    # A README beside a corpus is no corpus.
    claims = [kind for kind in claims if kind.name != "text"] or claims
    if len(claims) > 1 and not claims[0].marked:
        counts = ", ".join(f"{kind.name} ({kind(files, SourceOptions()).mine().names[0]})" for kind in claims)
        raise UsageError(
            f"{files.root} holds several kinds of files: {counts}",
            mend="choose with --format, or name the files",
        )
    return claims[0]


def _where(files: FileList) -> str:
    return files.path(0) if len(files) == 1 else files.root


def _describe(files: FileList) -> str:
    counts = Counter(files.suffix(number) or "no extension" for number in range(len(files)))
    return ", ".join(f"{count:,} {suffix}" for suffix, count in counts.most_common(4))


def _points() -> EntryPoints:
    """The sources of other packages; imported here, since it costs more than all of our own."""
    from importlib.metadata import entry_points

    return entry_points(group=GROUP)
