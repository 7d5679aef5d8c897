"""Requests to one bucket: signed, sent, tried again, and their failures turned into our errors.

    api.call("PUT", "key", body=data)              -> Reply, body read whole
    with api.open("GET", "key") as response: ...   -> body still on the wire

What an answer may teach is learnt here, once for all requests of the process: the bucket's region, how far
the server's clock is from ours, that keys have expired and must be read again, that bodies must be signed,
that the endpoint wants less at once.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

from datasync.errors import (
    ConflictError,
    CorruptError,
    DatasyncError,
    StoreError,
    ThrottledError,
    TransientError,
)
from datasync.storage import http1, s3_errors
from datasync.storage.base import Buffer
from datasync.storage.http1 import Dropped, Origin, Pool, Response
from datasync.storage.process import shared
from datasync.storage.retry import ATTEMPTS, Gate, Patience, patience, pause_before
from datasync.storage.s3_account import Account, S3Settings
from datasync.storage.s3_errors import Answer
from datasync.storage.sigv4 import UNSIGNED, Signer, encode_path, encode_query
from shards.digests import crc32c

CRC_HEADER = "x-amz-checksum-crc32c"

_SIGNED_BODY_BYTES = 64 << 10
_SKEW_SECONDS = 30.0
_SUCCESS = (200, 204, 206)
_NOTHING: Mapping[str, str] = {}

_log = logging.getLogger(__name__)


class AmbiguousConflict(ConflictError):
    """A conditional write was refused after an attempt whose end is not known: it may have been ours that
    won."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A successful answer, read whole; header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(slots=True, kw_only=True)
class _Request:
    """One request and what its attempts have met so far."""

    method: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: memoryview
    patience: Patience
    began: float = 0.0
    attempt: int = 0
    maybe_done: bool = False
    learnt: set[str] = field(default_factory=set)


def api_of(settings: S3Settings, bucket: str) -> S3Api:
    """This process's way to a bucket."""
    return shared(("s3", settings, bucket), lambda: S3Api(settings, bucket))


