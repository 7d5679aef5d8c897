"""What a place holds: a dataset, an MDS dataset that others wrote, or a tree of files.

    index.json with our manifest      kind dataset    the manifest says every object and its digests
    index.json without                kind mds        the index does, with whatever digests it has
    no index.json                     kind tree       a listing does; digests are learnt while copying

What is still being made is none of them: a dataset that is sharded for the first time, and a tree to which a
replication is under way or was stopped, are refused. Their files look like a tree, and are not what will be.

The result is one table of objects (`plan.schema`). For objects whose SHA-256 is not known beforehand, the
source's own tag is kept: where an earlier receipt recorded the same tag, the digest is known again without
reading the object, and the reading itself is pinned to the tag.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from datasync.errors import FormatError, NotFoundError, StoreError, UsageError
from datasync.ops.receipts import Receipt
from datasync.replicate.layout import (
    INDEX,
    JOURNAL,
    LEASE,
    RECEIPT,
    check_data_key,
    is_internal,
    origin_key,
)
from datasync.replicate.limits import identity
from datasync.replicate.plan import schema
from datasync.replicate.retry import RETRY_SECONDS, retrying
from datasync.storage.base import ObjectInfo, Store
from shards.journal import JOBS
from shards.manifest import Manifest, manifest_key
from shards.manifest import schema as manifest_schema

if TYPE_CHECKING:
    import pyarrow as pa

    from shards.index import Index

DATASET, MDS, TREE = "dataset", "mds", "tree"
_CHANGED = "|changed:"


@dataclass(slots=True, kw_only=True)
class Catalog:
    """Everything that a place holds under one name.

    Args:
        name (str): The dataset or tree.
        kind (str): ``dataset``, ``mds`` or ``tree``.
        store (Store): Its root.
        table (pa.Table): Its objects, columns of `plan.schema`.
        index (bytes | None): The index, for the first two kinds.
        index_info (ObjectInfo | None): How the store describes it.
        manifest (bytes | None): The manifest's file, for a dataset.
        version (str | None): The manifest's version, where all digests are known.
        hashes (Mapping): Key -> algorithm -> digest, where an index gives others than SHA-256.
    """

    name: str
    kind: str
    store: Store
    table: pa.Table
    index: bytes | None = None
    index_info: ObjectInfo | None = None
    manifest: bytes | None = None
    version: str | None = None
    hashes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        import pyarrow.compute as pc

        return int(pc.sum(self.table["bytes"]).as_py() or 0)

    @property
    def samples(self) -> int | None:
        import pyarrow.compute as pc

        return None if self.kind == TREE else int(pc.sum(self.table["samples"]).as_py() or 0)


def describe(
    store: Store, name: str, *, as_tree: bool = False, retry_seconds: float = RETRY_SECONDS
) -> Catalog:
    """What lies at `store`.

    Args:
        store (Store): The root of the dataset or tree.
        name (str): What to call it.
        as_tree (bool): Copy every file, also of a folder that has an index. Default: ``False``.
        retry_seconds (float): How long a failing store is tried. Default: ``120``.

    Raises:
        NotFoundError: Nothing is there.
        FormatError: The index or the manifest is damaged, or names keys that leave the dataset.
        StoreError: The listing could not be completed: a partial listing is never taken for a whole one. Or
            what is there is unfinished.
    """
    if as_tree:
        return _tree(store, name, retry_seconds)
    try:
        info = retrying(lambda: store.stat(INDEX), seconds=retry_seconds)
    except NotFoundError:
        return _tree(store, name, retry_seconds)
    data = retrying(lambda: store.read(INDEX, etag=info.etag), seconds=retry_seconds)
    where = f"{store.url}/{INDEX}"
    raw = _mds_index(data, where)
    if raw is None:
        return _tree(store, name, retry_seconds)
    extra = raw.get("datasync", {})
    if "manifest" in extra and "version" in extra:
        catalog = _dataset(store, name, data, info, str(extra["version"]), retry_seconds)
        _check_index(raw, catalog.table, where)
        return catalog
    from shards.index import Index

    return _mds(store, name, data, info, Index.parse(data, where=where))


def _mds_index(data: bytes, where: str) -> dict[str, Any] | None:
    """An MDS index as plain JSON; None for another kind of index.json."""
    try:
        raw = json.loads(data)
    except ValueError as error:
        raise FormatError(
            f"{where} is not JSON: {error}",
            mend="write the dataset again, or give --tree to copy the folder as it is",
        ) from error
    if not isinstance(raw, dict) or "shards" not in raw:
        return None
    version = raw.get("version")
    if isinstance(version, int) and version > 2:
        raise FormatError(
            f"{where} has version {version}, newer than this program", mend="install a newer datasync"
        )
    if not isinstance(raw.get("datasync", {}), dict):
        raise FormatError(f"{where}: the key datasync is not a table", mend="write the dataset again")
    return raw


def _dataset(
    store: Store, name: str, data: bytes, info: ObjectInfo, version: str, retry_seconds: float
) -> Catalog:
    where = f"{store.url}/{manifest_key(version)}"
    try:
        raw = retrying(lambda: store.read(manifest_key(version)), seconds=retry_seconds)
    except NotFoundError:
        raise NotFoundError(
            f"{store.url}/{INDEX} names the manifest {version[:12]}…, which is not there",
            mend="finish the run that writes this dataset, or copy from another cluster (--from)",
        ) from None
    manifest = Manifest.from_parquet(raw, where=where)
    if manifest.version != version:
        raise FormatError(
            f"{where} has the content of version {manifest.version[:12]}…: it is damaged",
            mend="copy from another cluster (--from), or write the dataset again",
        )
    _check_keys(manifest.table, store.url)
    return Catalog(
        name=name,
        kind=DATASET,
        store=store,
        table=with_tags(manifest.table),
        index=data,
        index_info=info,
        manifest=raw,
        version=version,
    )


def _check_index(raw: dict[str, Any], table: pa.Table, where: str) -> None:
    """An index must not point at what the manifest does not prove.

    Only what is copied is looked at, in whole columns: readers check the rest of an entry when they use it.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        files = [shard.get("zip_data") or shard["raw_data"] for shard in raw["shards"]]
        names = pa.array([file["basename"] for file in files], pa.string())
        sizes = pa.array([file["bytes"] for file in files], pa.uint64())
        digests = pa.array([bytes.fromhex(file["hashes"]["sha256"]) for file in files], pa.binary(32))
    except (KeyError, TypeError, ValueError, AttributeError, pa.ArrowException) as error:
        raise FormatError(
            f"{where} has an entry without a name, a size or a SHA-256: {error}",
            mend="write the dataset again",
        ) from error
    at = pc.index_in(names, value_set=table["key"].combine_chunks())
    there = table.take(at)
    same = pc.and_(pc.equal(there["bytes"], sizes), pc.equal(there["sha256"], digests))
    good = pc.and_(pc.is_valid(at), pc.fill_null(same, False))
    if len(names) and not pc.all(good).as_py():
        raise FormatError(
            f"{where} names {names.filter(pc.invert(good))[0].as_py()}, which its manifest does not prove",
            mend="write the dataset again, or copy from another cluster (--from)",
        )


