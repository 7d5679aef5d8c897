"""What an answer of an S3 server means: an error of ours that names the place and the mend.

Servers agree on the codes more than on the statuses, and on HEAD there is no code at all; so the code decides
where there is one, else the status.
"""

from __future__ import annotations

import socket
import ssl
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field

from datasync.errors import (
    ConflictError,
    CorruptError,
    DatasyncError,
    DeniedError,
    NotFoundError,
    StoreError,
    ThrottledError,
    TransientError,
    UnsupportedError,
)

THROTTLED = {
    "SlowDown",
    "SlowDownRead",
    "SlowDownWrite",
    "TooManyRequests",
    "Throttling",
    "RequestLimitExceeded",
}
THROTTLED |= {"ThrottlingException", "BandwidthLimitExceeded"}
TRANSIENT = {"InternalError", "ServiceUnavailable", "RequestTimeout", "OperationAborted"}
TRANSIENT |= {"ConditionalRequestConflict", "IncompleteBody", "BadGateway", "GatewayTimeout"}
EXPIRED = {"ExpiredToken", "TokenRefreshRequired", "ExpiredTokenException", "RequestExpired"}
SKEWED = {"RequestTimeTooSkewed", "RequestInTheFuture"}
REGION = {
    "PermanentRedirect",
    "TemporaryRedirect",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
}
DAMAGED = {"BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"}


class ForbiddenError(DeniedError):
    """The keys are good, and what they may do does not include this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer that is no success.

    Args:
        status (int): The HTTP status.
        code (str): The code in the body, or what the status says where there is no body.
        message (str): What the server says about it.
        headers (dict[str, str]): With names in lower case.
        foreign (bool): The body is not S3's: something else listens there.
    """

    status: int
    code: str
    message: str
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    foreign: bool = False


_BY_STATUS = {
    400: "BadRequest",
    401: "AccessDenied",
    403: "AccessDenied",
    404: "NoSuchKey",
    405: "MethodNotAllowed",
    408: "RequestTimeout",
    409: "OperationAborted",
    412: "PreconditionFailed",
    416: "InvalidRange",
    429: "TooManyRequests",
    500: "InternalError",
    501: "NotImplemented",
    502: "BadGateway",
    503: "ServiceUnavailable",
    504: "GatewayTimeout",
}


def parse(status: int, headers: dict[str, str], body: bytes) -> Answer:
    """The answer in an error response."""
    by_status = _BY_STATUS.get(status, "TemporaryRedirect" if 300 <= status < 400 else f"status {status}")
    if not body.strip():
        return Answer(status=status, code=by_status, message="", headers=headers)
    try:
        root = ElementTree.fromstring(body)
    except ElementTree.ParseError:
        root = None
    if root is None or root.tag.rpartition("}")[2] != "Error":
        text = " ".join(body[:200].decode("utf-8", "replace").split())
        return Answer(status=status, code=by_status, message=text, headers=headers, foreign=True)
    found = {child.tag.rpartition("}")[2]: (child.text or "").strip() for child in root}
    if found.get("Region"):
        headers = {**headers, "x-amz-bucket-region": found["Region"]}
    code = found.get("Code") or by_status
    return Answer(status=status, code=code, message=found.get("Message", ""), headers=headers)


