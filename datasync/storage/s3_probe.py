"""What an S3 endpoint can do: found by trying, since imitators differ and none says so.

Before the first write, a few small objects are written below `_datasync/probe-…` of the root, each in a way
that a given ability must refuse or accept, and removed again. Only what was seen is recorded: a yes is a
write that was refused for the right reason or bytes that came back right; a no has to be given several times;
and a failure of the network or of the keys is no answer, it ends the probe. What a probe that was killed has
left is removed by the next one beside it, once it is old. The result is kept a week in the
user's cache folder, one file for each endpoint. A loopback endpoint is asked anew by every process: its port
says nothing about what listens there. Amazon itself is known and not asked.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import logging
import os
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from datasync.errors import (
    ConflictError,
    CorruptError,
    DatasyncError,
    DeniedError,
    StoreError,
    TransientError,
)
from datasync.storage import s3_xml
from datasync.storage.base import Abilities
from datasync.storage.keys import join
from datasync.storage.process import shared
from datasync.storage.retry import LAST_SECONDS, inheriting, one_thing
from datasync.storage.s3_api import CRC_HEADER, AmbiguousConflict, S3Api, encoded_crc
from datasync.storage.s3_errors import ForbiddenError
from shards.digests import crc32c

_CACHE_SECONDS = 7 * 24 * 3600.0
_CACHE_FORMAT = 1
_BODY = b"datasync asks what this endpoint can do"
_RACERS = 4
_TRIES = 3
_LEFT_SECONDS = 900.0  # a probe takes seconds; what is older was left by a kill

# Failures that say nothing of what the endpoint can do: the network's, the load's, the keys'.
_NO_ANSWER = (TransientError, DeniedError)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What an endpoint can do, in more detail than `Abilities`.

    Args:
        if_absent (bool): ``If-None-Match: *`` on PUT has exactly one winner.
        if_match (bool): ``If-Match`` on PUT.
        conditional_complete (bool): The same on CompleteMultipartUpload.
        crc32c (bool): A wrong CRC-32C is refused.
        multipart (bool): Multipart uploads.
        multipart_crc (str): How parts' CRCs become the object's: ``FULL_OBJECT``, ``COMPOSITE``, or not at
            all.
        server_copy (bool): CopyObject.
        batch_delete (bool): DeleteObjects.
        ranges (bool): Range on GET.
    """

    if_absent: bool
    if_match: bool
    conditional_complete: bool
    crc32c: bool
    multipart: bool
    multipart_crc: str
    server_copy: bool
    batch_delete: bool
    ranges: bool

    def abilities(self) -> Abilities:
        """The part that every store has."""
        return Abilities(
            if_absent=self.if_absent,
            if_match=self.if_match,
            crc32c=self.crc32c,
            multipart=self.multipart,
            server_copy=self.server_copy,
            ranges=self.ranges,
        )


AMAZON = Traits(
    if_absent=True,
    if_match=True,
    conditional_complete=True,
    crc32c=True,
    multipart=True,
    multipart_crc="FULL_OBJECT",
    server_copy=True,
    batch_delete=True,
    ranges=True,
)

READ_ONLY = Traits(
    if_absent=False,
    if_match=False,
    conditional_complete=False,
    crc32c=False,
    multipart=False,
    multipart_crc="",
    server_copy=False,
    batch_delete=False,
    ranges=True,
)


def traits_of(api: S3Api, prefix: str) -> Traits:
    """What the endpoint of `api` can do."""
    if api.account.is_aws:
        return AMAZON
    try:
        return shared(("s3-traits", api.endpoint), lambda: _found(api, prefix))
    except ForbiddenError as error:
        # Who may not write needs no abilities to write; not kept, since another prefix may allow it.
        _log.info("%s: not probed: %s", api.endpoint, error.message)
        return READ_ONLY


