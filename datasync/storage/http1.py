"""HTTP/1.1 for moving large bodies: pooled connections, no copies, a stall timeout.

    pool = Pool(Origin.parse("https://host:port"), ...)
    with pool.exchange("GET", "/bucket/key", headers) as response:
        response.status, response.headers["etag"]
        while piece := response.read(1 << 20): ...

A request body is sent from the caller's buffer and a response body is read straight into the bytes that the
caller gets, or into the caller's own memory (`Response.read_into`). Without TLS the kernel is asked for large
pieces whole, one call each. No deadline limits a transfer that moves: the timeout is for each wait on the
socket. A pool belongs to one process; see `datasync.storage.process`. `cut_silent` ends what is under way and
does not move.
"""

from __future__ import annotations

import base64
import contextlib
import io
import math
import os
import select
import socket
import ssl
import struct
import sys
import threading
import time
import urllib.request
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from datasync.errors import UsageError
from datasync.storage.base import Buffer

CONNECT_SECONDS = 10.0
STALL_SECONDS = 60.0

_MOST_IDLE = 128
_IDLE_SECONDS = 20.0
_READ_AHEAD = 64 << 10
_SENT_AT_ONCE = 1 << 20
_LONGEST_LINE = 64 << 10
_MOST_HEADERS = 200
_NO_BODY = (204, 304)
_LAST_DATA_RECEIVED, _LAST_ACK_RECEIVED = 52, 56  # bytes into Linux's struct tcp_info, in milliseconds
_BYTES_ACKED = 120  # and of those received, behind them

_pools: weakref.WeakSet[Pool] = weakref.WeakSet()
os.register_at_fork(after_in_child=_pools.clear)  # their connections are the parent's


class BadResponse(OSError):
    """What came back is not HTTP/1.1, or it ended early."""


class Dropped(OSError):
    """An idle connection broke when it was used again, as servers do; the request may have arrived or not."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Scheme, host and port of a server."""

    scheme: str
    host: str
    port: int

    @classmethod
    def parse(cls, url: str) -> Origin:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise UsageError(f"{url!r} is no endpoint", mend='write "https://host" or "http://host:port"')
        return cls(parts.scheme, parts.hostname, port or (443 if parts.scheme == "https" else 80))

    @property
    def netloc(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = 443 if self.scheme == "https" else 80
        return host if self.port == usual else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.netloc}"


class Response:
    """A response whose body is still on the wire."""

    def __init__(self, connection: _Connection, method: str) -> None:
        self._file: io.BufferedReader[Any] = connection.file
        self.status, self.reason, self.headers = _read_head(self._file)
        while 100 <= self.status < 200:
            self.status, self.reason, self.headers = _read_head(self._file)
        self._chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        self._left = 0
        self.keeps_alive = "close" not in self.headers.get("connection", "").lower()
        if method == "HEAD" or self.status in _NO_BODY:
            self.length: int | None = 0
        elif self._chunked:
            self.length = None
        elif "content-length" in self.headers:
            self.length = int(self.headers["content-length"])
        else:
            self.length, self.keeps_alive = None, False
        self._left = self.length or 0
        self._ended = self.length == 0

    def read(self, count: int) -> bytes:
        """Exactly `count` bytes, or fewer at the end, or none after it.

        Raises:
            BadResponse: The connection ended before the body did.
            OSError: The connection broke, or nothing came for `STALL_SECONDS`.
        """
        if self._ended:
            return b""
        if self._chunked:
            return self._read_chunked(count)
        if self.length is None:
            piece: bytes = self._file.read(count)
            self._ended = not piece
            return piece
        wanted = min(count, self._left)
        piece = self._file.read(wanted)
        self._left -= len(piece)
        if len(piece) < wanted:
            raise BadResponse(f"the body ended {self._left} bytes early")
        self._ended = self._left == 0
        return piece

    def read_into(self, buffer: memoryview) -> int:
        """Fill `buffer`, but for the end of the body; returns how many bytes were read.

        Raises:
            BadResponse: The connection ended before the body did.
            OSError: The connection broke, or nothing came for `STALL_SECONDS`.
        """
        if self.length is None:  # of unknown size: rare, and never a shard
            piece = self.read(len(buffer))
            buffer[: len(piece)] = piece
            return len(piece)
        wanted = min(len(buffer), self._left)
        count: int = self._file.readinto(buffer[:wanted]) if wanted else 0
        self._left -= count
        if count < wanted:
            raise BadResponse(f"the body ended {self._left} bytes early")
        self._ended = self._left == 0
        return count

    def read_all(self, limit: int = 64 << 20) -> bytes:
        """The rest of a body that is known to be small."""
        parts, total = [], 0
        while piece := self.read(min(limit, 1 << 20 if self.length is None else self._left)):
            parts.append(piece)
            total += len(piece)
            if total > limit:
                raise BadResponse(f"the body is longer than {limit} bytes")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @property
    def finished(self) -> bool:
        """Whether the body was read to its end, so that the connection can be used again."""
        return self._ended

    def _read_chunked(self, count: int) -> bytes:
        parts = []
        while count:
            if not self._left:
                try:
                    self._left = int(_read_line(self._file).partition(b";")[0], 16)
                except ValueError:
                    raise BadResponse("a chunk has no size") from None
                if not self._left:
                    while _read_line(self._file):
                        pass  # trailers
                    self._ended = True
                    break
            piece = self._file.read(min(count, self._left))
            if not piece:
                raise BadResponse("the body ended inside a chunk")
            parts.append(piece)
            count -= len(piece)
            self._left -= len(piece)
            if not self._left and _read_line(self._file):
                raise BadResponse("a chunk is longer than its size")
        return b"".join(parts)