def error_of(answer: Answer, *, what: str, bucket: str, endpoint: str) -> DatasyncError:
    """The error for an answer to an operation on `what` (an object as a URL)."""
    code, said = answer.code, f" ({answer.code}: {answer.message})" if answer.message else f" ({answer.code})"
    if code in THROTTLED or answer.status in (429, 503):
        return ThrottledError(
            f"{endpoint} asks to slow down at {what}{said}", mend="run again with less at once"
        )
    if code in TRANSIENT or answer.status in (408, 500, 502, 504):
        return TransientError(
            f"{endpoint} failed at {what}{said}", mend="run again; if it stays, ask the provider"
        )
    # An imitator may say in its own words that it lacks an ability; a page for people comes from no S3.
    a_page = answer.message.lower().startswith(("<!doctype html", "<html"))
    if answer.foreign and (answer.status in (301, 302, 400, 404, 405) or (a_page and answer.status == 501)):
        return StoreError(
            f"{endpoint} answered {what} with {answer.status} and no S3: {answer.message[:80]!r}",
            mend="check the endpoint: host, port, http or https",
        )
    if code == "NoSuchBucket":
        return NotFoundError(
            f"no bucket {bucket!r} at {endpoint}",
            mend="check the bucket's name and the endpoint, or create it",
        )
    if code == "NoSuchUpload":
        return NotFoundError(f"no such upload of {what} at {endpoint}", mend="begin it again")
    if code == "NoSuchKey" or answer.status == 404:
        return NotFoundError(
            f"no object {what} at {endpoint}", mend="check the name, or what is published there"
        )
    if code == "PreconditionFailed" or answer.status == 412:
        return ConflictError(f"{what} exists already or has changed at {endpoint}", mend="look at it again")
    if code in DAMAGED:
        return CorruptError(
            f"{endpoint} received other bytes for {what} than were sent{said}",
            mend="check the network and the memory",
        )
    if code in ("NotImplemented", "MethodNotAllowed") or answer.status in (405, 501):
        return UnsupportedError(
            f"{endpoint} cannot do that with {what}{said}", mend="use another store for it"
        )
    denied = _denied(answer, what, endpoint)
    return denied or StoreError(f"{endpoint} refused {what}{said}", mend="look the code up with the provider")


def _denied(answer: Answer, what: str, endpoint: str) -> DeniedError | None:
    code = answer.code
    if code in EXPIRED:
        return DeniedError(f"the credentials for {what} at {endpoint} have expired", mend="log in again")
    if code in SKEWED:
        return DeniedError(
            f"this machine's clock and that of {endpoint} differ too much for {what}",
            mend="set the clock (NTP)",
        )
    if code in ("InvalidAccessKeyId", "InvalidToken", "InvalidClientTokenId", "UnrecognizedClientException"):
        return DeniedError(
            f"{endpoint} does not know the access key used for {what}",
            mend="check the cluster's profile or keys",
        )
    if code in ("SignatureDoesNotMatch", "AuthorizationHeaderMalformed"):
        return DeniedError(
            f"{endpoint} does not accept the signature for {what} ({answer.message})",
            mend="check the secret key and the region; a proxy that rewrites requests does this too",
        )
    if answer.status in (401, 403):
        return ForbiddenError(
            f"the credentials are not allowed to do this with {what} at {endpoint}",
            mend="allow it in the bucket's policy (who may not list sees this for missing objects too)",
        )
    return None


def network_error(error: OSError, *, what: str, endpoint: str) -> StoreError:
    """The error for a connection that did not come about or broke."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return StoreError(
            f"the certificate of {endpoint} is not trusted: {error.verify_message}",
            mend="name its authority in ca_bundle, or check the host in endpoint",
        )
    if isinstance(error, ssl.SSLError) and "WRONG_VERSION_NUMBER" in str(error):
        return StoreError(
            f"{endpoint} does not speak TLS", mend="write http:// in the endpoint if that is meant"
        )
    if isinstance(error, socket.gaierror):
        return TransientError(
            f"{endpoint}, asked for {what}, has no address ({error.strerror})",
            mend="check the endpoint's name and the DNS",
        )
    if isinstance(error, ConnectionRefusedError):
        return TransientError(
            f"nothing listens at {endpoint}, asked for {what}",
            mend="check host and port, or start the server",
        )
    if isinstance(error, TimeoutError):
        return TransientError(f"{endpoint} is silent at {what}", mend="check the network to it; run again")
    return TransientError(f"the connection to {endpoint} broke at {what}: {error}", mend="run again")
