"""What must be copied: the source's table of objects against what a destination is proven to have.

Pure, and on whole columns: a million objects are compared without a Python object for each. Both tables are
walked side by side, a batch at a time, so memory does not grow with them, only with what must be copied.
Digests decide; size and time never make two objects equal.

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
    Batches = Iterable[pa.RecordBatch]

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
        table (pa.Table): The objects to copy, columns of `schema`, sorted by key.
        rows (Rows): int64; where each stands among the source's objects.
        first (Rows): int64 places in `table` to copy first, in any order.
        last (Rows): Places to copy after those: they replace objects.
        marks (Rows): Places to copy at the end: by them others see that the rest is complete.
        unproven (Rows): Places, ascending, whose object may be there without proof.
        have (int): Objects that are proven to be there.
        have_bytes (int): Their bytes.
        bytes (int): Bytes to copy.
        gone (Sequence[str]): Keys of the last manifest that the source no longer has.
    """

    table: pa.Table
    rows: Rows
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


def compare(source: Batches, there: Batches | None, done: Mapping[str, Done]) -> Plan:
    """Plan one destination: a walk along two sorted tables, of which only what must be copied is kept.

    Args:
        source (Batches): Columns of `schema`, sorted and unique by key.
        there (Batches | None): The manifest that a receipt there proves; None without one.
        done (Mapping[str, Done]): What the journal of an unfinished run proves.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    wanted: list[pa.RecordBatch] = []
    rows, late, blind, fresh = [], [], [], []
    gone: list[str] = []
    offset = have = have_bytes = total = 0
    for batch, other in beside(source, () if there is None else there):
        same = np.zeros(batch.num_rows, bool)
        known = np.zeros(batch.num_rows, bool)  # the destination had this key, with content that we know
        if other.num_rows:
            keys = other["key"].combine_chunks()
            at = pc.index_in(batch["key"], value_set=keys)
            known = pc.is_valid(at).to_numpy(zero_copy_only=False)
            match = other.take(at)
            same = _equal(batch["sha256"], match["sha256"]) & _equal(batch["bytes"], match["bytes"])
            if int(known.sum()) < other.num_rows:
                left = pc.is_in(keys, value_set=batch["key"])
                gone += keys.filter(pc.invert(left)).to_pylist()
        if done:
            _with_journal(batch, same, known, done)
        sizes = batch["bytes"].to_numpy()
        todo = np.flatnonzero(~same)
        have, have_bytes = have + int(same.sum()), have_bytes + int(sizes[same].sum())
        if len(todo):
            part = batch.take(pa.array(todo))
            total += int(sizes[todo].sum())
            wanted.append(part)
            rows.append(offset + todo)
            late.append(known[todo])
            blind.append(pc.is_null(part["sha256"]).to_numpy(zero_copy_only=False))
            fresh.append(np.fromiter((is_marker(key) for key in part["key"].to_pylist()), bool, len(todo)))
        offset += batch.num_rows
    if not wanted:
        none = np.zeros(0, np.int64)
        return Plan(
            table=empty(), rows=none, first=none, last=none, marks=none, unproven=none,
            have=have, have_bytes=have_bytes, bytes=0, gone=gone,
        )  # fmt: skip
    was_known, is_blind, is_mark = (np.concatenate(parts) for parts in (late, blind, fresh))
    return Plan(
        table=pa.Table.from_batches(wanted),
        rows=np.concatenate(rows),
        first=np.flatnonzero(~was_known & ~is_mark),
        last=np.flatnonzero(was_known & ~is_mark),
        marks=np.flatnonzero(is_mark),
        unproven=np.flatnonzero(~was_known | is_blind),
        have=have,
        have_bytes=have_bytes,
        bytes=total,
        gone=gone,
    )


def beside(left: Batches, right: Batches) -> Iterator[tuple[pa.RecordBatch, pa.Table]]:
    """Each batch of `left` with the rows of `right` up to its last key; at the end none with the rest.

    Both are sorted by key; no more than a batch of each is held.
    """
    import pyarrow as pa

    feed = iter(right)
    held = next(feed, None)
    for batch in left:
        if not batch.num_rows:
            continue
        last = batch["key"][-1].as_py().encode()
        parts: list[pa.RecordBatch] = []
        while held is not None:
            upto = _after(held["key"], last)
            parts.append(held.slice(0, upto))
            if upto < held.num_rows:
                held = held.slice(upto)
                break
            held = next(feed, None)
        yield batch, pa.Table.from_batches(parts) if parts else empty()
    while held is not None:
        yield _nothing(), pa.Table.from_batches([held])
        held = next(feed, None)


def _after(keys: pa.Array, last: bytes) -> int:
    """How many of sorted `keys` are not later than `last`."""
    if not len(keys) or keys[-1].as_buffer().to_pybytes() <= last:
        return len(keys)
    low, high = 0, len(keys)
    while low < high:
        middle = (low + high) // 2
        if keys[middle].as_buffer().to_pybytes() <= last:
            low = middle + 1
        else:
            high = middle
    return low


def _nothing() -> pa.RecordBatch:
    import pyarrow as pa

    return pa.RecordBatch.from_pylist([], schema=schema())


def items(
    table: pa.Table,
    places: Rows,
    hashes: Mapping[str, Mapping[str, str]] | None = None,
    *,
    rows: Rows | None = None,
) -> Iterator[Item]:
    """The objects at these places of a table, made as they are asked for.

    Args:
        table (pa.Table): Columns of `schema`.
        places (Rows): int64.
        hashes (Mapping | None): Key -> algorithm -> digest, where an index gives others than SHA-256.
        rows (Rows | None): int64; where each of the table's rows stands in the source's. Default: there.
    """
    import pyarrow as pa

    for begin in range(0, len(places), _BATCH):
        chosen = places[begin : begin + _BATCH]
        part = table.take(pa.array(chosen))
        columns: list[list[Any]] = [
            part[name].to_pylist() for name in ("key", "bytes", "sha256", "crc32c", "tag")
        ]
        at = chosen if rows is None else rows[chosen]
        for row, key, size, sha, crc, tag in zip(at.tolist(), *columns, strict=True):
            yield Item(
                row=row,
                key=key,
                bytes=size,
                sha256=None if sha is None else sha.hex(),
                crc32c=crc,
                tag=tag,
                hashes=hashes.get(key, _NONE) if hashes else _NONE,
            )


def in_place(plan: Plan, listing: Iterable[tuple[str, int]]) -> dict[str, bool]:
    """Keys that are unproven and that a sorted listing of keys and sizes shows -> whether the size is right.

    Both are walked side by side, so only what is found is held.
    """
    found: dict[str, bool] = {}
    listed = iter(listing)
    key, size = next(listed, (None, 0))
    for item in items(plan.table, plan.unproven):
        wanted = item.key.encode()
        while key is not None and key.encode("utf-8", "surrogateescape") < wanted:
            key, size = next(listed, (None, 0))
        if key is None:
            break
        if key == item.key:
            found[key] = size == item.bytes
    return found


def conflicts(keys: Iterable[str], *, folds_case: bool) -> list[tuple[str, str]]:
    """Pairs of keys that cannot both be files in one folder: ``a`` beside ``a/b``, or ``A`` beside ``a``.

    Args:
        keys (Iterable[str]): Sorted as UTF-8 bytes.
        folds_case (bool): Whether the file system takes ``A`` and ``a`` for one name; then all are held.
    """
    if folds_case:
        return _folded_conflicts(keys)
    found: list[tuple[str, str]] = []
    begun: list[str] = []  # keys with which the present one begins; they stand right before it
    for key in keys:
        while begun and not key.startswith(begun[-1]):
            begun.pop()
        found += [(name, key) for name in begun if key[len(name)] == "/"]
        begun.append(key)
    return found


def _folded_conflicts(keys: Iterable[str]) -> list[tuple[str, str]]:
    seen: dict[str, str] = {}
    folders: dict[str, str] = {}
    found = []
    for key in keys:
        name = key.casefold()
        if name in seen and seen[name] != key:
            found.append((seen[name], key))
        seen[name] = key
        folder = name.rpartition("/")[0]
        while folder and folder not in folders:
            folders[folder] = key
            folder = folder.rpartition("/")[0]
    found += [(seen[name], inside) for name, inside in folders.items() if name in seen]
    return found


def _equal(left: pa.Array, right: pa.ChunkedArray) -> Rows:
    """Element by element; null equals nothing."""
    import pyarrow.compute as pc

    return pc.fill_null(pc.equal(left, right), False).to_numpy()  # type: ignore[no-any-return]


def _with_journal(batch: pa.RecordBatch, same: Rows, known: Rows, done: Mapping[str, Done]) -> None:
    """What the journal proves stands above the last manifest: it is newer. Changes `same` and `known`."""
    import pyarrow as pa

    touched = [place for place, key in enumerate(batch["key"].to_pylist()) if key in done]
    part = batch.take(pa.array(touched, pa.int64()))
    columns = [part[name].to_pylist() for name in ("key", "bytes", "sha256", "tag")]
    for place, key, size, sha, tag in zip(touched, *columns, strict=True):
        record = done[key]
        if sha is None:
            same[place] = tag is not None and (record.bytes, record.tag) == (size, tag)
        else:
            same[place] = (record.bytes, record.sha256) == (size, sha.hex())
        known[place] = not same[place]
