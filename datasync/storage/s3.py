"""S3, of Amazon or of anybody who imitates it.

An object is one PUT or one multipart upload that is completed last, so it is visible only when complete
(invariant 2). Every write carries a CRC-32C that the server checks, or an MD5 where the server knows no CRC;
every read is checked for its length, pinned to the version that it began with, and compared with the CRC that
the server keeps (invariant 8). What an endpoint can do is found out once, by trying (`s3_probe`).

Requests are made by `s3_api`, without boto3: moving a GiB through boto3 costs several times the CPU.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from datasync.errors import (
    ConflictError,
    CorruptError,
    NotFoundError,
    StoreError,
    TransientError,
    UnsupportedError,
    UsageError,
)
from datasync.storage import http1, s3_xml
from datasync.storage.base import Abilities, Buffer, Filled, ObjectInfo, Store, Upload, UploadInfo
from datasync.storage.http1 import Response
from datasync.storage.keys import check_key, check_prefix, join
from datasync.storage.process import shared
from datasync.storage.retry import ATTEMPTS, patience, pause_before
from datasync.storage.s3_account import S3Settings
from datasync.storage.s3_api import CRC_HEADER, AmbiguousConflict, S3Api, api_of, encoded_crc
from datasync.storage.s3_probe import Traits, traits_of
from shards.digests import crc32c as crc32c_of

ONE_PUT_BYTES = 64 << 20
_DELETE_BATCH = 1000
_PIECE_BYTES = 256 << 10  # so that what came last is still in the processor's cache when it is hashed

# Keys that some endpoints change, by a harmless one of the same kind.
_SAMPLES = {"a\\b": re.compile(r"\\"), "a//b": re.compile(r"//|^/"), "a/": re.compile(r"/$")}
_CHANGED_BY_SOME = re.compile(r"\\|//|^/|/$")
_NO_XML = re.compile(r"[\x00-\x08\x0b\x0c\x0d\x0e-\x1f\ufffe\uffff]")  # cannot be said in XML 1.0


class S3Store:
    """Objects below a prefix of a bucket; make it with `open_store`.

    Args:
        bucket (str): The bucket.
        prefix (str): The root inside the bucket, without slashes at its ends.
        settings (S3Settings): How to reach it.
    """

    def __init__(self, bucket: str, prefix: str, settings: S3Settings) -> None:
        self.bucket = bucket
        self.prefix = prefix
        self.settings = settings

    @classmethod
    def open(cls, bucket: str, prefix: str, **settings: Any) -> S3Store:
        """The store at ``s3://bucket/prefix``.

        Raises:
            UsageError: The bucket or a setting cannot be right.
        """
        if not bucket or "@" in bucket or ":" in bucket:
            raise UsageError("an S3 URL needs a bucket, and no keys in it", mend="write s3://bucket/prefix")
        return cls(bucket, check_prefix(prefix, where=f"s3://{bucket}"), S3Settings(**settings))

    @property
    def url(self) -> str:
        return f"s3://{join(self.bucket, self.prefix) if self.prefix else self.bucket}"

    @property
    def endpoint(self) -> str:
        """The URL of the server."""
        return self.api.endpoint

    @property
    def api(self) -> S3Api:
        """This process's way to the bucket."""
        return api_of(self.settings, self.bucket)

    def __repr__(self) -> str:
        return f"S3Store({self.url!r}, endpoint={self.settings.endpoint!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, S3Store):
            return NotImplemented
        return (self.bucket, self.prefix, self.settings) == (other.bucket, other.prefix, other.settings)

    def __hash__(self) -> int:
        return hash((self.bucket, self.prefix, self.settings))

    def child(self, prefix: str) -> S3Store:
        inner = check_prefix(prefix, where=self.url)
        return S3Store(self.bucket, join(self.prefix, inner) if inner else self.prefix, self.settings)

    def traits(self) -> Traits:
        """What the endpoint can do, in full."""
        return traits_of(self.api, self.prefix)

    def abilities(self) -> Abilities:
        return self.traits().abilities()

    def full_key(self, key: str) -> str:
        """The key in the bucket."""
        return join(self.prefix, check_key(key, where=self.url))

    # Reading

    def stat(self, key: str) -> ObjectInfo:
        reply = self.api.call("HEAD", self.full_key(key), headers={"x-amz-checksum-mode": "ENABLED"})
        return _described(key, reply.headers)

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        from datasync.storage.s3_list import listed

        return listed(self.api, self.prefix, prefix, after)

    def read(self, key: str, *, start: int = 0, length: int | None = None, etag: str | None = None) -> bytes:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with self.stream(key, start=start, length=length, etag=etag, chunk=1 << 40) as pieces:
                    parts = [bytes(piece) for piece in pieces]
                return parts[0] if len(parts) == 1 else b"".join(parts)
            except CorruptError:
                if attempt == ATTEMPTS:
                    raise
                patience().sleep(pause_before(attempt))
        raise AssertionError("unreachable")

    def read_into(
        self,
        key: str,
        buffer: memoryview,
        *,
        start: int | None = None,
        etag: str | None = None,
        sha256: bool = False,
    ) -> Filled:
        length = None if start is None else len(buffer)

        def take(response: Response, offset: int) -> Buffer:
            at = offset - (start or 0)
            room = buffer[at : at + _PIECE_BYTES]
            return room[: response.read_into(room)] if room else response.read(1)

        for attempt in range(1, ATTEMPTS + 1):
            try:
                with self._opened(key, start or 0, length, etag) as body:
                    digest, size = hashlib.sha256(), 0
                    if body is None:
                        return Filled(bytes=0, crc32c=0, sha256=digest.hexdigest() if sha256 else None)
                    if body.size is not None and body.size > len(buffer):
                        return Filled(bytes=body.size, crc32c=0)
                    for piece in body.pieces(take, with_crc=True):
                        size += len(piece)
                        if sha256:
                            digest.update(piece)
                    found = digest.hexdigest() if sha256 else None
                    return Filled(bytes=size, crc32c=body.crc32c, sha256=found, checked=body.checked)
            except CorruptError:
                if attempt == ATTEMPTS:
                    raise
                patience().sleep(pause_before(attempt))
        raise AssertionError("unreachable")

    @contextlib.contextmanager
    def stream(
        self,
        key: str,
        *,
        start: int = 0,
        length: int | None = None,
        etag: str | None = None,
        chunk: int = 1 << 20,
    ) -> Iterator[Iterator[Buffer]]:
        if length == 0:
            yield iter(())
            return
        with self._opened(key, start, length, etag) as body:
            yield iter(()) if body is None else body.pieces(lambda response, offset: response.read(chunk))

    @contextlib.contextmanager
    def _opened(self, key: str, start: int, length: int | None, etag: str | None) -> Iterator[_Body | None]:
        """The object's body, or that of a range; None where the range begins at the end, or after it."""
        full = self.full_key(key)
        headers = {"x-amz-checksum-mode": "ENABLED"}
        if etag is not None:
            headers["If-Match"] = f'"{etag}"'
        if start or length is not None:
            headers["Range"] = f"bytes={start}-" if length is None else f"bytes={start}-{start + length - 1}"
        with contextlib.ExitStack() as stack:
            try:
                response = stack.enter_context(self.api.open("GET", full, headers=headers))
            except StoreError as error:
                if "InvalidRange" not in error.message:
                    raise
                yield None
                return
            yield _Body(self.api, full, response, stack, start, length)

    # Writing

    def write(
        self,
        key: str,
        data: Buffer,
        *,
        crc32c: int | None = None,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> ObjectInfo:
        self._check_kept(key)
        full = self.full_key(key)
        body = memoryview(data).cast("B")
        headers = self.conditions(if_absent=if_absent, if_match=if_match)
        value = crc32c_of(body) if crc32c is None else crc32c
        headers |= self.integrity(body, value, full)
        try:
            reply = self.api.call("PUT", full, headers=headers, body=body)
        except AmbiguousConflict as error:
            return self._won(key, body, error)
        except NotFoundError as error:
            if if_match is None or not self.api.known:
                raise
            raise ConflictError(f"{self.api.what(full)} is gone", mend="look at it again") from error
        return ObjectInfo(
            key=key,
            bytes=len(body),
            etag=_etag(reply.headers),
            crc32c=value if CRC_HEADER in headers else None,
        )

    def _check_kept(self, key: str) -> None:
        """Refuse a key that this endpoint would change, perhaps into that of another object: found by trying.

        Raises:
            StoreError: Imitators that keep objects as files take ``\\`` and ``//`` for ``/``.
        """
        if not _CHANGED_BY_SOME.search(key) or self.api.account.is_aws:
            return
        for sample, pattern in _SAMPLES.items():
            if pattern.search(key) and not shared(
                ("s3-keeps", self.endpoint, sample),
                lambda sample=sample: self._keeps(sample),  # type: ignore[misc]  # bound now
            ):
                raise StoreError(
                    f"{key!r} cannot be stored at {self.url}: {self.endpoint} would give it another name",
                    mend="rename the object, or choose another store",
                )

    def _keeps(self, sample: str) -> bool:
        """Whether an object that is written under a key like `sample` is listed and found under that key."""
        folder = f"_datasync/probe-{uuid.uuid4().hex}/"
        full = self.full_key(folder + sample)
        body = memoryview(b"x")  # an empty one may pass for a folder
        self.api.call("PUT", full, headers=self.integrity(body, crc32c_of(body), full), body=body)
        listed = [info.key for info in self.list(folder)]
        try:
            return listed == [folder + sample] and self.stat(folder + sample).bytes == len(body)
        except NotFoundError:
            return False
        finally:
            self.delete([folder + sample, *listed])

    def conditions(self, *, if_absent: bool, if_match: str | None) -> dict[str, str]:
        """Headers of a conditional write.

        Raises:
            UnsupportedError: The endpoint would ignore them.
        """
        if not if_absent and if_match is None:
            return {}
        traits = self.traits()
        if (if_absent and not traits.if_absent) or (if_match is not None and not traits.if_match):
            raise UnsupportedError(
                f"{self.endpoint} does not honour conditional writes", mend="let one writer at a time use it"
            )
        return {"If-None-Match": "*"} if if_match is None else {"If-Match": f'"{if_match}"'}

    def integrity(self, body: memoryview, crc32c: int, full: str, *, part: bool = False) -> dict[str, str]:
        """Headers by which the server checks what it receives, as an object or as a part of one."""
        traits = self.traits()
        if traits.multipart_crc if part else traits.crc32c:
            return {CRC_HEADER: encoded_crc(crc32c)}
        if crc32c_of(body) != crc32c:
            raise CorruptError(
                f"the bytes for {self.api.what(full)} are not those that were meant", mend="read them again"
            )
        digest = hashlib.md5(body, usedforsecurity=False).digest()
        return {"Content-MD5": base64.b64encode(digest).decode()}

    def _won(self, key: str, body: memoryview, conflict: ConflictError) -> ObjectInfo:
        """After an attempt with an unknown end the object is there: ours, if it has our bytes."""
        info = self.stat(key)
        if info.bytes == len(body) and self.read(key, etag=info.etag) == body:
            return info
        raise ConflictError(conflict.message, mend=conflict.mend)

    def write_file(self, key: str, path: Path, *, if_absent: bool = False) -> ObjectInfo:
        from datasync.storage.s3_upload import upload_file

        self._check_kept(key)
        size = path.stat().st_size
        if size <= ONE_PUT_BYTES or not self.traits().multipart:
            return self.write(key, path.read_bytes(), if_absent=if_absent)
        return upload_file(self, key, path, size, if_absent=if_absent)

    def begin(self, key: str, *, bytes: int) -> Upload:
        from datasync.storage.s3_upload import S3Upload

        self._check_kept(key)
        return S3Upload.begin(self, key, bytes)

    def resume(self, key: str, upload_id: str, *, bytes: int) -> Upload:
        from datasync.storage.s3_upload import S3Upload

        return S3Upload(self, key, upload_id, bytes)

    def uploads(self, prefix: str = "") -> Iterator[UploadInfo]:
        from datasync.storage.s3_upload import uploads

        return uploads(self, prefix)

    def copy(self, source: Store, source_key: str, key: str) -> ObjectInfo:
        from datasync.storage.s3_copy import copied

        if not isinstance(source, S3Store) or source.endpoint != self.endpoint:
            raise UnsupportedError(
                f"{source.url} and {self.url} are not at one endpoint", mend="let the bytes pass through here"
            )
        if not self.traits().server_copy:
            raise UnsupportedError(f"{self.endpoint} cannot copy", mend="let the bytes pass through here")
        self._check_kept(key)
        return copied(source, source_key, self, key)

    def delete(self, keys: Iterable[str]) -> None:
        batch: list[str] = []
        for key in keys:
            batch.append(self.full_key(key))
            if len(batch) == _DELETE_BATCH:
                self._delete(batch)
                batch = []
        if batch:
            self._delete(batch)

    def _delete(self, full_keys: Sequence[str]) -> None:
        batched = self.traits().batch_delete if len(full_keys) > 1 else False
        alone = [full for full in full_keys if not batched or _NO_XML.search(full)]
        for full in alone:
            with contextlib.suppress(NotFoundError):
                self.api.call("DELETE", full)
        full_keys = [full for full in full_keys if batched and not _NO_XML.search(full)]
        if not full_keys:
            return
        body = s3_xml.delete_request(full_keys)
        digest = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
        headers = {"Content-MD5": digest, "Content-Type": "application/xml"}
        reply = self.api.call("POST", query={"delete": ""}, headers=headers, body=body)
        failures = s3_xml.delete_failures(reply.body)
        if failures:
            full, why = failures[0]
            raise StoreError(
                f"{len(failures)} objects could not be deleted, the first is {self.api.what(full)}: {why}",
                mend="allow deletion in the bucket's policy",
            )


class _Body:
    """The bytes of an answer to GET; where a connection breaks, the rest of that version is asked for."""

    def __init__(
        self,
        api: S3Api,
        full: str,
        response: Response,
        stack: contextlib.ExitStack,
        start: int,
        length: int | None,
    ) -> None:
        self._api, self._full, self._response, self._stack = api, full, response, stack
        ranged = start > 0 or length is not None
        if ranged and _range_start(response) != start:
            raise UnsupportedError(f"{api.endpoint} ignores ranges", mend="read whole objects from it")
        size = _whole_size(response, ranged)
        self._start = start
        self._end = size if length is None or size is None else min(start + length, size)
        self._expected = _stored_crc(response.headers) if not ranged else None
        self._version = response.headers.get("etag")
        self.size = None if self._end is None else self._end - start
        self.crc32c = 0

    @property
    def checked(self) -> bool:
        """Whether all pieces together are compared with what the server keeps."""
        return self._expected is not None

    def pieces(self, take: Callable[[Response, int], Buffer], *, with_crc: bool = False) -> Iterator[Buffer]:
        """Every piece that `take` reads at an offset of the object, none given out before it was compared.

        With `with_crc`, `crc32c` is that of all pieces at the end, also where the server keeps none.
        """
        what, offset, failures = self._api.what(self._full), self._start, 0
        with_crc = with_crc or self._expected is not None
        while True:
            try:
                piece = take(self._response, offset)
            except OSError as error:
                failures += 1
                self._reopen(offset, failures, error)
                continue
            if not piece:
                break
            failures = 0
            patience().moved()
            offset += len(piece)
            if with_crc:
                self.crc32c = crc32c_of(piece, self.crc32c)
            if self._expected is not None and offset == self._end and self.crc32c != self._expected:
                raise CorruptError(
                    f"{what} from {self._api.endpoint} has crc32c {self.crc32c:08x}, the server says"
                    f" {self._expected:08x}",
                    mend="read it again; if it stays, the object is damaged at the server",
                )
            yield piece
        if self._end is not None and offset != self._end:
            raise TransientError(
                f"{what} ended after {offset - self._start} of {self._end - self._start} bytes",
                mend="run again",
            )

    def _reopen(self, offset: int, failures: int, error: OSError) -> None:
        failure = self._api.network_error(error, self._full)
        bearing, pause = patience(), pause_before(failures)
        silent = isinstance(error, TimeoutError)
        bearing.failed(waited=min(bearing.left(), http1.STALL_SECONDS) if silent else 0.0)
        if self._end is None or not self._version or failures >= ATTEMPTS or not bearing.allows(pause):
            raise failure from error
        bearing.sleep(pause)
        self._stack.pop_all().close()
        again = {"Range": f"bytes={offset}-{self._end - 1}", "If-Match": self._version}
        self._response = self._stack.enter_context(self._api.open("GET", self._full, headers=again))
        if _range_start(self._response) != offset:
            raise failure from error


def _described(key: str, headers: dict[str, str]) -> ObjectInfo:
    modified = headers.get("last-modified")
    return ObjectInfo(
        key=key,
        bytes=int(headers.get("content-length", "0")),
        etag=_etag(headers),
        mtime=parsedate_to_datetime(modified).timestamp() if modified else None,
        crc32c=_stored_crc(headers),
    )


def _etag(headers: dict[str, str]) -> str | None:
    found = headers.get("etag", "").removeprefix("W/").strip('"')
    return found or None


def _stored_crc(headers: dict[str, str]) -> int | None:
    """The whole object's CRC-32C; that of a multipart upload may be one over its parts, which says nothing
    here."""
    found = headers.get(CRC_HEADER, "")
    if not found or "-" in found or headers.get("x-amz-checksum-type", "FULL_OBJECT") != "FULL_OBJECT":
        return None
    try:
        raw = base64.b64decode(found, validate=True)
    except ValueError:
        return None
    return int.from_bytes(raw, "big") if len(raw) == 4 else None


def _range_start(response: Response) -> int | None:
    """Where the part in the answer begins; some servers give a part with the status of the whole."""
    found = response.headers.get("content-range", "").removeprefix("bytes").strip().partition("-")[0]
    return int(found) if found.isdigit() else None


def _whole_size(response: Response, ranged: bool) -> int | None:
    """The size of the whole object, from the head of an answer to a part of it or to all."""
    if not ranged:
        return response.length
    total = response.headers.get("content-range", "").rpartition("/")[2]
    return int(total) if total.isdigit() else None
