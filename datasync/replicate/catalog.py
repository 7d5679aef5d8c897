"""What a place holds: a dataset, an MDS dataset that others wrote, or a tree of files.

    index.json with our manifest      kind dataset    the manifest says every object and its digests
    index.json without                kind mds        the index does, with whatever digests it has
    no index.json                     kind tree       a listing does; digests are learnt while copying

What is still being made is none of them: a dataset that is sharded for the first time, and a tree to which a
replication is under way or was stopped, are refused. Their files look like a tree, and are not what will be.
So are a copy whose receipt says damaged, and a dataset that has lost its index.

The result is one table of objects (`plan.schema`). For objects whose SHA-256 is not known beforehand, the
source's own tag is kept: where an earlier receipt recorded the same tag, the digest is known again without
reading the object, and the reading itself is pinned to the tag.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from datasync.errors import FormatError, NotFoundError, StoreError, UsageError
from datasync.ops import receipts
from datasync.ops.receipts import Receipt
from datasync.replicate.layout import (
    INDEX,
    JOURNAL,
    LEASE,
    MANIFESTS,
    RECEIPT,
    check_data_key,
    is_internal,
    origin_key,
)
from datasync.replicate.limits import identity
from datasync.replicate.manifests import ManifestFile, StoredFile
from datasync.replicate.named import OtherForm, named, named_whole
from datasync.replicate.plan import beside, empty, schema
from datasync.replicate.retry import RETRY_SECONDS, retrying
from datasync.storage.base import TIME_TAG, ObjectInfo, Store
from shards.journal import JOBS
from shards.manifest import Manifest, fold, manifest_key
from shards.manifest import schema as manifest_schema

if TYPE_CHECKING:
    import pyarrow as pa

DATASET, MDS, TREE = "dataset", "mds", "tree"
_CHANGED = "|changed:"
_BATCH = 65_536


@dataclass(slots=True, kw_only=True)
class Catalog:
    """Everything that a place holds under one name.

    Args:
        name (str): The dataset or tree.
        kind (str): ``dataset``, ``mds`` or ``tree``.
        store (Store): Its root.
        table (pa.Table): Its objects, columns of `plan.schema`; empty for a dataset, whose manifest has them.
        counts (Counts | None): Of a dataset.
        index (StoredFile | None): The index, for the first two kinds.
        index_sha256 (str | None): Its SHA-256 in hex.
        index_info (ObjectInfo | None): How the store describes it.
        manifest (ManifestFile | None): The manifest's file, where all digests are known.
        version (str | None): The manifest's version, where all digests are known.
        told (bool): The index has a digest of every object: if it is unchanged, so are they.
        hashes (Mapping): Key -> algorithm -> digest, where an index gives others than SHA-256.
        left_out (Sequence[str]): Markers of folders in a tree: they are no data and are not copied.
    """

    name: str
    kind: str
    store: Store
    table: pa.Table
    counts: Counts | None = None
    index: StoredFile | None = None
    index_sha256: str | None = None
    index_info: ObjectInfo | None = None
    manifest: ManifestFile | None = None
    version: str | None = None
    told: bool = True
    hashes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    left_out: Sequence[str] = ()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Its objects, sorted by key, a bounded number at a time; read anew each time."""
        if self.kind == DATASET:
            assert self.manifest is not None
            return self.manifest.batches()
        return iter(self.table.to_batches(max_chunksize=_BATCH))

    def all_keys(self) -> Iterator[str]:
        """Every key, sorted as UTF-8 bytes."""
        for batch in self.batches():
            yield from batch["key"].to_pylist()

    @property
    def objects(self) -> int:
        return self.table.num_rows if self.counts is None else self.counts.objects

    @property
    def total_bytes(self) -> int:
        import pyarrow.compute as pc

        return int(pc.sum(self.table["bytes"]).as_py() or 0) if self.counts is None else self.counts.bytes

    @property
    def samples(self) -> int | None:
        import pyarrow.compute as pc

        if self.counts is not None:
            return self.counts.samples
        return None if self.kind == TREE else int(pc.sum(self.table["samples"]).as_py() or 0)


