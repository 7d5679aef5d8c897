"""What an index names, in whole columns: for comparing it with the manifest that it points at.

An index as `shards.index` writes it has one shard a line, always with the same keys in the same order. Such
lines are read by one pattern, many at a time, which is several times as fast as JSON and makes no object for
each value. Whatever does not fit the pattern, line by line to its end, is parsed as JSON instead.
"""

from __future__ import annotations

import json
import re
from binascii import unhexlify
from typing import TYPE_CHECKING, Any

from datasync.errors import FormatError

if TYPE_CHECKING:
    import pyarrow as pa

_BLOCK_BYTES = 4 << 20
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


def named(data: bytes, where: str) -> tuple[dict[str, Any], pa.Table | None] | None:
    """The top-level keys of an MDS index, and the files that it names; None for another kind of index.json.

    Args:
        data (bytes): The text.
        where (str): Its URL, for messages.

    Returns:
        tuple: The keys without `shards`; a table of ``key``, ``bytes`` and ``sha256`` sorted by key, or None
            where an entry has no such digest.

    Raises:
        FormatError: Not JSON, a newer version, or an entry that is no entry.
    """
    found = _by_line(data)
    if found is not None:
        top, table = found
        return _checked(top, where), table
    try:
        raw = json.loads(data)
    except ValueError as error:
        raise FormatError(
            f"{where} is not JSON: {error}",
            mend="write the dataset again, or give --tree to copy the folder as it is",
        ) from error
    if not isinstance(raw, dict) or "shards" not in raw:
        return None
    shards = raw.pop("shards")
    top = _checked(raw, where)
    try:
        files = [shard.get("zip_data") or shard["raw_data"] for shard in shards]
        if any("sha256" not in (file.get("hashes") or {}) for file in files):
            return top, None
        names = [file["basename"] for file in files]
        sizes = [file["bytes"] for file in files]
        digests = [bytes.fromhex(file["hashes"]["sha256"]) for file in files]
        return top, _table([(names, sizes, digests)])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise FormatError(
            f"{where} has an entry without a name, a size or a SHA-256: {error}",
            mend="write the dataset again",
        ) from error


def _by_line(data: bytes) -> tuple[dict[str, Any], pa.Table] | None:
    """An index exactly as we write it; None for any other."""
    at, end = data.find(_BEGIN), data.rfind(_END)
    begin = at + len(_BEGIN)
    if at < 0 or end <= begin:
        return None
    rest = data[:begin] + data[end:]
    if rest.count(b'"shards"') != 1:
        return None
    try:
        top = json.loads(rest)
    except ValueError:
        return None
    top.pop("shards")
    blocks = []
    while begin < end:
        stop = end if end - begin <= _BLOCK_BYTES else data.rfind(b"\n", begin, begin + _BLOCK_BYTES)
        if stop <= begin:
            return None  # one line of megabytes is none of ours
        block = data[begin:stop]
        rows = _LINE.findall(block)
        if len(rows) != block.count(b"\n") + 1 or not block.endswith(b"}" if stop == end else b"},"):
            return None
        names = [row[0] or row[3] for row in rows]
        sizes = [int(row[1] or row[4]) for row in rows]
        blocks.append((names, sizes, [unhexlify(row[2] or row[5]) for row in rows]))
        begin = stop + 1
    try:
        return top, _table(blocks)
    except (ValueError, OverflowError):
        return None


def _table(blocks: list[tuple[list[Any], list[int], list[bytes]]]) -> pa.Table:
    import pyarrow as pa
    import pyarrow.compute as pc

    schema = pa.schema(
        [pa.field("key", pa.string()), pa.field("bytes", pa.uint64()), pa.field("sha256", pa.binary(32))]
    )
    batches = [
        pa.RecordBatch.from_arrays(
            [
                pa.array(names, pa.binary() if names and isinstance(names[0], bytes) else pa.string()).cast(
                    pa.string()
                ),
                pa.array(sizes, pa.uint64()),
                pa.array(digests, pa.binary(32)),
            ],
            schema=schema,
        )
        for names, sizes, digests in blocks
    ]
    table = pa.Table.from_batches(batches, schema)
    keys = table["key"].combine_chunks()
    if len(keys) > 1 and not pc.all(pc.less_equal(keys[:-1], keys[1:])).as_py():
        table = table.sort_by("key")
    return table


def _checked(top: dict[str, Any], where: str) -> dict[str, Any]:
    version = top.get("version")
    if isinstance(version, int) and version > 2:
        raise FormatError(
            f"{where} has version {version}, newer than this program", mend="install a newer datasync"
        )
    if not isinstance(top.get("datasync", {}), dict):
        raise FormatError(f"{where}: the key datasync is not a table", mend="write the dataset again")
    return top
