"""What an index names, in whole columns: for comparing it with the manifest that it points at.

An index as `shards.index` writes it has one shard a line, always with the same keys in the same order. Such
lines are read by one pattern, many at a time, which is several times as fast as JSON and makes no object for
each value; a large index is never held. Whatever does not fit the pattern, line by line to its end, is parsed
as JSON instead, and then it is.
"""

from __future__ import annotations

import json
import re
from binascii import unhexlify
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from datasync.errors import FormatError
from datasync.replicate.manifests import StoredFile

if TYPE_CHECKING:
    import pyarrow as pa

_BLOCK_BYTES = 4 << 20
_END_BYTES = 64 << 10  # more than what follows the shards in an index of ours
_BEGIN, _END = b'"shards": [\n', b"\n],\n"

_LIST = rb"\[[^\[\]\n]*\]"
_HASH = rb'"(?!sha256")[a-z0-9_]+": "[0-9a-f]+"'
_ANY = rb'\{"basename": "[^"\\\n]+", "bytes": \d+, "hashes": \{(?:%s(?:, )?)*\}\}' % _HASH
_STORED = (
    rb'\{"basename": "([^"\\\n]+)", "bytes": (\d+), "hashes": '
    rb'\{(?:%s, )*"sha256": "([0-9a-f]{64})"(?:, %s)*\}\}' % (_HASH, _HASH)
)
_BETWEEN = rb', "samples": \d+, "size_limit": (?:null|\d+), "version": 2, "zip_data": '
_LINE = re.compile(
    rb'^\{"column_encodings": %s, "column_names": %s, "column_sizes": %s, '
    rb'"compression": (?:null|"[^"\\\n]+"), "format": "mds", "hashes": %s, '
    rb'"raw_data": (?:%s%snull|%s%s%s)\},?$'
    % (_LIST, _LIST, _LIST, _LIST, _STORED, _BETWEEN, _ANY, _BETWEEN, _STORED),
    re.MULTILINE,
)


class OtherForm(Exception):
    """The lines of an index are not all as we write them, or not sorted by the names of their files."""


@dataclass(slots=True, kw_only=True)
class Named:
    """What an index says.

    Args:
        top (dict): Its keys without `shards`.
        files (Iterable[pa.RecordBatch] | None): The files that it names, ``key``, ``bytes`` and ``sha256``,
            sorted by key; None where an entry has no such digest. May raise `OtherForm` while it is walked;
            then `named_whole` has them.
    """

    top: dict[str, Any]
    files: Iterable[pa.RecordBatch] | None


def named(index: StoredFile) -> Named | None:
    """What an index names, read as it is walked where we wrote it; None for another kind of index.json.

    Raises:
        FormatError: Not JSON, a newer version, or an entry that is no entry.
    """
    lines = _Lines.of(index)
    if lines is None:
        return named_whole(index)
    return Named(top=_checked(lines.top, index.where), files=_sorted(lines))


def named_whole(index: StoredFile) -> Named | None:
    """`named` for an index of any form, of which every entry is held: in columns where we wrote it."""
    lines = _Lines.of(index)
    if lines is not None:
        try:
            table = _table(lines.blocks())
            return Named(top=_checked(lines.top, index.where), files=table.to_batches())
        except OtherForm:
            pass
    data = index.content()
    try:
        raw = json.loads(bytes(data))
    except ValueError as error:
        raise FormatError(
            f"{index.where} is not JSON: {error}",
            mend="write the dataset again, or give --tree to copy the folder as it is",
        ) from error
    if not isinstance(raw, dict) or "shards" not in raw:
        return None
    shards = raw.pop("shards")
    found = Named(top=_checked(raw, index.where), files=None)
    try:
        files = [shard.get("zip_data") or shard["raw_data"] for shard in shards]
        if all("sha256" in (file.get("hashes") or {}) for file in files):
            names = [file["basename"] for file in files]
            sizes = [file["bytes"] for file in files]
            digests = [bytes.fromhex(file["hashes"]["sha256"]) for file in files]
            found.files = _table([_batch(names, sizes, digests)]).to_batches()
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise FormatError(
            f"{index.where} has an entry without a name, a size or a SHA-256",
            mend="write the dataset again",
        ) from error
    return found


