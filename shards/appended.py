"""Which files a dataset was made from, so that appending the same corpus again adds only what is new.

    _datasync/jobs/<job>/files     of each file: digest of its name, bytes, version (shards.sources.files)

A job counts while all of its shards are in the index, where they stand one behind another. Of what it had
read, files that are as they were are left out, and one that has changed is an error: its old rows are in
the dataset, and nothing says which.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xxhash
import zstandard

from shards.commit import Current
from shards.errors import CorruptError, NotFoundError, UsageError
from shards.journal import JOBS, Journal, jobs
from shards.sink import Sink
from shards.sources import FileList, Source, SourceOptions

_ROW = np.dtype([("name", "<u8"), ("bytes", "<i8"), ("version", "<u8")])
_MEND = "append what is new from files of its own, or make the dataset anew with --overwrite"

Rows = np.ndarray[Any, Any]


class NothingNew(Exception):
    """Every file of a corpus is in the dataset already."""


def identities(files: FileList) -> bytes:
    """What is kept of the files of a job."""
    return zstandard.ZstdCompressor(level=1).compress(_rows(files).tobytes())


def run_of(names: Sequence[str]) -> dict[str, Any]:
    """What tells the shards of a job, which stand one behind another in an index, from any others."""
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()
    return {"first": names[0], "count": len(names), "sha256": digest}


def read_known(sink: Sink, before: Mapping[str, Current]) -> Rows:
    """The files whose rows are in the datasets that are published now, sorted by digest of their name."""
    names = {
        split: [shard.stored.basename for shard in current.index.shards] if current.index else []
        for split, current in before.items()
    }
    places = {split: {name: at for at, name in enumerate(found)} for split, found in names.items()}
    found = [np.empty(0, _ROW)]
    for name in jobs(sink):
        done = Journal(sink, name).done()
        made = done.get("made", {}) if done is not None else {}
        if not made or not all(
            (at := places.get(split, {}).get(run["first"])) is not None
            and run_of(names[split][at : at + run["count"]]) == run
            for split, run in made.items()
        ):
            continue
        key = f"{JOBS}{name}/files"
        try:
            data = zstandard.ZstdDecompressor().decompressobj().decompress(sink.read(key))
        except NotFoundError:
            continue
        except zstandard.ZstdError as error:
            raise CorruptError(f"{key} in {sink.url} is damaged", mend="make the dataset anew") from error
        found.append(np.frombuffer(data, _ROW))
    every = np.concatenate(found)
    return every[np.argsort(every["name"], kind="stable")]


def only_new(files: FileList, kind: type[Source], known: Rows) -> FileList:
    """The files that are not among `known`.

    Raises:
        UsageError: One of them has changed since, or they are one corpus that cannot be had in part.
    """
    rows = _rows(files)
    at = np.searchsorted(known["name"], rows["name"], side="right") - 1  # the latest of that name
    there = (at >= 0) & (known["name"][at] == rows["name"]) if len(known) else np.zeros(len(rows), bool)
    same = there.copy()
    for part in ("bytes", "version"):
        same[there] &= known[part][at[there]] == rows[part][there]
    if not there.any() or same.all():
        return files.select(np.flatnonzero(~same))
    mine = set(kind(files, SourceOptions()).mine().names)
    changed = [files.names[number] for number in np.flatnonzero(there & ~same) if files.names[number] in mine]
    if changed:
        raise UsageError(f"--append: {changed[0]} was added before and has changed since", mend=_MEND)
    if not kind.separable(files):
        raise UsageError(
            f"--append: {int(same.sum()):,} of the {len(files):,} files of {files.root} were added before",
            mend=_MEND,
        )
    return files.select(np.flatnonzero(~same))


def _rows(files: FileList) -> Rows:
    rows = np.empty(len(files), _ROW)
    digest = xxhash.xxh3_64_intdigest
    rows["name"] = np.fromiter(
        (digest(files.path(number).encode(errors="surrogateescape")) for number in range(len(files))),
        np.uint64,
        len(files),
    )
    rows["bytes"], rows["version"] = files.sizes, files.versions
    return rows