@dataclass(frozen=True, slots=True)
class Counts:
    """How much a dataset is."""

    objects: int
    bytes: int
    samples: int


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
    index = StoredFile.open(store, INDEX, info=info, retry_seconds=retry_seconds).spooled()
    found = named(index)
    if found is None:
        return _tree(store, name, retry_seconds, other_index=True)
    extra = found.top.get("datasync", {})
    if "manifest" in extra and "version" in extra:
        version = str(extra["version"])
        try:
            catalog = _dataset(store, name, index, version, found.files, retry_seconds)
        except OtherForm:
            whole = named_whole(index)
            files = None if whole is None else whole.files
            catalog = _dataset(store, name, index, version, files, retry_seconds)
    else:
        catalog = _mds(store, name, index)
    catalog.index_info, catalog.index_sha256 = info, index.sha256()
    return catalog


def _dataset(
    store: Store,
    name: str,
    index: StoredFile,
    version: str,
    files: Iterable[pa.RecordBatch] | None,
    retry_seconds: float,
) -> Catalog:
    """A dataset by its manifest, which is read once here: its version, its keys, and what the index names."""
    import pyarrow.compute as pc

    if files is None:
        raise FormatError(f"{index.where} has an entry without a SHA-256", mend="write the dataset again")
    try:
        manifest = ManifestFile.open(store, manifest_key(version), retry_seconds=retry_seconds)
    except NotFoundError:
        raise NotFoundError(
            f"{store.url}/{INDEX} names the manifest {version[:12]}…, which is not there",
            mend="finish the run that writes this dataset, or copy from another cluster (--from)",
        ) from None
    digest, counts, unproven = hashlib.sha256(), Counts(0, 0, 0), None
    for batch, shards in beside(manifest.batches(), files):
        fold(digest, batch)
        _check_keys(batch, store.url)
        unproven = unproven or _unproven(batch, shards)
        counts = Counts(
            counts.objects + batch.num_rows,
            counts.bytes + int(pc.sum(batch["bytes"]).as_py() or 0),
            counts.samples + int(pc.sum(batch["samples"]).as_py() or 0),
        )
    if digest.hexdigest() != version:
        raise FormatError(
            f"{manifest.where} has the content of version {digest.hexdigest()[:12]}…: it is damaged",
            mend="copy from another cluster (--from), or write the dataset again",
        )
    if unproven is not None:
        raise FormatError(
            f"{store.url}/{INDEX} names {unproven}, which its manifest does not prove",
            mend="write the dataset again, or copy from another cluster (--from)",
        )
    return Catalog(
        name=name,
        kind=DATASET,
        store=store,
        table=empty(),
        counts=counts,
        index=index,
        manifest=manifest,
        version=version,
    )


def _unproven(batch: pa.RecordBatch, shards: pa.Table) -> str | None:
    """The first file that an index names and that is not in the manifest's rows as the index has it."""
    import pyarrow.compute as pc

    if not shards.num_rows:
        return None
    at = pc.index_in(shards["key"], value_set=batch["key"])
    there = batch.take(at.combine_chunks())
    good = pc.is_valid(at)
    for column in ("bytes", "sha256"):
        good = pc.and_(good, pc.fill_null(pc.equal(shards[column], there[column]), False))
    if pc.all(good).as_py():
        return None
    return str(shards["key"].filter(pc.invert(good))[0].as_py())


def _mds(store: Store, name: str, text: StoredFile) -> Catalog:
    """An MDS dataset without a manifest of ours: its index says what there is."""
    from shards.index import Index

    index = Index.parse(bytes(text.content()), where=text.where)
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
        name=name,
        kind=MDS,
        store=store,
        table=table,
        index=text,
        told=all(rows[key][1] is not None or key in hashes for key in keys),
        hashes=hashes,
    )
    settle(catalog)
    return catalog