class S3Api:
    """Requests to one bucket; use `api_of`."""

    def __init__(self, settings: S3Settings, bucket: str) -> None:
        self.account = shared(("s3-account", settings), lambda: Account(settings))
        self.bucket = bucket
        self.known = False  # the bucket has been seen to exist
        self._settings = settings
        self._skew = timedelta()
        self._signs_bodies = False
        self._use_region(self.account.region)

    def call(
        self,
        method: str,
        key: str = "",
        *,
        query: Mapping[str, str] = _NOTHING,
        headers: Mapping[str, str] = _NOTHING,
        body: Buffer = b"",
    ) -> Reply:
        """One request whose answer is small."""
        request = self._request(method, key, query, headers, body)
        while True:
            with ExitStack() as stack:
                response = self._until_success(stack, request)
                try:
                    content = response.read_all()
                except OSError as error:
                    self._failed(request, self._network_error(error, request))
                    continue
                request.patience.moved()
                return Reply(status=response.status, headers=response.headers, body=content)

    @contextlib.contextmanager
    def open(
        self,
        method: str,
        key: str,
        *,
        query: Mapping[str, str] = _NOTHING,
        headers: Mapping[str, str] = _NOTHING,
    ) -> Iterator[Response]:
        """One request whose answer is large; a failure while its body is read is the caller's."""
        with ExitStack() as stack:
            yield self._until_success(stack, self._request(method, key, query, headers, b""))

    def what(self, key: str) -> str:
        """An object as a URL, for messages."""
        return f"s3://{self.bucket}/{key}"

    def network_error(self, error: OSError, key: str) -> StoreError:
        """The error for a connection that did not come about, or a body that broke off."""
        return s3_errors.network_error(error, what=self.what(key), endpoint=self.endpoint)

    def _use_region(self, region: str) -> None:
        self.region = region
        self.endpoint = self.account.endpoint_for(region)
        self._signer = Signer(region)
        origin, base = _split(self.endpoint)
        addressing = self._settings.addressing or "auto"
        if addressing == "auto":
            fits = self.account.is_aws and "." not in self.bucket
            addressing = "virtual" if fits else "path"
        if addressing == "virtual":
            origin = Origin(origin.scheme, f"{self.bucket}.{origin.host}", origin.port)
            self._base = base
        else:
            self._base = f"{base}/{self.bucket}"
        bundle = self.account.ca_bundle
        self._pool = shared(("pool", origin, bundle), lambda: Pool(origin, ca_bundle=bundle))
        self._gate = shared(("gate", self.endpoint), Gate)

    def _request(
        self, method: str, key: str, query: Mapping[str, str], headers: Mapping[str, str], body: Buffer
    ) -> _Request:
        try:
            key.encode()
        except UnicodeEncodeError:
            raise StoreError(
                f"{key!r} is not UTF-8 and cannot be a key in S3", mend="rename the file at its source"
            ) from None
        view = memoryview(body).cast("B")
        return _Request(method=method, key=key, query=query, headers=headers, body=view, patience=patience())

    def _until_success(self, stack: ExitStack, request: _Request) -> Response:
        """Send until the answer is a success; `stack` then holds its connection."""
        while True:
            self._gate.wait()
            with ExitStack() as attempt:
                try:
                    response = attempt.enter_context(self._send(request))
                    if response.status in _SUCCESS:
                        self._gate.passed()
                        self.known = True
                        stack.push(attempt.pop_all())
                        return response
                    content = response.read_all(1 << 20)
                except OSError as error:
                    if isinstance(error, Dropped) and "dropped" not in request.learnt:
                        request.learnt.add("dropped")
                        request.maybe_done = True
                        continue
                    failure: DatasyncError = self._network_error(error, request)
                else:
                    answer = s3_errors.parse(response.status, response.headers, content)
                    if request.method == "HEAD":
                        answer = self._explain(answer, request)
                    if self._learn(answer, request):
                        continue
                    failure = self._error(answer, request)
            self._failed(request, failure)

    def _send(self, request: _Request) -> contextlib.AbstractContextManager[Response]:
        path = encode_path(f"{self._base}/{request.key}")
        query = encode_query(request.query) if request.query else ""
        headers = self._signed(request, path, query)
        target = f"{path}?{query}" if query else path
        request.began = time.monotonic()
        return self._pool.exchange(
            request.method, target, headers, request.body, wait=request.patience.left()
        )

    def _signed(self, request: _Request, path: str, query: str) -> Mapping[str, str]:
        keys = self.account.keys(self.endpoint)
        if keys is None:
            return request.headers
        signs = self._signs_bodies or len(request.body) <= _SIGNED_BODY_BYTES
        payload = hashlib.sha256(request.body).hexdigest() if signs else UNSIGNED
        host = self._pool.origin.netloc
        now = datetime.now(UTC) + self._skew
        return self._signer.sign(keys, request.method, host, path, query, request.headers, payload, now)

    def _failed(self, request: _Request, failure: DatasyncError) -> None:
        """Pause before the next attempt, or raise."""
        if isinstance(failure, ThrottledError):
            self._gate.slow_down()
        if isinstance(failure, ConflictError) and request.maybe_done:
            raise AmbiguousConflict(failure.message, mend=failure.mend)
        again = isinstance(failure, TransientError | CorruptError) and not _is_damaged_here(failure, request)
        request.attempt += 1
        pause = pause_before(request.attempt)
        if again:
            request.patience.failed()
        if not again or request.attempt >= ATTEMPTS or not request.patience.allows(pause):
            raise failure
        request.maybe_done = request.maybe_done or not isinstance(failure, ThrottledError | CorruptError)
        _log.info("attempt %d: %s", request.attempt, failure.message)
        request.patience.sleep(pause)

    def _learn(self, answer: Answer, request: _Request) -> bool:
        """Whether the answer says how the same request can succeed; each lesson is taken once a request."""
        region = answer.headers.get("x-amz-bucket-region", "")
        if (
            region
            and region != self.region
            and (answer.code in s3_errors.REGION or answer.status in (301, 307, 400))
        ):
            return self._once("region", request) and self._moved(region)
        if answer.code in s3_errors.SKEWED:
            return self._once("skew", request) and self._learn_clock(answer)
        if answer.code in s3_errors.EXPIRED:
            self.account.renew()
            return self._once("expired", request) or self._once("expired again", request)
        if answer.code == "XAmzContentSHA256Mismatch" and not self._signs_bodies:
            self._signs_bodies = True
            return True
        return False

    def _once(self, lesson: str, request: _Request) -> bool:
        fresh = lesson not in request.learnt
        request.learnt.add(lesson)
        return fresh

    def _moved(self, region: str) -> bool:
        _log.info("bucket %s is in region %s", self.bucket, region)
        self._use_region(region)
        return True

    def _learn_clock(self, answer: Answer) -> bool:
        try:
            theirs = parsedate_to_datetime(answer.headers.get("date", ""))
        except ValueError:
            return False
        skew = theirs - datetime.now(UTC)
        if abs((skew - self._skew).total_seconds()) < _SKEW_SECONDS:
            return False
        _log.warning(
            "the clock of %s is %.0f s ahead of ours; signing with its time",
            self.endpoint,
            skew.total_seconds(),
        )
        self._skew = skew
        return True

    def _explain(self, answer: Answer, request: _Request) -> Answer:
        """An answer to HEAD has no body: ask in a way that has one, where that could change what we say."""
        if answer.status == 404 and not self.known and request.key:
            asked = self._request(
                "GET", "", {"list-type": "2", "max-keys": "1", "prefix": request.key}, {}, b""
            )
        elif answer.status in (400, 401, 403):
            asked = self._request("GET", request.key, {}, {"Range": "bytes=0-0"}, b"")
        else:
            return answer
        try:
            with self._send(asked) as response:
                content = response.read_all(1 << 20)
        except OSError:
            return answer
        if response.status in _SUCCESS:
            self.known = True
            # What was refused a moment ago is allowed now: the refusal was a failure of that moment.
            return answer if answer.status == 404 else replace(answer, code="InternalError")
        found = s3_errors.parse(response.status, response.headers, content)
        return found if answer.status != 404 or found.code == "NoSuchBucket" or found.foreign else answer

    def _error(self, answer: Answer, request: _Request) -> DatasyncError:
        return s3_errors.error_of(
            answer, what=self.what(request.key), bucket=self.bucket, endpoint=self.endpoint
        )

    def _network_error(self, error: OSError, request: _Request) -> StoreError:
        if isinstance(error, TimeoutError):
            elapsed = time.monotonic() - request.began
            request.patience.failed(waited=min(elapsed, request.patience.left(), http1.STALL_SECONDS))
        return self.network_error(error, request.key)


def _is_damaged_here(failure: DatasyncError, request: _Request) -> bool:
    """Whether the server is right: the bytes do not have the CRC that they were given, and never will."""
    claimed = request.headers.get(CRC_HEADER)
    return (
        isinstance(failure, CorruptError) and bool(claimed) and claimed != encoded_crc(crc32c(request.body))
    )


def encoded_crc(value: int) -> str:
    """A CRC-32C as S3 writes it."""
    return base64.b64encode(value.to_bytes(4, "big")).decode()


def _split(endpoint: str) -> tuple[Origin, str]:
    """An endpoint's origin and its path, which is empty but for gateways that put S3 below one."""
    origin = Origin.parse(endpoint)
    rest = endpoint.partition("://")[2]
    return origin, "/" + rest.partition("/")[2].strip("/") if "/" in rest.strip("/") else ""