def cache_folder() -> Path:
    """Where this user's caches are."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "datasync"


def _found(api: S3Api, prefix: str) -> Traits:
    path = None if _is_loopback(api.endpoint) else _cache_file(api.endpoint)
    cached = _cached(path) if path else None
    if cached is not None:
        return cached
    found = probe(api, prefix)
    _log.info("%s can do: %s", api.endpoint, found)
    if path:
        _keep(path, api.endpoint, found)
    return found


def probe(api: S3Api, prefix: str) -> Traits:
    """Ask the endpoint by trying; what was written is removed again."""
    asking = _Probe(api, prefix)
    try:
        found = asking.run()
    except BaseException:
        with one_thing(LAST_SECONDS, None, default=LAST_SECONDS):
            asking.clean(logging.INFO)  # why is told by the error itself; mostly nothing was written
        raise
    asking.sweep()
    asking.clean(logging.WARNING)
    return found


class _Probe:
    """One series of questions below one folder of its own."""

    def __init__(self, api: S3Api, root: str) -> None:
        self._api = api
        self._root = root
        self._name = f"_datasync/probe-{uuid.uuid4().hex}"
        self._folder = join(root, self._name)
        self._used: set[str] = set()

    def run(self) -> Traits:
        self._put("plain")
        crc32c = _certainly(self._checks_crc)
        multipart, multipart_crc, conditional_complete = self._multipart(crc32c)
        return Traits(
            if_absent=_certainly(lambda: self._keeps("plain", {"If-None-Match": "*"}) and self._one_winner()),
            if_match=_certainly(
                lambda: self._keeps("plain", {"If-Match": f'"{"0" * 32}"'}) and self._replaces()
            ),
            conditional_complete=conditional_complete,
            crc32c=crc32c,
            multipart=multipart,
            multipart_crc=multipart_crc,
            server_copy=_certainly(self._copies),
            batch_delete=_certainly(self._deletes_batches),
            ranges=_certainly(self._ranges),
        )

    def clean(self, level: int) -> None:
        for name in self._used:
            try:
                self._api.call("DELETE", self._key(name))
            except DatasyncError as error:
                _log.log(level, "%s was left behind: %s", self._api.what(self._key(name)), error.message)

    def sweep(self) -> None:
        """Remove what killed probes have left; how old it is, is told by the server's own clock."""
        from datasync.storage.s3_list import listed

        try:
            found = list(listed(self._api, self._root, "_datasync/probe-", ""))
            now = max((info.mtime or 0.0 for info in found if info.key.startswith(self._name)), default=0.0)
            for info in found:
                if not info.key.startswith(self._name) and now - (info.mtime or now) > _LEFT_SECONDS:
                    self._api.call("DELETE", join(self._root, info.key))
        except DatasyncError as error:
            _log.info("%s: what other probes left was not looked at: %s", self._api.endpoint, error.message)

    def _key(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def _put(self, name: str, headers: dict[str, str] | None = None) -> str:
        """Write the body, with an MD5: damage on the way would later look like a lack of ability."""
        self._used.add(name)
        headers = {"Content-MD5": _md5(_BODY), **(headers or {})}
        reply = self._api.call("PUT", self._key(name), headers=headers, body=_BODY)
        return reply.headers.get("etag", "")

    def _checks_crc(self) -> bool:
        """Whether a right CRC is taken and a wrong one refused."""
        # Refused twice: once may have been a body damaged on its way.
        return self._takes_crc(_body_crc()) and not any(self._takes_crc("AAAAAA==") for _ in range(2))

    def _takes_crc(self, crc: str) -> bool:
        try:
            self._put("crc", {CRC_HEADER: crc})
        except _NO_ANSWER:
            raise
        except DatasyncError:
            return False
        return True

    def _keeps(self, name: str, condition: dict[str, str]) -> bool:
        """Whether a write is refused because its condition does not hold."""
        try:
            self._put(name, condition)
        except ConflictError:
            return True
        except (*_NO_ANSWER, CorruptError):
            raise
        except DatasyncError:
            return False  # conditions are no words that it knows
        return False

    def _replaces(self) -> bool:
        """Whether a write is done because its condition holds."""
        etag = self._put("plain")
        try:
            self._put("plain", {"If-Match": etag})
        except AmbiguousConflict:
            return True  # the write whose answer was lost
        except (*_NO_ANSWER, CorruptError):
            raise
        except DatasyncError:
            return False
        return bool(etag)

    def _one_winner(self) -> bool:
        """Whether one of several who create an object at once succeeds.

        Raises:
            TransientError: The winner's answer was lost every time.
        """

        def race(name: str) -> bool | None:
            try:
                self._put(name, {"If-None-Match": "*"})
            except AmbiguousConflict:
                return None
            except ConflictError:
                return False
            return True

        for _ in range(_TRIES):
            name = f"race-{uuid.uuid4().hex[:8]}"
            with ThreadPoolExecutor(max_workers=_RACERS) as pool:
                results = list(pool.map(inheriting(race), [name] * _RACERS))
            winners = results.count(True)
            if winners == 1 or None not in results:
                return winners == 1
            _log.info("%s: %d winners in a race of %s", self._api.endpoint, winners, results)
            if winners > 1:
                return False
        raise TransientError(
            f"{self._api.endpoint} lost the answers by which its abilities are found", mend="run again"
        )

    def _copies(self) -> bool:
        self._used.add("copy")
        source = f"/{self._api.bucket}/{self._key('plain')}"
        try:
            self._api.call("PUT", self._key("copy"), headers={"x-amz-copy-source": source})
            return self._api.call("GET", self._key("copy")).body == _BODY
        except _NO_ANSWER:
            raise
        except DatasyncError:
            return False

    def _ranges(self) -> bool:
        reply = self._api.call("GET", self._key("plain"), headers={"Range": "bytes=1-2"})
        return reply.body == _BODY[1:3] and "content-range" in reply.headers

    def _deletes_batches(self) -> bool:
        self._put("batch")
        body = s3_xml.delete_request([self._key("batch")])
        try:
            headers = {"Content-MD5": _md5(body)}
            reply = self._api.call("POST", query={"delete": ""}, headers=headers, body=body)
            return not s3_xml.delete_failures(reply.body)
        except ForbiddenError:
            return False  # these keys may not, but may perhaps delete one by one
        except _NO_ANSWER:
            raise
        except DatasyncError:
            return False

    def _multipart(self, crc32c: bool) -> tuple[bool, str, bool]:
        """Whether there are uploads, how CRCs of parts are kept, and whether completing can be
        conditional."""
        for mode in ("FULL_OBJECT", "COMPOSITE", "") if crc32c else ("",):
            if self._uploads("multipart", mode):
                return True, mode, self._completes_conditionally(mode)
        return False, "", False

    def _uploads(self, name: str, mode: str) -> bool:
        """Whether an upload goes through; a lost answer looks like a refusal, so one proves nothing."""

        def goes_through() -> bool:
            try:
                self._upload(name, mode, {})
            except _NO_ANSWER:
                raise
            except DatasyncError as error:
                _log.info("an upload (%s): %s", mode or "without CRC", error.message)
                return False
            return True

        return _certainly(goes_through)

    def _completes_conditionally(self, mode: str) -> bool:
        """Whether an upload over an existing object is refused where it must be."""

        def refused() -> bool:
            try:
                self._upload("multipart", mode, {"If-None-Match": "*"})
            except ConflictError:
                return True
            except _NO_ANSWER:
                raise
            except DatasyncError:
                return False
            return False

        return _certainly(refused)

    def _upload(self, name: str, mode: str, conditions: dict[str, str]) -> None:
        """One upload of one part."""
        self._used.add(name)
        key = self._key(name)
        declared = {"x-amz-checksum-algorithm": "CRC32C", "x-amz-checksum-type": mode} if mode else {}
        reply = self._api.call("POST", key, query={"uploads": ""}, headers=declared)
        begun = s3_xml.parse(reply.body, "InitiateMultipartUploadResult", where=self._api.endpoint)
        upload_id = begun.text("UploadId")
        try:
            crc = _body_crc() if mode else ""
            query = {"uploadId": upload_id, "partNumber": "1"}
            sent = self._api.call(
                "PUT", key, query=query, headers={CRC_HEADER: crc} if crc else {}, body=_BODY
            )
            listed_crc = crc if mode == "COMPOSITE" else None
            body = s3_xml.complete_request([(1, sent.headers.get("etag", "").strip('"'), listed_crc)])
            headers = {**conditions, **({"x-amz-checksum-type": mode} if mode else {})}
            done = self._api.call("POST", key, query={"uploadId": upload_id}, headers=headers, body=body)
            s3_xml.parse(done.body, "CompleteMultipartUploadResult", where=self._api.endpoint)
        except DatasyncError:
            self._abort(key, upload_id)
            raise
        if self._api.call("GET", key).body != _BODY:
            raise StoreError(f"{self._api.endpoint} stores other bytes than were uploaded")

    def _abort(self, key: str, upload_id: str) -> None:
        try:
            self._api.call("DELETE", key, query={"uploadId": upload_id})
        except DatasyncError as error:
            _log.warning("an upload of %s was left behind: %s", self._api.what(key), error.message)


def _certainly(ask: Callable[[], bool]) -> bool:
    """A yes at once; a no only when it was given every time."""
    return any(ask() for _ in range(_TRIES))


def _body_crc() -> str:
    return encoded_crc(crc32c(_BODY))


def _md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _is_loopback(endpoint: str) -> bool:
    host = endpoint.partition("://")[2].rpartition(":")[0] or endpoint.partition("://")[2]
    return host in ("localhost", "[::1]") or host.startswith("127.")


def _cache_file(endpoint: str) -> Path:
    return cache_folder() / "abilities" / f"{hashlib.sha256(endpoint.encode()).hexdigest()[:16]}.json"


def _cached(path: Path) -> Traits | None:
    """What was found lately; a file that says something else is no cache."""
    try:
        found = json.loads(path.read_text())
        fresh = found["format"] == _CACHE_FORMAT and 0 <= time.time() - found["probed"] < _CACHE_SECONDS
        return Traits(**found["traits"]) if fresh else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(path: Path, endpoint: str, traits: Traits) -> None:
    document = {
        "format": _CACHE_FORMAT,
        "endpoint": endpoint,
        "probed": time.time(),
        "traits": dataclasses.asdict(traits),
    }
    temp = path.with_suffix(f".{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temp.write_text(json.dumps(document, indent=1))
        temp.rename(path)
    except OSError as error:
        _log.info("the abilities of %s are not kept: %s", endpoint, error)
