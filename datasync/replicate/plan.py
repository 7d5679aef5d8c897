"""What must be copied: the source's table of objects against what a destination is proven to have.

Pure, and on whole columns: a million objects are compared without a Python object for each. Digests decide;
size and time never make two objects equal.

    source row                          at the destination (last manifest, journal)      plan
    sha256 known                        same key, bytes, sha256                          nothing
    sha256 known                        anything else                                    copy
    sha256 unknown (a tree's)           same key and bytes                               hash, copy if other
    sha256 unknown                      anything else                                    copy
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from datasync.replicate.layout import is_marker

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa

    from datasync.replicate.journal import Done

    Rows = npt.NDArray[Any]

_BATCH = 4096
_NONE: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One object to move.

    Args:
        row (int): Its row in the source's table.
        key (str): Relative to the dataset.
        bytes (int): Size in bytes.
        sha256 (str | None): Hex digits, where known before reading.
        crc32c (int | None): Where known before reading.
        tag (str | None): The source's tag of the object, to pin the reading; None where content is named.
        hashes (Mapping[str, str]): Other digests that an index gives.
    """

    row: int
    key: str
    bytes: int
    sha256: str | None
    crc32c: int | None
    tag: str | None = None
    hashes: Mapping[str, str] = field(default_factory=lambda: _NONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one destination needs.

    Args:
        first (Rows): int64 rows to copy, in any order.
        last (Rows): int64 rows to copy after those: they replace objects.
        marks (Rows): int64 rows to copy at the end: by them others see that the rest is complete.
        unproven (Rows): Rows among them, ascending, whose object may be in place without proof.
        have (int): Objects that are proven to be there.
        have_bytes (int): Their bytes.
        bytes (int): Bytes to copy.
        gone (Sequence[str]): Keys of the last manifest that the source no longer has.
    """

    first: Rows
    last: Rows
    marks: Rows
    unproven: Rows
    have: int
    have_bytes: int
    bytes: int
    gone: Sequence[str]

    @property
    def objects(self) -> int:
        return len(self.first) + len(self.last) + len(self.marks)


def schema() -> pa.Schema:
    """The columns of a table of objects; unknown digests and tags are null."""
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("key", pa.string(), nullable=False),
            pa.field("bytes", pa.uint64(), nullable=False),
            pa.field("crc32c", pa.uint32()),
            pa.field("sha256", pa.binary(32)),
            pa.field("samples", pa.uint64()),
            pa.field("tag", pa.string()),
        ]
    )


def empty() -> pa.Table:
    return schema().empty_table()


def compare(
    source: pa.Table,
    there: pa.Table | None,
    done: Mapping[str, Done],
    present: Iterable[tuple[str, int]] = (),
) -> Plan:
    """Plan one destination.

    Args:
        source (pa.Table): Columns of `schema`, unique by key.
        there (pa.Table | None): The manifest that a receipt there proves; None without one.
        done (Mapping[str, Done]): What the journal of an unfinished run proves.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    rows = source.num_rows
    same = np.zeros(rows, bool)
    known = np.zeros(rows, bool)  # the destination had this key, with content that we know
    gone: list[str] = []
    if there is not None and there.num_rows:
        at = pc.index_in(source["key"], value_set=there["key"].combine_chunks())
        known = pc.is_valid(at).to_numpy()
        other = there.take(at)
        same = _equal(source["sha256"], other["sha256"]) & _equal(source["bytes"], other["bytes"])
        if int(known.sum()) < there.num_rows:
            left = pc.is_in(there["key"], value_set=source["key"].combine_chunks())
            gone = there["key"].filter(pc.invert(left)).to_pylist()
    if done:
        same, known = _with_journal(source, same, known, done)

    todo = np.flatnonzero(~same)
    keys = source["key"].take(pa.array(todo))
    blind = pc.is_null(source["sha256"].take(pa.array(todo))).to_numpy()
    marks = np.fromiter((is_marker(key) for key in _strings(keys)), bool, len(todo))
    late = known[todo] & ~marks
    sizes_all = source["bytes"].to_numpy()
    return Plan(
        first=todo[~late & ~marks],
        last=todo[late],
        marks=todo[marks],
        unproven=todo[~known[todo] | blind],
        have=int(same.sum()),
        have_bytes=int(sizes_all[same].sum()),
        bytes=int(sizes_all[~same].sum()),
        gone=gone,
    )


def items(
    source: pa.Table, rows: Rows, hashes: Mapping[str, Mapping[str, str]] | None = None
) -> Iterator[Item]:
    """The objects of these rows, made as they are asked for."""
    import pyarrow as pa

    for begin in range(0, len(rows), _BATCH):
        chosen = rows[begin : begin + _BATCH]
        part = source.take(pa.array(chosen))
        columns: list[list[Any]] = [
            part[name].to_pylist() for name in ("key", "bytes", "sha256", "crc32c", "tag")
        ]
        for row, key, size, sha, crc, tag in zip(chosen.tolist(), *columns, strict=True):
            yield Item(
                row=row,
                key=key,
                bytes=size,
                sha256=None if sha is None else sha.hex(),
                crc32c=crc,
                tag=tag,
                hashes=hashes.get(key, _NONE) if hashes else _NONE,
            )


def in_place(source: pa.Table, rows: Rows, listing: Iterable[tuple[str, int]]) -> set[str]:
    """Keys of `rows` (ascending) that a sorted listing of keys and sizes shows with the right size.

    Both are walked side by side, so only what is found is held.
    """
    found: set[str] = set()
    listed = iter(listing)
    key, size = next(listed, (None, 0))
    for item in items(source, rows):
        wanted = item.key.encode()
        while key is not None and key.encode("utf-8", "surrogateescape") < wanted:
            key, size = next(listed, (None, 0))
        if key is None:
            break
        if key == item.key and size == item.bytes:
            found.add(key)
    return found


def conflicts(keys: Iterable[str], *, folds_case: bool) -> list[tuple[str, str]]:
    """Pairs of keys that cannot both be files in one folder: ``a`` beside ``a/b``, or ``A`` beside ``a``.

    Args:
        keys (Iterable[str]): Any order.
        folds_case (bool): Whether the file system takes ``A`` and ``a`` for one name.
    """
    seen: dict[str, str] = {}
    folders: dict[str, str] = {}
    found = []
    for key in keys:
        name = key.casefold() if folds_case else key
        if name in seen and seen[name] != key:
            found.append((seen[name], key))
        seen[name] = key
        folder = name.rpartition("/")[0]
        while folder and folder not in folders:
            folders[folder] = key
            folder = folder.rpartition("/")[0]
    found += [(seen[name], inside) for name, inside in folders.items() if name in seen]
    return found


def _equal(left: pa.ChunkedArray, right: pa.ChunkedArray) -> Rows:
    """Element by element; null equals nothing."""
    import pyarrow.compute as pc

    return pc.fill_null(pc.equal(left, right), False).to_numpy()  # type: ignore[no-any-return]


def _with_journal(source: pa.Table, same: Rows, known: Rows, done: Mapping[str, Done]) -> tuple[Rows, Rows]:
    """What the journal proves stands above the last manifest: it is newer."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    same, known = same.copy(), known.copy()
    at = pc.index_in(source["key"], value_set=pa.array(list(done), pa.string()))
    touched = np.flatnonzero(pc.is_valid(at).to_numpy())
    part = source.take(pa.array(touched))
    columns = [part[name].to_pylist() for name in ("key", "bytes", "sha256", "tag")]
    for row, key, size, sha, tag in zip(touched.tolist(), *columns, strict=True):
        record = done[key]
        if sha is None:
            same[row] = tag is not None and (record.bytes, record.tag) == (size, tag)
        else:
            same[row] = (record.bytes, record.sha256) == (size, sha.hex())
        known[row] = not same[row]
    return same, known


def _strings(column: pa.ChunkedArray) -> Iterator[str]:
    for chunk in column.chunks:
        yield from chunk.to_pylist()
