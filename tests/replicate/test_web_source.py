"""A folder behind a web server that lists it as a page of links."""

from __future__ import annotations

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

from datasync.storage.local import LocalStore
from tests.replicate.kit import data_of, datasync, write_tree


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_args):
        pass


def test_a_page_of_links_is_a_tree(tmp_path):
    files = {"a.bin": b"1" * 1000, "empty": b"", "b.txt": b"two"}
    write_tree(tmp_path / "web" / "tree", files)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path / "web")) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/tree"
        for said in ("3 copied", "nothing to copy"):
            done = datasync("replicate", url, "--to", "./out", cwd=tmp_path)
            assert said in done.stdout
        server.shutdown()
    assert data_of(LocalStore(tmp_path / "out" / "tree")) == files
