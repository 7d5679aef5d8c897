"""Multipart uploads: parts with a CRC each, an object that appears when it is completed.

A part's tag is its ETag and, where the object's CRC will be one over its parts' CRCs (COMPOSITE), its
CRC-32C: `<etag>` or `<etag>:<base64>`. That is what `complete` must repeat and what `parts` reads back from
the server, so a killed upload goes on from there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from datasync.errors import ConflictError, CorruptError, NotFoundError, StoreError
from datasync.storage import s3_xml
from datasync.storage.base import Buffer, ObjectInfo, UploadInfo
from datasync.storage.retry import inheriting
from datasync.storage.s3_api import CRC_HEADER, AmbiguousConflict
from shards.digests import crc32c as crc32c_of

if TYPE_CHECKING:
    from datasync.storage.s3 import S3Store

_LEAST_PART = 16 << 20
_MOST_PARTS = 10_000
_AT_ONCE = 4
_MIB = 1 << 20


def part_bytes_for(size: int) -> int:
    """Bytes of a part for an object of `size` bytes: whole MiB, and at most 10,000 parts."""
    least = -(-size // _MOST_PARTS)
    return max(_LEAST_PART, -(-least // _MIB) * _MIB)


class S3Upload:
    """One upload; see `datasync.storage.base.Upload`."""

    def __init__(self, store: S3Store, key: str, upload_id: str, size: int) -> None:
        self.key = key
        self.upload_id = upload_id
        self.part_bytes = part_bytes_for(size)
        self._store = store
        self._full = store.full_key(key)
        self._size = size
        self._query = {"uploadId": upload_id}

    @classmethod
    def begin(cls, store: S3Store, key: str, size: int) -> S3Upload:
        full = store.full_key(key)
        headers = {}
        mode = store.traits().multipart_crc
        if mode:
            headers["x-amz-checksum-algorithm"] = "CRC32C"
            headers["x-amz-checksum-type"] = mode
        reply = store.api.call("POST", full, query={"uploads": ""}, headers=headers)
        root = s3_xml.parse(reply.body, "InitiateMultipartUploadResult", where=store.endpoint)
        return cls(store, key, root.text("UploadId"), size)

    def put(self, number: int, data: Buffer, *, crc32c: int | None = None) -> str:
        body = memoryview(data).cast("B")
        value = crc32c_of(body) if crc32c is None else crc32c
        headers = self._store.integrity(body, value, self._full, part=True)
        query = {**self._query, "partNumber": str(number)}
        reply = self._store.api.call("PUT", self._full, query=query, headers=headers, body=body)
        with_crc = self._store.traits().multipart_crc == "COMPOSITE"
        return _tag(reply.headers.get("etag", ""), headers.get(CRC_HEADER) if with_crc else None)

    def wait_turn(self, number: int) -> None:
        """Parts go in any order."""

    def give_up(self) -> None:
        """Nothing waits for a part here."""

    def parts(self) -> dict[int, tuple[str, int]]:
        found: dict[int, tuple[str, int]] = {}
        query = {**self._query, "max-parts": "1000"}
        with_crc = self._store.traits().multipart_crc == "COMPOSITE"
        while True:
            body = self._store.api.call("GET", self._full, query=query).body
            root = s3_xml.parse(body, "ListPartsResult", where=self._store.endpoint)
            for part in root.all("Part"):
                crc = part.text("ChecksumCRC32C") if with_crc else ""
                if with_crc and not crc:
                    continue  # without its CRC the part cannot be completed: it is sent again
                found[int(part.text("PartNumber"))] = _tag(part.text("ETag"), crc), int(part.text("Size"))
            marker = root.text("NextPartNumberMarker")
            if root.text("IsTruncated") != "true" or not marker or marker == query.get("part-number-marker"):
                return dict(sorted(found.items()))
            query["part-number-marker"] = marker

    def complete(
        self, tags: dict[int, str], *, if_absent: bool = False, if_match: str | None = None
    ) -> ObjectInfo:
        traits = self._store.traits()
        headers = self._store.conditions(if_absent=if_absent, if_match=if_match)
        if headers and not traits.conditional_complete:
            self._check_by_hand(if_absent=if_absent, if_match=if_match)
            headers = {}
        if traits.multipart_crc:
            headers["x-amz-checksum-type"] = traits.multipart_crc
        parts = [(number, *_untag(tags[number])) for number in sorted(tags)]
        body = s3_xml.complete_request(parts)
        expected = _etag_of_parts([etag for _, etag, _ in parts])
        try:
            reply = self._store.api.call("POST", self._full, query=self._query, headers=headers, body=body)
        except (NotFoundError, AmbiguousConflict) as error:
            # An attempt with an unknown end may have completed it: then the object is there, of our parts.
            return self._completed(expected, error)
        # A server that answers 200 before it is done says in the body whether it failed.
        s3_xml.parse(reply.body, "CompleteMultipartUploadResult", where=self._store.endpoint)
        info = self._store.stat(self.key)
        if info.bytes != self._size:
            raise CorruptError(
                f"{self._store.url}/{self.key} has {info.bytes} bytes after its upload, not {self._size}",
                mend="run again",
            )
        return info

    def abort(self) -> None:
        try:
            self._store.api.call("DELETE", self._full, query=self._query)
        except NotFoundError:
            return

    def _completed(self, expected: str | None, error: StoreError) -> ObjectInfo:
        try:
            info = self._store.stat(self.key)
        except NotFoundError:
            raise error from None
        if info.bytes == self._size and info.etag == expected:
            return info
        if isinstance(error, ConflictError):
            raise ConflictError(error.message, mend=error.mend) from None
        raise error

    def _check_by_hand(self, *, if_absent: bool, if_match: str | None) -> None:
        """Where only plain writes can be conditional: look shortly before, which leaves a small window."""
        try:
            found = self._store.stat(self.key).etag
        except NotFoundError:
            found = None
        if (if_absent and found is not None) or (if_match is not None and found != if_match):
            raise ConflictError(
                f"{self._store.url}/{self.key} exists already or has changed", mend="look at it again"
            )


def upload_file(store: S3Store, key: str, path: Path, size: int, *, if_absent: bool) -> ObjectInfo:
    """A local file in parts, a few at once; after a failure nothing is left at the server."""
    upload = S3Upload.begin(store, key, size)
    step = upload.part_bytes

    def send(number: int) -> str:
        with open(path, "rb") as file:
            file.seek((number - 1) * step)
            return upload.put(number, file.read(step))

    numbers = range(1, -(-size // step) + 1)
    try:
        with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
            tags = dict(zip(numbers, pool.map(inheriting(send), numbers), strict=True))
        return upload.complete(tags, if_absent=if_absent)
    except BaseException:
        upload.abort()
        raise


def uploads(store: S3Store, prefix: str) -> Iterator[UploadInfo]:
    """The uploads below the store's root that were begun and not completed."""
    base = f"{store.prefix}/" if store.prefix else ""
    query = {"uploads": "", "prefix": base + prefix}
    while True:
        body = store.api.call("GET", query=query).body
        root = s3_xml.parse(body, "ListMultipartUploadsResult", where=store.endpoint)
        for item in root.all("Upload"):
            full, begun = item.text("Key"), item.text("Initiated")
            if full.startswith(base + prefix):
                started = datetime.fromisoformat(begun).timestamp() if begun else None
                yield UploadInfo(key=full[len(base) :], upload_id=item.text("UploadId"), started=started)
        marker = {
            "key-marker": root.text("NextKeyMarker"),
            "upload-id-marker": root.text("NextUploadIdMarker"),
        }
        if root.text("IsTruncated") != "true" or not marker["key-marker"] or marker.items() <= query.items():
            return
        query |= marker


def _tag(etag: str, crc: str | None) -> str:
    plain = etag.strip('"')
    return f"{plain}:{crc}" if crc else plain


def _untag(tag: str) -> tuple[str, str | None]:
    etag, _, crc = tag.partition(":")
    return etag, crc or None


def _etag_of_parts(etags: list[str]) -> str | None:
    """The ETag that S3 gives to an object of these parts."""
    try:
        joined = b"".join(bytes.fromhex(etag) for etag in etags)
    except ValueError:
        return None
    return f"{hashlib.md5(joined, usedforsecurity=False).hexdigest()}-{len(etags)}"
