"""Columns that name files: `--media image:path` or `image:url` puts what they name in their place.

A path is relative to the folder of the file that the row is in, and must stay inside the corpus (invariant
10); a URL is http or https. Files are read several at a time and a few rows ahead; rows stay in their order.
"""

from __future__ import annotations

import http.client
import posixpath
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from shards.sources.base import Bad, Row, content_error, reason
from shards.sources.files import FileList

_AT_ONCE = 16
_AHEAD = 64
_AHEAD_BYTES = 256 << 20
_LARGEST = 1 << 29  # of a URL; a server may send without end
_LARGEST_FILE = (1 << 32) - 1
_SECONDS = 20.0  # without a byte
_PATIENCE = 60.0  # then it must have come at
_SLOWEST = 16 << 10  # bytes a second
_TRIES = 3

Waiting = tuple[Row | Bad, dict[str, "Future[bytes | Exception]"]]


class Resolver:
    """Reads what columns name.

    Args:
        columns (Mapping[str, str]): Column of the source -> ``path`` or ``url``.
        root (str): The corpus.
        storage_options (Mapping[str, Any]): What fsspec needs to reach it.
        refuse (Callable[[str, Row], Bad]): Makes a row bad, for a reason.
    """

    def __init__(
        self,
        columns: Mapping[str, str],
        root: str,
        storage_options: Mapping[str, Any],
        refuse: Callable[[str, Row], Bad],
    ) -> None:
        self.columns = dict(columns)
        self._refuse = refuse
        self._root = root
        self._options = storage_options

    def resolve(self, rows: Iterable[Row | Bad]) -> Iterator[Row | Bad]:
        """Rows with the bytes of what they name in its place; bad ones where that cannot be had."""
        waiting: deque[Waiting] = deque()
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            try:
                for row in rows:
                    waiting.append((row, self._begin(pool, row)))
                    while len(waiting) > _AHEAD or (waiting and _held(waiting) > _AHEAD_BYTES):
                        yield self._finish(*waiting.popleft())
                while waiting:
                    yield self._finish(*waiting.popleft())
            finally:
                for _, futures in waiting:
                    for future in futures.values():
                        future.cancel()

    def _begin(self, pool: ThreadPoolExecutor, row: Row | Bad) -> dict[str, Future[bytes | Exception]]:
        if isinstance(row, Bad):
            return {}
        return {
            name: pool.submit(self._get, kind, row.file, row.values[name])
            for name, kind in self.columns.items()
            if isinstance(row.values.get(name), str)
        }

    def _finish(self, row: Row | Bad, futures: dict[str, Future[bytes | Exception]]) -> Row | Bad:
        if isinstance(row, Bad):
            return row
        for name in self.columns:
            value = row.values.get(name)
            if value is not None and not isinstance(value, str | bytes):
                return self._refuse(f"the column {name!r} names no file, it is {type(value).__name__}", row)
        found = {name: future.result() for name, future in futures.items()}
        problem = next((value for value in found.values() if isinstance(value, Exception)), None)
        if problem is not None:
            return self._refuse(reason(problem), row)
        return row._replace(values={**row.values, **found})

    def _get(self, kind: str, file: str, name: str) -> bytes | Exception:
        try:
            return _fetch(name) if kind == "url" else self._read(file, name)
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
            return ValueError(f"{name}: {_why(error)}")
        except Exception as error:
            if not content_error(error):
                raise
            return ValueError(
                f"{name}: {error}" if isinstance(error, ValueError) else f"no such file: {name}"
            )

    def _read(self, file: str, name: str) -> bytes:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(file), name))
        if path.startswith(("/", "../")) or path == "..":
            raise ValueError("the path leaves the corpus")
        one = FileList(
            root=self._root,
            names=[path],
            sizes=np.zeros(1, np.int64),
            versions=np.zeros(1, np.uint64),
            storage_options=self._options,
        )
        with one.open(0) as opened:
            data = opened.read(_LARGEST_FILE + 1)
        if len(data) > _LARGEST_FILE:
            raise ValueError(f"more than {_LARGEST_FILE:,} bytes")
        return data


def _held(waiting: Iterable[Waiting]) -> int:
    """Bytes of files that have come and wait for their turn."""
    total = 0
    for _, futures in waiting:
        for future in futures.values():
            if future.done() and future.exception() is None:
                found = future.result()
                total += len(found) if isinstance(found, bytes) else 0
    return total


def _why(error: Exception) -> str:
    cause = getattr(error, "reason", None) or error
    if isinstance(error, urllib.error.HTTPError):
        return f"{error.code} {error.reason}"
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__


def _opener() -> urllib.request.OpenerDirector:
    """What opens http and https and nothing else, wherever a redirect leads."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPErrorProcessor,
        urllib.request.UnknownHandler,
    ):
        opener.add_handler(handler())
    return opener


_OPENER = _opener()


def _fetch(url: str) -> bytes:
    """Get a URL; a server that does not answer, answers in part, or says it is busy, is asked again."""
    if not url.lower().startswith(("http://", "https://")):
        raise ValueError("only http and https are fetched")
    address = urllib.parse.quote(url, safe="%/:=&?~#+!$,;'@()*[]")
    for attempt in range(1, _TRIES + 1):
        wait = 0.5 * 2**attempt
        try:
            return _get_once(address)
        except urllib.error.HTTPError as error:
            if attempt == _TRIES or (error.code < 500 and error.code not in (408, 429)):
                raise
            wait = _asked_wait(error, wait)
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
            cause = getattr(error, "reason", None)
            if attempt == _TRIES or (isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_NONAME):
                raise
        time.sleep(wait)
    raise AssertionError("unreachable")


def _asked_wait(error: urllib.error.HTTPError, wait: float) -> float:
    """Seconds that a busy server asks for, within reason."""
    asked = error.headers.get("Retry-After", "")
    return min(float(asked), 30.0) if asked.isdecimal() else wait


def _get_once(address: str) -> bytes:
    request = urllib.request.Request(address, headers={"User-Agent": "datasync"})
    started = time.monotonic()
    pieces: list[bytes] = []
    length = 0
    with _OPENER.open(request, timeout=_SECONDS) as answer:
        said = answer.headers.get("Content-Length", "")
        if said.isdecimal() and int(said) > _LARGEST:
            raise ValueError(f"{int(said):,} bytes, more than the {_LARGEST:,} that are fetched")
        while piece := answer.read(1 << 16):
            pieces.append(piece)
            length += len(piece)
            if length > _LARGEST:
                raise ValueError(f"more than the {_LARGEST:,} bytes that are fetched")
            seconds = time.monotonic() - started
            if seconds > _PATIENCE and length < seconds * _SLOWEST:
                raise ValueError(f"it came at {length / seconds:,.0f} bytes a second and was given up")
    if said.isdecimal() and length < int(said):  # `read` with a size does not notice
        raise http.client.IncompleteRead(b"", int(said) - length)
    return b"".join(pieces)
