"""The HTTP client: what it makes of odd answers, and when it uses a connection again."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from datasync.errors import UsageError
from datasync.storage.http1 import BadResponse, Dropped, Origin, Pool


class _Server:
    """Answers each request with the next of the given bytes; None closes the connection without an answer."""

    def __init__(self, answers: list[bytes | None]) -> None:
        self.answers = answers
        self.connections = 0
        self.heads: list[bytes] = []
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.origin = Origin("http", "127.0.0.1", self.socket.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while self.answers:
            try:
                client, _ = self.socket.accept()
            except OSError:
                return
            self.connections += 1
            with client, client.makefile("rb") as file:
                while self.answers:
                    head = b""
                    while not head.endswith(b"\r\n\r\n"):
                        line = file.readline()
                        if not line:
                            break
                        head += line
                    if not head:
                        break
                    self.heads.append(head)
                    answer = self.answers.pop(0)
                    if answer is None:
                        break
                    client.sendall(answer)
                    if b"Connection: close" in answer or b"cut" in answer:
                        break


@contextmanager
def _server(*answers: bytes | None) -> Iterator[tuple[_Server, Pool]]:
    server = _Server(list(answers))
    pool = Pool(server.origin, stall_seconds=2)
    try:
        yield server, pool
    finally:
        pool.close()
        server.socket.close()


def _get(pool: Pool, method: str = "GET") -> tuple[int, bytes]:
    with pool.exchange(method, "/x", {}) as response:
        return response.status, response.read_all()


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


def test_a_connection_is_used_again() -> None:
    with _server(OK, OK, OK) as (server, pool):
        assert [_get(pool) for _ in range(3)] == [(200, b"hello")] * 3
        assert server.connections == 1


def test_a_connection_with_an_unread_body_is_not_used_again() -> None:
    with _server(OK, OK) as (server, pool):
        with pool.exchange("GET", "/x", {}) as response:
            assert response.read(2) == b"he"
        assert _get(pool) == (200, b"hello")
        assert server.connections == 2


def test_a_server_that_closes_is_taken_at_its_word() -> None:
    closing = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello"
    with _server(closing, OK) as (server, pool):
        assert [_get(pool), _get(pool)] == [(200, b"hello")] * 2
        assert server.connections == 2


def test_a_body_in_chunks() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunked = head + b"5;x=y\r\nhello\r\n6\r\n world\r\n0\r\nT: 1\r\n\r\n"
    with _server(chunked, OK) as (server, pool):
        assert _get(pool) == (200, b"hello world")
        assert _get(pool) == (200, b"hello")
        assert server.connections == 1


def test_a_body_until_the_end() -> None:
    with _server(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello") as (_, pool):
        assert _get(pool) == (200, b"hello")


def test_informational_answers_are_passed_over() -> None:
    with _server(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nLink: x\r\n\r\n" + OK) as (_, pool):
        assert _get(pool) == (200, b"hello")


def test_heads_and_empty_answers_have_no_body() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"
    with _server(head, b"HTTP/1.1 204 No Content\r\n\r\n", OK) as (server, pool):
        assert _get(pool, "HEAD") == (200, b"")
        assert _get(pool, "DELETE") == (204, b"")
        assert _get(pool) == (200, b"hello")
        assert server.connections == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\nX: cut\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX: cut\r\n\r\n50\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX: cut\r\n\r\n5\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Le cut",
        b"SSH-2.0-OpenSSH cut\r\n",
        b"HTTP/1.1 200 OK\r\nno header\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 300 + b"\r\n",
    ],
)
def test_broken_answers_are_never_whole(answer: bytes) -> None:
    with _server(answer) as (_, pool):
        with pytest.raises(BadResponse):
            _get(pool)


def test_a_reused_connection_that_breaks_is_told_from_a_new_one() -> None:
    with _server(OK, None, None) as (_, pool):
        assert _get(pool) == (200, b"hello")
        with pytest.raises(Dropped):
            _get(pool)
        with pytest.raises(BadResponse):
            _get(pool)


def test_a_silent_server_is_a_timeout() -> None:
    with _server(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhello", OK) as (server, _):
        pool = Pool(server.origin, stall_seconds=0.2)
        with pytest.raises(TimeoutError):
            _get(pool)


def test_a_server_that_has_stopped_taking_a_body_is_silent_though_its_kernel_answers() -> None:
    """Full buffers are asked for room again and again, and each time there is an acknowledgement."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        pool = Pool(Origin("http", *listening.getsockname()), stall_seconds=60)
        ended: list[BaseException] = []

        def put() -> None:
            try:
                with pool.exchange("PUT", "/x", {}, bytes(32 << 20)):
                    pass
            except OSError as error:
                ended.append(error)

        thread = threading.Thread(target=put)
        thread.start()
        time.sleep(1.0)
        began = time.monotonic()
        while thread.is_alive() and time.monotonic() - began < 20:
            pool.cut_silent(2.0)
            thread.join(0.1)
        took = time.monotonic() - began
        pool.close()
    thread.join(70)
    assert len(ended) == 1
    assert took < 3.5


