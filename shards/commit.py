"""The end of a job: from the records of its tasks to a dataset that readers see.

    records, in order of their tasks ──► manifest, written first ──► index.json, by a conditional write, last

Until the index is written, readers see the dataset that was there before, or none; then they see the new one,
whole (invariant 1). Running it again does no harm: it writes the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shards.errors import ConflictError, DatasyncError, NotFoundError
from shards.index import BASENAME, Index, ShardInfo
from shards.manifest import Manifest, ManifestEntry, manifest_key
from shards.sink import Sink
from shards.version import __version__

Records = Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One dataset as it was published.

    Args:
        prefix (str): Folder below the destination: empty, or the split with a slash.
        version (str): Its version.
        samples (int): Rows.
        shards (int): Shards.
        raw_bytes (int): Bytes of the shards uncompressed.
        stored_bytes (int): Bytes of the shards as they are stored.
    """

    prefix: str
    version: str
    samples: int
    shards: int
    raw_bytes: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class Current:
    """The index that is at a prefix when a job begins: nothing, or its content and its tag."""

    index: Index | None
    etag: str | None


def current(sink: Sink, prefix: str = "") -> Current:
    """What is published at `prefix` now."""
    key = prefix + BASENAME
    for _ in range(3):
        try:
            etag = sink.stat(key).etag
            return Current(Index.parse(sink.read(key, etag=etag), where=f"{sink.url}/{key}"), etag)
        except NotFoundError:
            return Current(None, None)
        except ConflictError:
            continue  # replaced between the two calls
    raise DatasyncError(f"{key} in {sink.url} is being replaced all the time", mend="let one writer at it")


def publish(
    sink: Sink, prefix: str, entries: Iterable[Mapping[str, Any]], before: Current, *, append: bool
) -> Published:
    """Publish the shards of `entries` at `prefix`; with `append`, behind those that are there.

    Raises:
        ConflictError: Another writer has published there since `before`.
    """
    old = list(before.index.shards) if append and before.index is not None else []
    crcs = _known_crcs(sink, prefix, before) if old else {}
    new = list(entries)
    if old and {stored_name(entry) for entry in new} <= {shard.stored.basename for shard in old}:
        new = []  # an earlier try of ours came as far as the index
    crcs.update({entry["shard"]["raw_data"]["basename"]: entry["crc32c"] for entry in new})
    shards = [*old, *(ShardInfo.from_dict(entry["shard"]) for entry in new)]
    manifest = Manifest.from_entries(_manifest_entries(shards, crcs))
    sink.write(prefix + manifest_key(manifest.version), manifest.to_parquet())
    index = Index(shards)
    extra = {
        "version": manifest.version,
        "created_by": f"datasync {__version__}",
        "schema": index.columns,
        "manifest": manifest_key(manifest.version),
        "fingerprint": index.fingerprint,
    }
    data = Index(shards, extra).dumps()
    if (
        before.index is None
        or before.index.extra.get("version") != manifest.version
        or not before.index.extra
    ):
        _put_index(sink, prefix + BASENAME, data, before)
    return Published(
        prefix=prefix,
        version=manifest.version,
        samples=index.samples,
        shards=len(shards),
        raw_bytes=sum(shard.raw.bytes for shard in shards),
        stored_bytes=sum(shard.stored.bytes for shard in shards),
    )


def _put_index(sink: Sink, key: str, data: bytes, before: Current) -> None:
    try:
        if before.index is None:
            sink.write(key, data, if_absent=True)
        else:
            sink.write(key, data, if_match=before.etag)
    except ConflictError as error:
        if sink.read(key) == data:
            return  # an earlier try of ours, or another run of the same job
        raise ConflictError(
            f"{sink.url} was published by someone else while this job ran; their dataset is untouched",
            mend="run again with --overwrite or --append, or choose another place",
        ) from error


def _manifest_entries(shards: Iterable[ShardInfo], crcs: Mapping[str, int | None]) -> Iterator[ManifestEntry]:
    for shard in shards:
        file = shard.stored
        yield ManifestEntry(
            key=file.basename,
            bytes=file.bytes,
            sha256=file.hashes["sha256"],
            crc32c=crcs.get(shard.raw.basename),
            samples=shard.samples,
        )


def _known_crcs(sink: Sink, prefix: str, before: Current) -> dict[str, int | None]:
    """CRC of the shards that are there, from their manifest, by the name of the raw file."""
    assert before.index is not None
    name = before.index.extra.get("manifest")
    missing = [shard.stored.basename for shard in before.index.shards if "sha256" not in shard.stored.hashes]
    if missing or not isinstance(name, str):
        raise DatasyncError(
            f"{sink.url}/{prefix} was not written by this tool: it has no manifest",
            mend="shard it again as one dataset: datasync shard OLD NEW --format mds",
        )
    manifest = Manifest.from_parquet(sink.read(prefix + name), where=f"{sink.url}/{prefix}{name}")
    stored = {entry.key: entry.crc32c for entry in manifest.entries}
    return {shard.raw.basename: stored.get(shard.stored.basename) for shard in before.index.shards}


def published_now(prefix: str, index: Index) -> Published:
    """The dataset that is there, in the words of `publish`."""
    return Published(
        prefix=prefix,
        version=str(index.extra.get("version", "")),
        samples=index.samples,
        shards=len(index.shards),
        raw_bytes=sum(shard.raw.bytes for shard in index.shards),
        stored_bytes=sum(shard.stored.bytes for shard in index.shards),
    )


def stored_name(entry: Mapping[str, Any]) -> str:
    """The stored file of a record's entry."""
    name: str = (entry["shard"]["zip_data"] or entry["shard"]["raw_data"])["basename"]
    return name


def entries_of(records: Records, split: str) -> Iterator[Mapping[str, Any]]:
    """The entries of the shards of one split, in the order of the tasks."""
    for number in sorted(records):
        yield from records[number]["shards"].get(split, ())


def quarantine_of(records: Records) -> Iterator[Mapping[str, Any]]:
    """The entries of the shards of bad rows, in the order of the tasks."""
    for number in sorted(records):
        yield from records[number]["quarantine"]