def _mds(store: Store, name: str, data: bytes, info: ObjectInfo, index: Index) -> Catalog:
    """An MDS dataset without a manifest of ours: its index says what there is."""
    rows: dict[str, tuple[int, str | None, int]] = {}
    hashes: dict[str, Mapping[str, str]] = {}
    for shard in index.shards:
        file = shard.stored
        check_data_key(file.basename, where=f"{store.url}/{INDEX}")
        digests = {k: v for k, v in file.hashes.items() if k in _known_algorithms()}
        entry = (file.bytes, digests.pop("sha256", None), shard.samples)
        known = rows.setdefault(file.basename, entry)
        if known[:2] != entry[:2]:
            raise FormatError(f"{store.url}/{INDEX} names {file.basename} twice, with different content")
        if digests:
            hashes[file.basename] = digests
    keys = sorted(rows, key=str.encode)
    tags: Mapping[str, str | None] = {}
    if any(rows[key][1] is None for key in keys):
        tags = _tags_of(store, set(keys))
    import pyarrow as pa

    table = pa.table(
        [
            keys,
            [rows[key][0] for key in keys],
            [None] * len(keys),
            [None if rows[key][1] is None else bytes.fromhex(str(rows[key][1])) for key in keys],
            [rows[key][2] for key in keys],
            [tags.get(key) for key in keys],
        ],
        schema=schema(),
    )
    catalog = Catalog(
        name=name, kind=MDS, store=store, table=table, index=data, index_info=info, hashes=hashes
    )
    settle(catalog)
    return catalog


def _known_algorithms() -> frozenset[str]:
    from shards.digests import ALGORITHMS

    return frozenset(ALGORITHMS)


def _tags_of(store: Store, keys: set[str]) -> dict[str, str | None]:
    return {info.key: tag_of(store, info) for info in store.list() if info.key in keys}


def _tree(store: Store, name: str, retry_seconds: float) -> Catalog:
    import pyarrow as pa

    try:
        listed = retrying(lambda: list(store.list()), seconds=retry_seconds)
        found = [info for info in listed if not is_internal(info.key)]
    except NotFoundError as error:
        raise NotFoundError(
            f"there is no {name} at {store.url}",
            mend=error.mend or "check the name and the cluster (datasync status)",
        ) from None
    _check_finished(store, name, [info.key for info in listed])
    if not found:
        raise NotFoundError(
            f"there is nothing at {store.url}",
            mend="check the name, and that the place is mounted; an empty source is never copied",
        )
    for info in found:
        try:
            info.key.encode()
        except UnicodeEncodeError:
            raise StoreError(
                f"the name {info.key!r} at {store.url} is not UTF-8 and no object store can hold it",
                mend="rename the file",
            ) from None
    nothing = [None] * len(found)
    table = pa.table(
        [
            [info.key for info in found],
            [info.bytes for info in found],
            nothing,
            nothing,
            nothing,
            [tag_of(store, info) for info in found],
        ],
        schema=schema(),
    )
    return Catalog(name=name, kind=TREE, store=store, table=table)


