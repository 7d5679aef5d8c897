"""Columns that name files: `--media image:path` or `image:url` puts what they name in their place.

A path is relative to the folder of the file that the row is in, and must stay inside the corpus (invariant
10); a URL is http or https. Files of many rows are fetched together, in the order of the rows.
"""

from __future__ import annotations

import http.client
import posixpath
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from shards.sources.base import content_error
from shards.sources.files import FileList

_AT_ONCE = 16
_LIMIT = (1 << 32) - 1
_SECONDS = 30.0
_TRIES = 3


class Resolver:
    """Reads what columns name.

    Args:
        columns (Mapping[str, str]): Column of the source -> ``path`` or ``url``.
        root (str): The corpus.
        storage_options (Mapping[str, Any]): What fsspec needs to reach it.
    """

    def __init__(self, columns: Mapping[str, str], root: str, storage_options: Mapping[str, Any]) -> None:
        self.columns = dict(columns)
        self._root = root
        self._options = storage_options

    def resolve(self, rows: Iterable[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
        """Rows, each with the file that it is in, with bytes, or the reason why not, for what they name."""
        listed = list(rows)
        wanted = [
            (kind, file, values[name])
            for file, values in listed
            for name, kind in self.columns.items()
            if isinstance(values.get(name), str)
        ]
        with ThreadPoolExecutor(min(_AT_ONCE, max(len(wanted), 1))) as pool:
            found = pool.map(lambda one: self._get(*one), wanted)
            return [
                {
                    name: next(found) if name in self.columns and isinstance(value, str) else value
                    for name, value in _in_order(values, self.columns)
                }
                for _, values in listed
            ]

    def _get(self, kind: str, file: str, name: str) -> bytes | Exception:
        try:
            return _fetch(name) if kind == "url" else self._read(file, name)
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError) as error:
            return ValueError(f"{name}: {getattr(error, 'reason', None) or error}")
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
            data = opened.read(_LIMIT + 1)
        if len(data) > _LIMIT:
            raise ValueError(f"more than {_LIMIT:,} bytes")
        return data


def _in_order(values: dict[str, Any], columns: Mapping[str, str]) -> list[tuple[str, Any]]:
    """Items with the named columns in the order in which they were asked for."""
    return [(name, values[name]) for name in columns if name in values] + [
        (name, value) for name, value in values.items() if name not in columns
    ]


def _fetch(url: str) -> bytes:
    """Get a URL; a server that does not answer, or says it is busy, is asked again."""
    if not url.startswith(("http://", "https://")):
        raise ValueError("only http and https are fetched")
    request = urllib.request.Request(url, headers={"User-Agent": "datasync"})
    for attempt in range(1, _TRIES + 1):
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
                data: bytes = answer.read(_LIMIT + 1)
                if len(data) > _LIMIT:
                    raise ValueError(f"more than {_LIMIT:,} bytes")
                return data
        except urllib.error.HTTPError as error:
            if attempt == _TRIES or (error.code < 500 and error.code != 429):
                raise
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError):
            if attempt == _TRIES:
                raise
        time.sleep(0.5 * 2**attempt)
    raise AssertionError("unreachable")