def _known_algorithms() -> frozenset[str]:
    from shards.digests import ALGORITHMS

    return frozenset(ALGORITHMS)


def _tags_of(store: Store, keys: set[str]) -> dict[str, str | None]:
    return {info.key: tag_of(store, info) for info in store.list() if info.key in keys}


def _tree(store: Store, name: str, retry_seconds: float, *, other_index: bool = False) -> Catalog:
    try:
        table, own, indexed, markers = retrying(lambda: _listed(store), seconds=retry_seconds)
    except NotFoundError as error:
        raise NotFoundError(
            f"there is no {name} at {store.url}",
            mend=error.mend or "check the name and the cluster (datasync status)",
        ) from None
    _check_finished(store, name, own, indexed, other_index=other_index)
    if not table.num_rows:
        raise NotFoundError(
            f"there is nothing at {store.url}",
            mend="check the name, and that the place is mounted; an empty source is never copied",
        )
    return Catalog(name=name, kind=TREE, store=store, table=table, left_out=markers)


def _listed(store: Store) -> tuple[pa.Table, set[str], bool, list[str]]:
    """What a listing shows: the objects, this tool's own files, whether an index is among the first, markers.

    A marker is an object without a byte whose key ends in a slash: consoles and file systems on top of object
    stores make it to show a folder. No folder can hold it, and many stores keep it under another name.

    Held as columns, so that a million objects are a hundred megabytes and not several.
    """
    import pyarrow as pa

    batches: list[pa.RecordBatch] = []
    part: list[tuple[str, int, str | None]] = []
    own: set[str] = set()
    indexed = False
    markers: list[str] = []

    def end() -> None:
        columns = list(zip(*part, strict=True)) if part else [(), (), ()]
        keys, sizes, tags = columns
        nulls = [pa.nulls(len(part), schema().field(name).type) for name in ("crc32c", "sha256", "samples")]
        arrays = [pa.array(keys, pa.string()), pa.array(sizes, pa.uint64()), *nulls]
        batches.append(pa.RecordBatch.from_arrays([*arrays, pa.array(tags, pa.string())], schema=schema()))
        part.clear()

    for info in store.list():
        indexed = indexed or info.key == INDEX or info.key.endswith(f"/{INDEX}")
        if is_internal(info.key):
            own.add(info.key)
            continue
        if info.key.endswith("/") and not info.bytes:
            markers.append(info.key)
            continue
        if info.bytes < 0:  # a page of links says no sizes
            info = store.stat(info.key)
            if info.bytes < 0:
                raise StoreError(
                    f"{store.url} does not say how large {info.key} is", mend="copy it from another place"
                )
        try:
            info.key.encode()
        except UnicodeEncodeError:
            raise StoreError(
                f"the name {info.key!r} at {store.url} is not UTF-8 and no object store can hold it",
                mend="rename the file",
            ) from None
        part.append((info.key, info.bytes, tag_of(store, info)))
        if len(part) == _BATCH:
            end()
    end()
    return pa.Table.from_batches(batches, schema()), own, indexed, markers


