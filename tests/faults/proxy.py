"""A loopback proxy between an S3 client and a real server, which does what networks and servers do at times.

    with FaultProxy(server, seed=1, rate=0.2) as proxy:
        store = open_store("s3://bucket/x", **(server.options | {"endpoint": proxy.endpoint}))

The kinds of fault, each for one request:

    drop       the connection is closed before the request reaches the server
    lose       the server does it, and the connection is closed without its answer
    truncate   the answer's body ends early, and the connection is closed
    reset      the same, by a TCP reset
    stall      the answer's body stops in the middle, and nothing more comes
    delay      the answer comes late
    flip       one bit of an object's bytes is changed, on the way there or back
    throttle   503 SlowDown, without asking the server
    error      500 InternalError, without asking the server
    expire     400 ExpiredToken, without asking the server

`clock` shifts the server's clock: requests that are not signed with the shifted time are refused as S3 does.
`unable` names the requests that this server has never heard of: each is answered 501 NotImplemented.
Which request meets what is drawn from the seed, in the order in which requests arrive; `script` fixes it
instead. Everything is counted: `requests`, `faults`, `bytes_down`, `bytes_up`.
"""

from __future__ import annotations

import contextlib
import http.client
import random
import socket
import ssl
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from tests.servers import S3Server

KINDS = ("drop", "lose", "truncate", "reset", "stall", "delay", "flip", "throttle", "error", "expire")

