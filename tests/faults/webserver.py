"""A small HTTP file server on loopback that can fail in every way that one sees from outside.

    with WebServer(folder) as server:
        server.fault = truncate
        open_store(server.url)

Serves HEAD and GET with ranges; without them if `ranges` is false. A fault is called for each GET of a file
whose name is not `index.json`, with the handler and the bytes that it would send; it sends something itself
and returns True, or returns False.
"""

from __future__ import annotations

import hashlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

Fault = Callable[["_Handler", bytes], bool]


class WebServer:
    """Serves `folder` on a free port of loopback; `port` brings it back where it was.

    Args:
        folder (Path): What to serve.
        port (int): Where. Default: ``0``, a free one.
    """

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.folder = folder
        self.fault: Fault | None = None
        self.ranges = True
        self.requests = 0
        self._server = _Server(("127.0.0.1", port), _Handler)
        self._server.owner = self
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> WebServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Refuse connections from now on, and cut those that are open."""
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self._server.connections):
            _reset(connection)
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    owner: WebServer

    def __init__(self, *args) -> None:
        self.connections: set[socket.socket] = set()
        super().__init__(*args)

    def process_request(self, request, address) -> None:
        self.connections.add(request)
        super().process_request(request, address)

    def shutdown_request(self, request) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request, address) -> None:
        pass  # clients hang up, and are hung up on


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        owner = self.server.owner
        path = owner.folder / self.path.lstrip("/")
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        total, status, extra = len(data), 200, {}
        wanted = self.headers.get("Range", "")
        if wanted.startswith("bytes=") and owner.ranges:
            first, _, last = wanted[6:].partition("-")
            start, end = int(first), min(int(last or total - 1), total - 1)
            data, status = data[start : end + 1], 206
            extra = {"Content-Range": f"bytes {start}-{end}/{total}"}
        if body and path.name != "index.json":
            owner.requests += 1
            if owner.fault is not None and owner.fault(self, data):
                return
        self.send(data, status=status, headers=extra, body=body)

    def send(
        self,
        data: bytes,
        *,
        status: int = 200,
        headers: dict | None = None,
        body: bool = True,
        length: int = -1,
    ) -> None:
        """An answer whose header says `length` bytes, by default as many as there are."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(data) if length < 0 else length))
        if self.server.owner.ranges:
            self.send_header("Accept-Ranges", "bytes")
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if (path := self.server.owner.folder / self.path.lstrip("/")).is_file():
            self.send_header("ETag", f'"{hashlib.sha1(path.read_bytes()).hexdigest()}"')
        self.end_headers()
        if body:
            self.wfile.write(data)


def unavailable(handler: _Handler, data: bytes) -> bool:
    """503 to everything."""
    handler.send(b"slow down", status=503)
    return True


def truncate(handler: _Handler, data: bytes) -> bool:
    """Half of the body, then the connection is cut."""
    handler.send(data[: len(data) // 2], length=len(data))
    handler.close_connection = True
    return True


def flip_bit(handler: _Handler, data: bytes) -> bool:
    """One bit in the middle is wrong."""
    middle = len(data) // 2
    handler.send(data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :], status=206)
    return True


def hang(handler: _Handler, data: bytes) -> bool:
    """The header, a few bytes, and then nothing for a long time."""
    handler.send(data[:8], length=len(data))
    handler.wfile.flush()
    time.sleep(5)
    return True


def cut(handler: _Handler, data: bytes) -> bool:
    """The connection is reset before an answer."""
    _reset(handler.connection)
    handler.close_connection = True
    return True


def _reset(connection: socket.socket) -> None:
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
        connection.close()
    except OSError:
        pass  # its client has closed it
