"""A hub of datasets on loopback, as much of Hugging Face's as reading files takes.

with Hub(folder) as endpoint:
    open_store("hf://datasets/user/data", options={"endpoint": endpoint, "token": False})
"""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

_COMMIT = "0" * 40
_API, _FILES = "/api/datasets/user/data", "/datasets/user/data/resolve/"


class Hub:
    """Serves `folder` as the dataset ``user/data``."""

    def __init__(self, folder: Path) -> None:
        self.asked: list[str] = []

        class Handler(_Handler):
            root = folder
            asked = self.asked

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> str:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self.endpoint

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root: Path
    asked: list[str]

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.asked.append(path)
        if path == _API or path.startswith(f"{_API}/revision/"):
            self._json({"id": "user/data", "sha": _COMMIT, "siblings": [], "private": False, "tags": []})
        elif path.startswith(f"{_API}/tree/"):
            folder = self.root / path.removeprefix(f"{_API}/tree/").partition("/")[2]
            if not folder.is_dir():
                self._json({"error": "Entry not found"}, 404)
                return
            deep = "recursive=true" in self.path.lower()
            self._json([self._entry(found) for found in (folder.rglob("*") if deep else folder.iterdir())])
        elif path.startswith(_FILES):
            self._file(self.root / path.removeprefix(_FILES).partition("/")[2])
        else:
            self._json({"error": f"nothing at {path}"}, 404)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.asked.append(path)
        body = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        if not path.startswith(f"{_API}/paths-info/"):
            self._json({"error": f"nothing at {path}"}, 404)
            return
        there = [self.root / name for name in body["paths"]]
        self._json([self._entry(found) for found in there if found.exists()])

    def _entry(self, found: Path) -> dict[str, Any]:
        name = str(found.relative_to(self.root))
        if found.is_dir():
            return {"type": "directory", "path": name, "oid": "0"}
        data = found.read_bytes()
        return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}

    def _file(self, found: Path) -> None:
        if not found.is_file():
            self._json({"error": "Entry not found"}, 404)
            return
        data, status, wanted = found.read_bytes(), 200, self.headers.get("Range", "")
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": _COMMIT}
        if wanted.startswith("bytes="):
            first, _, last = wanted[6:].partition("-")
            end = min(int(last or len(data) - 1), len(data) - 1)
            headers["Content-Range"] = f"bytes {first}-{end}/{len(data)}"
            data, status = data[int(first) : end + 1], 206
        self._answer(data, status, headers)

    def _json(self, document: object, status: int = 200) -> None:
        self._answer(json.dumps(document).encode(), status, {"Content-Type": "application/json"})

    def _answer(self, data: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
