"""Signatures of requests to S3: AWS Signature Version 4, in headers.

The algorithm is the one that Amazon publishes ("Signature Version 4", S3 variant: the path is encoded once
and not normalised). A test compares it with botocore's, request by request. It stands here because signing is
most of what a request for a small object costs: the key of the day is kept, and nothing is parsed twice.
"""

from __future__ import annotations

import hashlib
import hmac
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from urllib.parse import quote

UNSIGNED = "UNSIGNED-PAYLOAD"
EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()

_ALGORITHM = "AWS4-HMAC-SHA256"


@dataclass(frozen=True, slots=True)
class Keys:
    """What signs a request; never shown."""

    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    token: str | None = field(default=None, repr=False)


def encode_path(path: str) -> str:
    """A path as it stands in the request line and in the signature."""
    return quote(path, safe="/~-._")


def encode_query(query: Mapping[str, str]) -> str:
    """A query string, sorted as the signature wants it."""
    pairs = sorted((quote(k, safe="~-._"), quote(v, safe="~-._")) for k, v in query.items())
    return "&".join(f"{k}={v}" for k, v in pairs)


class Signer:
    """Signs requests for one region.

    Args:
        region (str): The region that the endpoint wants in signatures.
        service (str): The service. Default: ``s3``.
    """

    def __init__(self, region: str, service: str = "s3") -> None:
        self.region = region
        self._service = service
        self._lock = threading.Lock()
        self._day_key: tuple[str, str, bytes] = ("", "", b"")

    def sign(
        self,
        keys: Keys,
        method: str,
        host: str,
        path: str,
        query: str,
        headers: Mapping[str, str],
        payload: str,
        now: datetime,
    ) -> dict[str, str]:
        """`headers` with those that authorise the request.

        Args:
            keys (Keys): Who asks.
            method (str): ``GET`` and the like.
            host (str): The value of the Host header.
            path (str): From `encode_path`.
            query (str): From `encode_query`.
            headers (Mapping[str, str]): All headers to be sent; every one is signed.
            payload (str): SHA-256 of the body in hex, or `UNSIGNED`.
            now (datetime): The time in UTC, as the server sees it.
        """
        stamp = now.strftime("%Y%m%dT%H%M%SZ")
        signed = dict(headers)
        signed["x-amz-content-sha256"] = payload
        signed["x-amz-date"] = stamp
        if keys.token:
            signed["x-amz-security-token"] = keys.token
        lines = sorted((name.lower(), " ".join(value.split())) for name, value in signed.items())
        lines.append(("host", host))
        lines.sort()
        names = ";".join(name for name, _ in lines)
        canonical = "\n".join(
            [method, path, query, *(f"{name}:{value}" for name, value in lines), "", names, payload]
        )
        scope = f"{stamp[:8]}/{self.region}/{self._service}/aws4_request"
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        text = f"{_ALGORITHM}\n{stamp}\n{scope}\n{digest}"
        signature = hmac.digest(self._key(keys, stamp[:8]), text.encode(), "sha256").hex()
        signed["Authorization"] = (
            f"{_ALGORITHM} Credential={keys.access_key}/{scope}, SignedHeaders={names}, Signature={signature}"
        )
        return signed

    def _key(self, keys: Keys, day: str) -> bytes:
        with self._lock:
            if self._day_key[:2] != (keys.secret_key, day):
                key = f"AWS4{keys.secret_key}".encode()
                for part in (day, self.region, self._service, "aws4_request"):
                    key = hmac.digest(key, part.encode(), "sha256")
                self._day_key = (keys.secret_key, day, key)
            return self._day_key[2]