class _Plain(io.RawIOBase):
    """What comes in on a blocking socket; more than the read-ahead is always wanted whole."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        flags = socket.MSG_WAITALL if len(buffer) > _READ_AHEAD else 0
        try:
            return self._sock.recv_into(buffer, 0, flags)
        except BlockingIOError as error:
            raise TimeoutError("nothing came") from error


class _Connection:
    """One socket to the origin, perhaps through a proxy."""

    def __init__(self, sock: socket.socket, wait: float) -> None:
        self.sock = sock
        self.wait = wait
        raw = sock.makefile("rb", buffering=0) if isinstance(sock, ssl.SSLSocket) else _Plain(sock)
        self.file = io.BufferedReader(raw, _READ_AHEAD)
        self.used = time.monotonic()
        self.fresh = True
        self._moved, self._moved_at = (-1, -1), 0.0  # bytes that went and came, when looked at last

    def is_stale(self) -> bool:
        """Whether an idle connection was closed by the server, or soon will be."""
        if time.monotonic() - self.used > _IDLE_SECONDS:
            return True
        # Readable while idle: the server closed it, or sent what nobody asked for.
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return bool(poll.poll(0))

    def set_wait(self, seconds: float) -> None:
        """Have each wait on the socket end after so long."""
        if seconds != self.wait:
            self.wait = seconds
            if isinstance(self.sock, ssl.SSLSocket):
                self.sock.settimeout(seconds)
            else:
                _block(self.sock, seconds)

    def silent_seconds(self) -> float:
        """How long nothing has come and nothing was taken, as the kernel tells; 0 where it does not."""
        if not sys.platform.startswith("linux"):
            return 0.0
        info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
        places = (_LAST_DATA_RECEIVED, _LAST_ACK_RECEIVED)
        found: float = min(struct.unpack_from("@I", info, place)[0] for place in places) / 1000
        if len(info) < 136:
            return found
        # A full server that has stopped still answers when it is asked for room, so what was taken counts.
        moved, now = struct.unpack_from("@QQ", info, _BYTES_ACKED), time.monotonic()
        if moved != self._moved:
            self._moved, self._moved_at = moved, now - found
        return now - self._moved_at

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.file.close()
        with contextlib.suppress(OSError):
            self.sock.close()


class Pool:
    """Connections to one origin.

    Args:
        origin (Origin): The server.
        ca_bundle (str | None): A file with authorities to trust; None trusts the system's.
        stall_seconds (float | None): The longest wait on the socket. Default: `STALL_SECONDS`.
        connect_seconds (float | None): The longest wait for a connection. Default: `CONNECT_SECONDS`.
    """

    def __init__(
        self,
        origin: Origin,
        *,
        ca_bundle: str | None = None,
        stall_seconds: float | None = None,
        connect_seconds: float | None = None,
    ) -> None:
        self.origin = origin
        self._stall_seconds = STALL_SECONDS if stall_seconds is None else stall_seconds
        self._connect_seconds = CONNECT_SECONDS if connect_seconds is None else connect_seconds
        self._proxy = _proxy_of(origin)
        self._tls = _tls_context(ca_bundle) if origin.scheme == "https" else None
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._lock = threading.Lock()
        _pools.add(self)

    @contextlib.contextmanager
    def exchange(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: Buffer = b"",
        *,
        wait: float = math.inf,
    ) -> Iterator[Response]:
        """Send a request and give its response; the body is read inside the block.

        With `wait`, each wait on the socket ends after so many seconds, where that is sooner.

        Raises:
            OSError: No connection, or it broke; `ssl.SSLError` and `socket.gaierror` among them.
        """
        connection, response = self._send(method, target, headers, memoryview(body).cast("B"), wait)
        reusable = False
        try:
            yield response
            reusable = response.finished and response.keeps_alive
        finally:
            self._give_back(connection, reusable)

    def cut_silent(self, seconds: float) -> None:
        """End requests on whose connections nothing has come for so long; see the function of this name."""
        with self._lock:
            for connection in self._busy:
                with contextlib.suppress(OSError):
                    if connection.silent_seconds() > seconds:
                        connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close what is idle."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _send(
        self, method: str, target: str, headers: Mapping[str, str], body: memoryview, wait: float
    ) -> tuple[_Connection, Response]:
        head = self._head(method, target, headers, len(body))
        connection = self._take(wait)
        try:
            return connection, _talk(connection, method, head, body)
        except BaseException as error:
            self._give_back(connection, reusable=False)
            if isinstance(error, OSError) and not isinstance(error, TimeoutError) and not connection.fresh:
                raise Dropped(str(error)) from error
            raise

    def _head(self, method: str, target: str, headers: Mapping[str, str], length: int) -> bytes:
        if self._proxy is not None and self._tls is None:
            target = f"{self.origin}{target}"
            authorization = _proxy_authorization(self._proxy)
            if authorization:
                headers = {**headers, "Proxy-Authorization": authorization}
        lines = [f"{method} {target} HTTP/1.1", f"Host: {self.origin.netloc}", "Accept-Encoding: identity"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if length or method in ("PUT", "POST"):
            lines.append(f"Content-Length: {length}")
        if any("\n" in line or "\r" in line for line in lines):
            raise ValueError("a line break in a header")
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    def _take(self, wait: float) -> _Connection:
        wait = min(wait, self._stall_seconds)
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                connection = _Connection(self._connect(wait), wait)
            elif connection.is_stale():
                connection.close()
                continue
            else:
                connection.fresh = False
                connection.set_wait(wait)
            with self._lock:
                self._busy.add(connection)
            return connection

    def _give_back(self, connection: _Connection, reusable: bool) -> None:
        connection.used = time.monotonic()
        with self._lock:
            self._busy.discard(connection)
            if reusable and len(self._idle) < _MOST_IDLE:
                self._idle.append(connection)
                return
        connection.close()

    def _connect(self, wait: float) -> socket.socket:
        via = Origin.parse(self._proxy) if self._proxy is not None else self.origin
        sock = socket.create_connection((via.host, via.port), timeout=min(wait, self._connect_seconds))
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self._tls is not None:
                if self._proxy is not None:
                    self._tunnel(sock, self._proxy)
                sock = self._tls.wrap_socket(sock, server_hostname=self.origin.host)
                sock.settimeout(wait)
            else:
                _block(sock, wait)
        except BaseException:
            sock.close()
            raise
        return sock

    def _tunnel(self, sock: socket.socket, proxy: str) -> None:
        """Ask the proxy for a way through to the origin."""
        there = f"{self.origin.host}:{self.origin.port}"
        lines = [f"CONNECT {there} HTTP/1.1", f"Host: {there}"]
        authorization = _proxy_authorization(proxy)
        if authorization:
            lines.append(f"Proxy-Authorization: {authorization}")
        sock.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
        with sock.makefile("rb", buffering=0) as file:
            status, reason, _ = _read_head(file)
        if status != 200:
            raise BadResponse(f"the proxy refuses a way to {there}: {status} {reason}")


def cut_silent(seconds: float) -> None:
    """End every request of this process on whose connection nothing has come for so many seconds."""
    for pool in list(_pools):
        pool.cut_silent(seconds)


def _block(sock: socket.socket, seconds: float) -> None:
    """Have the kernel wait for a whole piece, and give up when nothing moves for so long.

    Python's own timeout takes two system calls for every few kilobytes.
    """
    sock.settimeout(None)
    wait = struct.pack("@ll", int(seconds), max(int(seconds % 1 * 1e6), 1))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)


def _send(sock: socket.socket, data: Buffer) -> None:
    try:
        sock.sendall(data)
    except BlockingIOError as error:
        raise TimeoutError("nothing was taken") from error


def _talk(connection: _Connection, method: str, head: bytes, body: memoryview) -> Response:
    """Send a request and read the head of its answer."""
    sock = connection.sock
    if len(body) <= _READ_AHEAD:
        _send(sock, b"".join((head, body)))
        return Response(connection, method)
    try:
        _send(sock, head)
        # With TLS the timeout is for each call, so no call may take long.
        step = _SENT_AT_ONCE if isinstance(sock, ssl.SSLSocket) else len(body)
        for start in range(0, len(body), step):
            _send(sock, body[start : start + step])
    except (BrokenPipeError, ConnectionResetError):
        # A server may refuse before it has read everything; its answer may still be there to read.
        try:
            response = Response(connection, method)
        except OSError:
            response = None
        if response is None or response.status < 400:
            raise
        response.keeps_alive = False
        return response
    return Response(connection, method)


def _read_head(file: io.BufferedReader[Any] | io.RawIOBase) -> tuple[int, str, dict[str, str]]:
    """Status, reason and headers with names in lower case."""
    lines = _lines_of_head(file)
    first = next(lines)
    parts = first.split(b" ", 2)
    if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not parts[1].isdigit():
        if not first:
            raise BadResponse("the connection was closed without an answer")
        raise BadResponse(f"this is not HTTP: {first[:60]!r}")
    headers: dict[str, str] = {}
    for _ in range(_MOST_HEADERS):
        line = next(lines)
        if not line:
            return int(parts[1]), parts[2].decode("latin-1") if len(parts) > 2 else "", headers
        name, colon, value = line.decode("latin-1").partition(":")
        if not colon:
            raise BadResponse(f"this is no header: {line[:60]!r}")
        headers[name.strip().lower()] = value.strip()
    raise BadResponse("too many headers")


def _lines_of_head(file: io.BufferedReader[Any] | io.RawIOBase) -> Iterator[bytes]:
    """Lines up to the empty one; cut at once where all of them have arrived, as nearly always."""
    if isinstance(file, io.BufferedReader) and (end := file.peek().find(b"\r\n\r\n")) >= 0:
        yield from file.read(end + 4)[:-2].split(b"\r\n")
        return
    while True:
        yield _read_line(file)


def _read_line(file: io.BufferedReader[Any] | io.RawIOBase) -> bytes:
    line = file.readline(_LONGEST_LINE)
    if not line.endswith(b"\n"):
        if not line:
            raise BadResponse("the connection was closed without an answer")
        raise BadResponse("the connection was closed inside a line")
    return line.rstrip(b"\r\n")


def _tls_context(ca_bundle: str | None) -> ssl.SSLContext:
    bundle = ca_bundle or os.environ.get("AWS_CA_BUNDLE") or os.environ.get("SSL_CERT_FILE")
    try:
        if bundle and os.path.isdir(bundle):
            return ssl.create_default_context(capath=bundle)
        context = ssl.create_default_context(cafile=bundle or None)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(
            f"cannot read the certificates in {bundle}: {error}", mend="check ca_bundle"
        ) from error
    if not bundle and not context.cert_store_stats()["x509_ca"]:
        # A bare container has no authorities of its own; certifi comes with the AWS packages.
        with contextlib.suppress(ImportError):
            import certifi

            context.load_verify_locations(certifi.where())
    return context


def _proxy_of(origin: Origin) -> str | None:
    """The proxy that the environment names for this origin."""
    found = urllib.request.getproxies().get(origin.scheme)
    if not found or urllib.request.proxy_bypass(f"{origin.host}:{origin.port}"):
        return None
    return found if "://" in found else f"http://{found}"


def _proxy_authorization(proxy: str) -> str:
    parts = urlsplit(proxy)
    if parts.username is None:
        return ""
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return "Basic " + base64.b64encode(pair.encode()).decode()