class _Lines:
    """The lines of an index as we write it, a few MiB of them at a time.

    Args:
        index (StoredFile): The index.
        top (dict): Its keys without `shards`.
        begin, end (int): Where the lines begin and end in its text.
    """

    def __init__(self, index: StoredFile, top: dict[str, Any], begin: int, end: int) -> None:
        self.index, self.top, self.begin, self.end = index, top, begin, end

    @classmethod
    def of(cls, index: StoredFile) -> _Lines | None:
        """None where the text around the lines is not ours."""
        head = bytes(index.read(0, min(_BLOCK_BYTES, index.bytes)))
        tail_at = max(index.bytes - _END_BYTES, 0)
        tail = bytes(index.read(tail_at, index.bytes - tail_at))
        at, last = head.find(_BEGIN), tail.rfind(_END)
        begin, end = at + len(_BEGIN), tail_at + last
        if at < 0 or last < 0 or end <= begin:
            return None
        rest = head[:begin] + tail[last:]
        if rest.count(b'"shards"') != 1:
            return None
        try:
            top = json.loads(rest)
        except ValueError:
            return None
        top.pop("shards")
        return cls(index, top, begin, end)

    def blocks(self) -> Iterator[pa.RecordBatch]:
        """The files that they name, in their order.

        Raises:
            OtherForm: A line is not as we write it.
        """
        at, rest = self.begin, b""
        while at < self.end:
            piece = self.index.read(at, min(_BLOCK_BYTES, self.end - at))
            at += len(piece)
            block = b"".join((rest, piece))
            rest = b""
            if at < self.end:
                block, newline, rest = block.rpartition(b"\n")
                if not newline:
                    raise OtherForm  # one line of megabytes is none of ours
            rows = _LINE.findall(block)
            if len(rows) != block.count(b"\n") + 1 or not block.endswith(b"}" if at == self.end else b"},"):
                raise OtherForm
            names = [row[0] or row[3] for row in rows]
            sizes = [int(row[1] or row[4]) for row in rows]
            try:
                yield _batch(names, sizes, [unhexlify(row[2] or row[5]) for row in rows])
            except (ValueError, OverflowError):
                raise OtherForm from None


def _sorted(lines: _Lines) -> Iterator[pa.RecordBatch]:
    """The blocks of an index whose files are sorted by name, as they nearly always are."""
    last = b""
    for batch in lines.blocks():
        keys = batch["key"]
        if keys[0].as_buffer().to_pybytes() < last or not _ascends(keys):
            raise OtherForm
        last = keys[-1].as_buffer().to_pybytes()
        yield batch


def _ascends(keys: pa.Array) -> bool:
    import pyarrow.compute as pc

    return len(keys) < 2 or bool(pc.all(pc.less_equal(keys[:-1], keys[1:])).as_py())


def _schema() -> pa.Schema:
    import pyarrow as pa

    return pa.schema(
        [pa.field("key", pa.string()), pa.field("bytes", pa.uint64()), pa.field("sha256", pa.binary(32))]
    )


def _batch(names: list[Any], sizes: list[int], digests: list[bytes]) -> pa.RecordBatch:
    import pyarrow as pa

    kind = pa.binary() if names and isinstance(names[0], bytes) else pa.string()
    columns = [
        pa.array(names, kind).cast(pa.string()),
        pa.array(sizes, pa.uint64()),
        pa.array(digests, pa.binary(32)),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_schema())


def _table(batches: Iterable[pa.RecordBatch]) -> pa.Table:
    import pyarrow as pa

    table = pa.Table.from_batches(list(batches), _schema())
    return table if _ascends(table["key"].combine_chunks()) else table.sort_by("key")


def _checked(top: dict[str, Any], where: str) -> dict[str, Any]:
    version = top.get("version")
    if isinstance(version, int) and version > 2:
        raise FormatError(
            f"{where} has version {version}, newer than this program", mend="install a newer datasync"
        )
    if not isinstance(top.get("datasync", {}), dict):
        raise FormatError(f"{where}: the key datasync is not a table", mend="write the dataset again")
    return top