def _check_finished(store: Store, name: str, own: set[str], indexed: bool, *, other_index: bool) -> None:
    """A place where a run of this tool has begun and not ended, or whose index is gone, holds no tree.

    Args:
        own (set[str]): The keys of this tool's own files.
        indexed (bool): Whether there is an index, of it or of a part of it.
        other_index (bool): Whether there is an index.json of another kind.

    Raises:
        FormatError: There is a dataset whose index is none any more.
        StoreError: It is being sharded, a copy that is not whole or is damaged, or a dataset without index.
    """
    begun = {key.split("/")[2] for key in own if key.startswith(JOBS)}
    if not indexed and any(f"{JOBS}{job}/done.json" not in own for job in begun):
        raise StoreError(
            f"{name} at {store.url} is not finished: datasync shard has begun there and published nothing",
            mend="run that datasync shard again until it ends (or datasync merge), then this",
        )
    receipt = retrying(lambda: receipts.read(store)) if RECEIPT in own else None
    if any(key.startswith(JOURNAL) for key in own) or (LEASE in own and (receipt is None or _at_work(store))):
        raise StoreError(
            f"{name} at {store.url} is not finished: a replication to it is under way or was stopped",
            mend="run that replication again until it ends, or copy from another place (--from); if it was"
            " given up and these files are right, remove _datasync/ there",
        )
    if receipt is not None and not receipt.whole:
        raise StoreError(
            f"{name} at {store.url} is {receipt.state}: its own receipt says so",
            mend="repair it (datasync repair), or copy from another place (--from)",
        )
    is_tree = receipt is not None and receipt.kind == TREE
    if is_tree or not any(key.startswith(MANIFESTS) for key in own):
        return
    mend = "shard it again, or replicate it to here from another place, or repair it (datasync repair)"
    if other_index:
        raise FormatError(f"{name} at {store.url} is a dataset whose {INDEX} is none any more", mend=mend)
    if not indexed:
        raise StoreError(f"{name} at {store.url} is a dataset whose {INDEX} is gone", mend=mend)


def _at_work(store: Store) -> bool:
    """Whether a run that writes holds the lease, or held it when it was killed."""
    from datasync.replicate.lease import Record

    try:
        record = Record.parse(retrying(lambda: store.read(LEASE)), where=f"{store.url}/{LEASE}")
    except NotFoundError:
        return False
    return record.holder is not None and record.holder.command.startswith(("replicate ", "repair "))


def tag_of(store: Store, info: ObjectInfo) -> str | None:
    """The store's tag of an object, if it changes whenever the content does.

    A folder's is only trusted together with the inode's change time: content may be rewritten in place with
    size and mtime restored; the change time cannot be. What is made of size and time is none.
    """
    path = getattr(getattr(store, "store", store), "path", None)
    if info.etag is None or info.etag.startswith(TIME_TAG):
        return None
    if path is None:
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
    file = pq.ParquetFile(pa.BufferReader(raw), buffer_size=1 << 20, pre_buffer=False)
    names = ["key", "bytes", "crc32c", "sha256", "tag"]
    old = (batch.select(names) for batch in file.iter_batches(_BATCH, columns=names, use_threads=False))
    learnt: list[pa.RecordBatch] = []
    for batch, other in beside(catalog.batches(), old):
        if batch.num_rows:
            learnt.append(_learnt(batch, other))
    catalog.table = pa.Table.from_batches(learnt, schema())
    settle(catalog)


def _learnt(batch: pa.RecordBatch, other: pa.Table) -> pa.RecordBatch:
    """Rows with the digests of those of `other` that have the same key, size and tag."""
    import pyarrow as pa
    import pyarrow.compute as pc

    match = other.take(pc.index_in(batch["key"], value_set=other["key"].combine_chunks())).combine_chunks()
    same = pc.and_(
        pc.fill_null(pc.equal(batch["tag"], match["tag"]), False),
        pc.fill_null(pc.equal(batch["bytes"], match["bytes"]), False),
    )
    columns = {name: batch[name] for name in schema().names}
    for name in ("sha256", "crc32c"):
        found = match[name].cast(schema().field(name).type)
        known = pc.if_else(pc.and_(same, pc.is_null(batch[name])), found, batch[name])
        columns[name] = known.combine_chunks() if isinstance(known, pa.ChunkedArray) else known
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=schema())


def settle(catalog: Catalog) -> None:
    """Give the catalog its version, once every digest is known."""
    if catalog.version is None and catalog.table["sha256"].null_count == 0:
        manifest = Manifest(catalog.table.drop_columns(["tag"]).cast(manifest_schema()))
        catalog.version = manifest.version
        data = manifest.to_parquet()
        catalog.manifest = ManifestFile(where="the manifest of this run", bytes=len(data), data=data)


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


def _check_keys(table: pa.RecordBatch, where: str) -> None:
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
