"""The viewer's pages: what they show, what they escape, how they answer what is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the web extra is not installed")

from starlette.testclient import TestClient

from datasync.config import Config
from datasync.shapes import make_shapes
from datasync.web.app import make_app
from shards import ShardWriter, convert

EVIL = "<script>alert('x')</script>"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    folder: Path = tmp_path_factory.mktemp("view")
    make_shapes(folder / "corpus", count=20)
    convert(str(folder / "corpus"), str(folder / "a" / "shapes"), workers=1)
    with ShardWriter(columns={"text": "str"}, out=str(folder / "a" / "evil")) as writer:
        writer.write({"text": EVIL})
    (folder / "datasync.toml").write_text('[clusters.a]\nurl = "a"\n[clusters.b]\nurl = "b"\n')
    return TestClient(make_app(Config.load(folder / "datasync.toml")))


def test_the_overview_links_to_every_dataset_that_is_somewhere(client: TestClient) -> None:
    page = client.get("/")
    assert page.status_code == 200
    assert "<a href='/a/shapes'>shapes</a>" in page.text
    assert "<td>b</td>" in page.text
    assert "absent" in page.text


def test_a_dataset_has_its_schema_and_thumbnails(client: TestClient) -> None:
    page = client.get("/a/shapes?samples=5")
    assert page.status_code == 200
    assert page.text.count("data:image/png;base64,") == 5
    assert "caption" in page.text


def test_what_a_dataset_holds_is_escaped(client: TestClient) -> None:
    page = client.get("/a/evil")
    assert page.status_code == 200
    assert EVIL not in page.text
    assert "&lt;script&gt;" in page.text
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]


@pytest.mark.parametrize("path", ["/a/absent", "/nowhere/shapes", "/a/../../etc", f"/a/{EVIL}"])
def test_what_is_not_there_is_said_without_harm(client: TestClient, path: str) -> None:
    page = client.get(path)
    assert page.status_code == 404
    assert EVIL not in page.text


def test_a_silly_number_of_samples_is_bounded(client: TestClient) -> None:
    assert client.get("/a/shapes?samples=1000000000").status_code == 200
    assert client.get("/a/shapes?samples=x").status_code == 200