def _check_finished(store: Store, name: str, keys: list[str]) -> None:
    """A place where a run of this tool has begun and not ended holds no tree.

    Raises:
        StoreError: It is being sharded, or it is a copy that is not whole.
    """
    own = {key for key in keys if is_internal(key)}
    begun = {key.split("/")[2] for key in own if key.startswith(JOBS)}
    published = any(key == INDEX or key.endswith(f"/{INDEX}") for key in keys)
    if not published and any(f"{JOBS}{job}/done.json" not in own for job in begun):
        raise StoreError(
            f"{name} at {store.url} is not finished: datasync shard has begun there and published nothing",
            mend="run that datasync shard again until it ends (or datasync merge), then this",
        )
    copied = RECEIPT in own
    if any(key.startswith(JOURNAL) for key in own) or (LEASE in own and (not copied or _at_work(store))):
        raise StoreError(
            f"{name} at {store.url} is not finished: a replication to it is under way or was stopped",
            mend="run that replication again until it ends, or copy from another place (--from); if it was"
            " given up and these files are right, remove _datasync/ there",
        )


def _at_work(store: Store) -> bool:
    """Whether a run that writes holds the lease, or held it when it was killed."""
    from datasync.replicate.lease import Record

    try:
        record = Record.parse(retrying(lambda: store.read(LEASE)), where=f"{store.url}/{LEASE}")
    except NotFoundError:
        return False
    return record.holder is not None and record.holder.command.startswith(("replicate ", "repair "))


def tag_of(store: Store, info: ObjectInfo) -> str | None:
    """The store's tag of an object; a folder's is only trusted together with the inode's change time.

    Content may be rewritten in place with size and mtime restored; the change time cannot be.
    """
    path = getattr(getattr(store, "store", store), "path", None)
    if path is None or info.etag is None:
        return info.etag
    try:
        return f"{info.etag}{_CHANGED}{os.stat(path(info.key)).st_ctime_ns:x}"
    except OSError:
        return None


def etag_of(tag: str | None) -> str | None:
    """The store's own part of a tag, for pinned reading."""
    return None if tag is None else tag.partition(_CHANGED)[0]


def learn(catalog: Catalog, place: Store, receipt: Receipt | None) -> None:
    """Fill in digests that an earlier run learnt about objects that still have the same tag."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    if (
        catalog.kind == DATASET
        or receipt is None
        or (receipt.source["endpoint"], receipt.source["url"]) != identity(catalog.store)
    ):
        return
    try:
        raw = retrying(lambda: place.read(origin_key(receipt.version)))
    except NotFoundError:
        return
    old = pq.read_table(pa.BufferReader(raw), columns=["key", "bytes", "crc32c", "sha256", "tag"])
    table = catalog.table
    at = pc.index_in(table["key"], value_set=old["key"].combine_chunks())
    other = old.take(at)
    same = pc.and_(
        pc.fill_null(pc.equal(table["tag"], other["tag"]), False),
        pc.fill_null(pc.equal(table["bytes"], other["bytes"]), False),
    )
    for column in ("sha256", "crc32c"):
        place_at = table.schema.get_field_index(column)
        known = pc.if_else(
            pc.and_(same, pc.is_null(table[column])), other[column].cast(table[column].type), table[column]
        )
        table = table.set_column(place_at, table.schema.field(column), known)
    catalog.table = table
    settle(catalog)


def settle(catalog: Catalog) -> None:
    """Give the catalog its version, once every digest is known."""
    if catalog.version is None and catalog.table["sha256"].null_count == 0:
        manifest = Manifest(catalog.table.drop_columns(["tag"]).cast(manifest_schema()))
        catalog.version = manifest.version
        catalog.manifest = manifest.to_parquet()


def with_tags(table: pa.Table) -> pa.Table:
    """A manifest's table with an empty column of tags."""
    import pyarrow as pa

    return table.append_column(schema().field("tag"), pa.nulls(table.num_rows, pa.string())).cast(schema())


def origins(table: pa.Table) -> bytes | None:
    """The file that `learn` reads, or None where there are no tags to keep."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if table["tag"].null_count == table.num_rows:
        return None
    sink = pa.BufferOutputStream()
    pq.write_table(table.select(["key", "bytes", "crc32c", "sha256", "tag"]), sink, compression="zstd")
    return bytes(sink.getvalue())


def _check_keys(table: pa.Table, where: str) -> None:
    """Every key must stay below the dataset. Whole columns first; the slow check names the first bad one."""
    import pyarrow.compute as pc

    suspicious = pc.match_substring_regex(
        table["key"], r"(^|/)\.\.?(/|$)|^/|^_datasync/|^index\.json$|\x00|^$"
    )
    long = pc.greater(pc.binary_length(table["key"]), 1024)
    for key in table["key"].filter(pc.or_(suspicious, long)).to_pylist():
        check_data_key(key, where=where)


def check_name(name: str) -> str:
    """A name that can be a folder at a destination."""
    if not name or name in (".", "..") or name.startswith("_datasync"):
        raise UsageError(f"{name!r} cannot be the name of a dataset", mend="give another one (--as NAME)")
    return name