_MOST_SKEW = timedelta(minutes=15)
_HOP_HEADERS = {"connection", "transfer-encoding", "keep-alive", "content-length"}


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request as it arrived."""

    method: str
    target: str
    headers: dict[str, str] = field(repr=False)
    body: bytes = field(repr=False, default=b"")

    @property
    def moves_object(self) -> bool:
        """Whether its body or its answer's body is an object's bytes, rather than XML."""
        query = urlsplit(self.target).query
        deep = urlsplit(self.target).path.strip("/").count("/") >= 1
        return (
            deep
            and (self.method == "GET" or bool(self.body))
            and ("uploads" not in query)
            and self.method != "POST"
        )


@dataclass(kw_only=True)
class _Answer:
    status: int
    reason: str
    headers: list[tuple[str, str]]
    body: bytes


class FaultProxy:
    """A server on loopback that passes requests on to another, more or less.

    Args:
        server (S3Server): The real server.
        seed (int): Decides which requests meet which fault. Default: ``0``.
        rate (float): The share of requests that meet one. Default: ``0``.
        kinds (Iterable[str]): The faults to draw from. Default: all.
        stall_seconds (float): How long a stalled answer stays open. Default: ``30``.
        delay_seconds (float): How late a delayed answer comes, at most. Default: ``0.3``.
        clock (timedelta): How far ahead the server's clock seems to be. Default: none.
        unable (Callable[[Request], bool]): Requests that it does not know. Default: it knows all.
        tls (ssl.SSLContext | None): Speak TLS with this certificate. Default: ``None``.
    """

    def __init__(
        self,
        server: S3Server,
        *,
        seed: int = 0,
        rate: float = 0.0,
        kinds: Iterable[str] = KINDS,
        stall_seconds: float = 30.0,
        delay_seconds: float = 0.3,
        clock: timedelta = timedelta(),
        unable: Callable[[Request], bool] = lambda request: False,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.server = server
        self.rate = rate
        self.kinds = tuple(kinds)
        self.stall_seconds = stall_seconds
        self.delay_seconds = delay_seconds
        self.clock = clock
        self.unable = unable
        self.tls = tls
        self.requests: list[Request] = []
        self.faults: Counter[str] = Counter()
        self.bytes_down = 0
        self.bytes_up = 0
        self._random = random.Random(seed)
        self._scripted: deque[tuple[str, Callable[[Request], bool]]] = deque()
        self._lock = threading.Lock()
        self._listener = socket.socket()
        self._open: set[socket.socket] = set()
        self._closing = threading.Event()

    @property
    def endpoint(self) -> str:
        """Its URL, to be given to clients instead of the server's."""
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `open_store`, so that it goes through here."""
        return self.server.options | {"endpoint": self.endpoint}

    def script(self, *kinds: str, when: Callable[[Request], bool] = lambda request: True) -> None:
        """The next requests for which `when` holds meet these faults, one each; ``""`` is none."""
        with self._lock:
            self._scripted.extend((kind, when) for kind in kinds)

    def reset(self) -> None:
        """No faults from now on, and counting starts anew."""
        with self._lock:
            self.rate, self.bytes_down, self.bytes_up = 0.0, 0, 0
            self._scripted.clear()
            self.requests.clear()
            self.faults.clear()

    def __enter__(self) -> FaultProxy:
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(128)
        threading.Thread(target=self._accept, name="fault-proxy", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            sockets = list(self._open)
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), name="fault-proxy", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """Requests of one connection, until it ends or is broken."""
        with self._lock:
            self._open.add(client)
        try:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.tls is not None:
                client = self.tls.wrap_socket(client, server_side=True)
            with client, client.makefile("rb") as file:
                while not self._closing.is_set():
                    request = _read_request(file)
                    if request is None or not self._answer(client, request):
                        return
        except OSError:
            return  # the client, or a fault, has closed the connection
        finally:
            with self._lock:
                self._open.discard(client)

    def _answer(self, client: socket.socket, request: Request) -> bool:
        """Whether the connection may go on after this request."""
        fault = self._draw(request)
        if self.unable(request):
            _send(client, request, _error(501, "NotImplemented", "A header you provided is not implemented."))
            return True
        if fault == "drop":
            return False
        if fault in ("throttle", "error", "expire"):
            _send(client, request, _refusal(fault))
            return True
        if fault == "flip" and request.body:
            flipped = self._flip(request.body)
            request = Request(
                method=request.method, target=request.target, headers=request.headers, body=flipped
            )
        answer = self._ask(request)
        if fault == "lose" or answer is None:
            return False
        if fault == "delay":
            time.sleep(self._fraction() * self.delay_seconds)
        if fault == "flip" and not request.body and answer.body:
            answer.body = self._flip(answer.body)
        if fault in ("truncate", "reset", "stall"):
            self._break_off(client, request, answer, fault)
            return False
        _send(client, request, answer)
        with self._lock:
            self.bytes_down += len(answer.body)
        return True

    def _draw(self, request: Request) -> str:
        """The fault of this request, or nothing."""
        with self._lock:
            self.requests.append(request)
            self.bytes_up += len(request.body)
            kind = ""
            if self._scripted:
                if self._scripted[0][1](request):
                    kind = self._scripted.popleft()[0]
            elif self.kinds and self._random.random() < self.rate:
                kind = self._random.choice(self.kinds)
            if kind == "flip" and not request.moves_object:
                kind = ""
            if kind:
                self.faults[kind] += 1
            return kind

    def _ask(self, request: Request) -> _Answer | None:
        """What the real server says; None where it cannot be reached."""
        headers = dict(request.headers)
        if self.clock:
            refusal = self._check_clock(headers)
            if refusal is not None:
                return refusal
            headers = self._signed_for_server(request)
        host = urlsplit(self.server.endpoint)
        connection = http.client.HTTPConnection(host.hostname or "", host.port, timeout=60)
        try:
            connection.putrequest(request.method, request.target, skip_host=True, skip_accept_encoding=True)
            for name, value in headers.items():
                connection.putheader(name, value)
            connection.endheaders(request.body or None)
            response = connection.getresponse()
            body = response.read()
            return _Answer(
                status=response.status, reason=response.reason, headers=response.getheaders(), body=body
            )
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def _check_clock(self, headers: dict[str, str]) -> _Answer | None:
        stamp = headers.get("x-amz-date", "19700101T000000Z")
        theirs = datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        ours = datetime.now(UTC) + self.clock
        if abs(theirs - ours) <= _MOST_SKEW:
            return None
        self.faults["skew"] += 1
        answer = _error(
            403, "RequestTimeTooSkewed", "The difference between the request time and ours is too large."
        )
        answer.headers.append(("Date", format_datetime(ours, usegmt=True)))
        return answer

    def _signed_for_server(self, request: Request) -> dict[str, str]:
        """The request as the real server, whose clock is right, wants it: signed by botocore with the real
        time."""
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest
        from botocore.credentials import Credentials

        dropped = {"authorization", "x-amz-date", "x-amz-content-sha256", "host", "content-length"}
        kept = {name: value for name, value in request.headers.items() if name not in dropped}
        url = f"{self.server.endpoint}{request.target}"
        signed = AWSRequest(method=request.method, url=url, headers=kept, data=request.body or None)
        keys = Credentials(self.server.access_key, self.server.secret_key)
        S3SigV4Auth(keys, "s3", self.server.region).add_auth(signed)
        found = dict(signed.headers.items()) | {"Host": urlsplit(self.server.endpoint).netloc}
        if request.body or request.method in ("PUT", "POST"):
            found["Content-Length"] = str(len(request.body))
        return found

    def _break_off(self, client: socket.socket, request: Request, answer: _Answer, fault: str) -> None:
        """Send the head and a part of the body, and no more."""
        head, body = _wire(request, answer)
        cut = int(len(body) * self._fraction())
        client.sendall((head + body[:cut]) if body else head[: len(head) // 2])
        if fault == "stall":
            self._closing.wait(self.stall_seconds)
        elif fault == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _flip(self, data: bytes) -> bytes:
        changed = bytearray(data)
        with self._lock:
            changed[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        return bytes(changed)

    def _fraction(self) -> float:
        with self._lock:
            return self._random.random()


def _read_request(file: BinaryIO) -> Request | None:
    first = file.readline().decode("latin-1").split()
    if len(first) != 3:
        return None
    headers: dict[str, str] = {}
    while line := file.readline().decode("latin-1").strip():
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    length = int(headers.get("content-length", "0"))
    body = file.read(length) if length else b""
    if len(body) < length:
        return None
    return Request(method=first[0], target=first[1], headers=headers, body=body)


def _refusal(kind: str) -> _Answer:
    return {
        "throttle": lambda: _error(503, "SlowDown", "Please reduce your request rate."),
        "error": lambda: _error(500, "InternalError", "We encountered an internal error."),
        "expire": lambda: _error(400, "ExpiredToken", "The provided token has expired."),
    }[kind]()


def _error(status: int, code: str, message: str) -> _Answer:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    return _Answer(status=status, reason=code, headers=[("Content-Type", "application/xml")], body=body)


def _wire(request: Request, answer: _Answer) -> tuple[bytes, bytes]:
    """Head and body as they are sent."""
    lines = [f"HTTP/1.1 {answer.status} {answer.reason}"]
    given = {name.lower(): value for name, value in answer.headers}
    lines += [f"{name}: {value}" for name, value in answer.headers if name.lower() not in _HOP_HEADERS]
    if "date" not in given:
        lines.append(f"Date: {format_datetime(datetime.now(UTC), usegmt=True)}")
    is_head = request.method == "HEAD"
    length = given.get("content-length", "0") if is_head and answer.status < 300 else str(len(answer.body))
    if answer.status not in (204, 304):
        lines.append(f"Content-Length: {length}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1"), b"" if is_head else answer.body


def _send(client: socket.socket, request: Request, answer: _Answer) -> None:
    head, body = _wire(request, answer)
    client.sendall(head + body if len(body) < 1 << 16 else head)
    if len(body) >= 1 << 16:
        client.sendall(body)
