"""Copies inside one endpoint: the bytes stay there.

One request up to 5 GiB, parts of 1 GiB beyond. The source is pinned by its ETag, so a source that changes
meanwhile is a `ConflictError`, not a mixture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from datasync.errors import StoreError
from datasync.storage import s3_xml
from datasync.storage.base import ObjectInfo
from datasync.storage.sigv4 import encode_path

if TYPE_CHECKING:
    from datasync.storage.s3 import S3Store

_ONE_COPY_BYTES = 5 << 30
_PART_BYTES = 1 << 30


def copied(source: S3Store, source_key: str, target: S3Store, key: str) -> ObjectInfo:
    """The object under its new key."""
    info = source.stat(source_key)
    headers = {"x-amz-copy-source": encode_path(f"/{source.bucket}/{source.full_key(source_key)}")}
    if info.etag:
        headers["x-amz-copy-source-if-match"] = f'"{info.etag}"'
    if info.bytes > _ONE_COPY_BYTES:
        _copy_parts(headers, info.bytes, target, key)
    else:
        reply = target.api.call("PUT", target.full_key(key), headers=headers)
        # A copy that takes long is answered with 200 at once; the body then says how it ended.
        s3_xml.parse(reply.body, "CopyObjectResult", where=target.endpoint)
    found = target.stat(key)
    if found.bytes != info.bytes:
        raise StoreError(
            f"{target.url}/{key} has {found.bytes} bytes after a copy of {info.bytes}", mend="copy it again"
        )
    return found


def _copy_parts(headers: dict[str, str], size: int, target: S3Store, key: str) -> None:
    from datasync.storage.s3_upload import S3Upload

    full = target.full_key(key)
    upload = S3Upload.begin(target, key, size)
    tags = {}
    try:
        for number, start in enumerate(range(0, size, _PART_BYTES), 1):
            span = f"bytes={start}-{min(start + _PART_BYTES, size) - 1}"
            query = {"uploadId": upload.upload_id, "partNumber": str(number)}
            asked = {**headers, "x-amz-copy-source-range": span}
            reply = target.api.call("PUT", full, query=query, headers=asked)
            root = s3_xml.parse(reply.body, "CopyPartResult", where=target.endpoint)
            etag, crc = root.text("ETag").strip('"'), root.text("ChecksumCRC32C")
            tags[number] = f"{etag}:{crc}" if crc else etag
        upload.complete(tags)
    except BaseException:
        upload.abort()
        raise