def test_a_refusal_before_the_whole_body_was_sent_is_read() -> None:
    """The server answers and closes while a large body is still on its way."""
    refusal = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno"
    with _server(refusal) as (_, pool):
        try:
            with pool.exchange("PUT", "/x", {}, bytes(32 << 20)) as response:
                assert (response.status, response.read_all()) == (403, b"no")
        except (ConnectionResetError, BrokenPipeError):
            pass  # where the reset overtakes the answer, there is nothing to read


def test_line_breaks_in_headers_are_refused() -> None:
    with _server(OK) as (_, pool):
        with pytest.raises(ValueError, match="line break"), pool.exchange("GET", "/x", {"A": "b\r\nC: d"}):
            pass


def test_a_proxy_gets_the_whole_url(monkeypatch: pytest.MonkeyPatch) -> None:
    with _server(OK) as (server, _):
        monkeypatch.setenv("http_proxy", f"http://me:pw@127.0.0.1:{server.origin.port}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        assert _get(Pool(Origin("http", "s3.example.org", 80))) == (200, b"hello")
        assert server.heads[0].startswith(b"GET http://s3.example.org/x HTTP/1.1\r\n")
        assert b"Proxy-Authorization: Basic bWU6cHc=" in server.heads[0]


@pytest.mark.parametrize("url", ["host", "ftp://host", "http://", "http://host:port"])
def test_endpoints_that_are_none(url: str) -> None:
    with pytest.raises(UsageError):
        Origin.parse(url)


def test_origins_write_their_host() -> None:
    for url, host in [("https://h", "h"), ("https://h:8443", "h:8443"), ("http://[::1]:80", "[::1]")]:
        assert Origin.parse(url).netloc == host


def test_a_body_is_read_into_memory_of_the_caller_in_pieces_of_any_size() -> None:
    body = bytes(range(256)) * 1000
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    for step in (1000, 70_000, 1 << 20):
        with _server(answer, OK) as (server, pool):
            memory = memoryview(bytearray(len(body) + 10))
            with pool.exchange("GET", "/x", {}) as response:
                at = 0
                while count := response.read_into(memory[at : at + step]):
                    at += count
            assert at == len(body)
            assert memory[:at] == body
            assert _get(pool) == (200, b"hello")
            assert server.connections == 1


def test_a_body_that_ends_early_is_not_taken_for_whole() -> None:
    answer = b"HTTP/1.1 200 OK\r\nX: cut\r\nContent-Length: 300000\r\n\r\n" + bytes(200_000)
    with _server(answer) as (_, pool), pool.exchange("GET", "/x", {}) as response:
        with pytest.raises(BadResponse, match="100000 bytes early"):
            response.read_into(memoryview(bytearray(300_000)))


def test_the_timeout_is_for_standing_still_and_not_for_taking_long() -> None:
    """Both ways: a body that trickles for longer than the timeout arrives, one that stops does not."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
    taken: list[int] = []

    def serve() -> None:
        client, _ = listener.accept()
        with client:
            left = 16_000_000
            head = b""
            while b"\r\n\r\n" not in head:
                head += client.recv(4096)
            left -= len(head.partition(b"\r\n\r\n")[2])
            while left:
                time.sleep(0.005)
                left -= len(client.recv(min(left, 50_000), socket.MSG_WAITALL))
            taken.append(left)
            client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 300000\r\n\r\n")
            for _ in range(25):
                time.sleep(0.06)
                client.sendall(bytes(10_000))
            time.sleep(5)

    threading.Thread(target=serve, daemon=True).start()
    pool = Pool(Origin("http", "127.0.0.1", listener.getsockname()[1]), stall_seconds=1)
    with listener, pool.exchange("PUT", "/x", {}, bytes(16_000_000)) as response:
        assert taken == [0]
        memory = memoryview(bytearray(300_000))
        assert response.read_into(memory[:250_000]) == 250_000
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            response.read_into(memory[250_000:])
        assert time.monotonic() - began < 4
