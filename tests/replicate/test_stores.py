"""Replication from and to every kind of store, each behind a real server on loopback."""

from __future__ import annotations

import pytest

from datasync.errors import NotFoundError, UnsupportedError
from datasync.ops import receipts
from datasync.replicate import lease, replicate, transfer
from datasync.replicate.unchanged import unchanged
from datasync.replicate.verify import verify
from datasync.storage import open_store
from datasync.storage.base import TIME_TAG
from datasync.storage.local import LocalStore
from tests.faults.webserver import WebServer, truncate
from tests.replicate.hub import Hub
from tests.replicate.kit import QUICK, Spy, data_of, make_dataset, make_shards, publish_dataset, write_tree
from tests.storage.sftpserver import PASSWORD, USER, sftp_server


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_SETTLE_SECONDS", 0.1)
    monkeypatch.setattr(transfer, "LARGE_BYTES", 6 << 20)


def one(source, there, **options):
    from dataclasses import replace

    (outcome,) = replicate(source, {"there": there}, name="emoji", options=replace(QUICK, **options))
    return outcome


@pytest.fixture(params=["ministack", "azurite", "fake-gcs", "sftp", "memory"])
def place(request, tmp_path):
    name = tmp_path.name
    if request.param == "ministack":
        yield request.getfixturevalue("s3_other").store("emoji")
    elif request.param == "memory":
        yield open_store(f"memory://{name}")
    elif request.param == "sftp":
        (tmp_path / "remote").mkdir()
        with sftp_server(tmp_path / "remote") as port:
            options = {"port": port, "username": USER, "password": PASSWORD, "look_for_keys": False}
            yield open_store("sftp://127.0.0.1/data/emoji", options={**options, "allow_agent": False})
    else:
        yield request.getfixturevalue("azure" if request.param == "azurite" else "google")(f"{name}/emoji")


def test_a_dataset_goes_there_and_comes_back(place, tmp_path):
    source, back = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "back")
    shards = make_dataset(source, count=4) | make_shards(1, size=9 << 20, seed="large")
    publish_dataset(source, shards)
    assert one(source, place).state == "published"
    assert data_of(place) == data_of(source)
    assert receipts.read(place).whole
    again = one(source, place)
    assert (again.state, again.tally.copied) == ("already", 0)
    assert verify(place, name="emoji", quiet=True).good
    assert one(place, back).state == "published"
    assert data_of(back) == data_of(source)
    # A new version: only what is new goes, and readers of the old one keep their shards.
    publish_dataset(source, dict(list(shards.items())[1:]) | make_shards(1, seed="new"))
    newer = one(source, place)
    assert (newer.state, newer.tally.copied) == ("published", 1)
    assert data_of(place).keys() >= shards.keys()


def test_parts_that_go_in_order_do_not_starve_each_other_of_slots(tmp_path, monkeypatch):
    """However few operations at once the endpoint takes, and in whatever order threads wake up."""
    from datasync.replicate import limits

    monkeypatch.setattr(limits, "_by_endpoint", {})
    place = open_store(f"memory://{tmp_path.name}")
    limits.concurrency_of(place).limit = limits.concurrency_of(place).most = 1
    source = LocalStore(tmp_path / "a")
    publish_dataset(source, make_shards(2, size=34 << 20, seed="large"))
    assert one(source, place).state == "published"
    assert data_of(place) == data_of(source)


def test_a_tree_goes_there_with_its_deletions(place, tmp_path):
    source = LocalStore(tmp_path / "a")
    write_tree(tmp_path / "a", {f"folder {n % 3}/f{n}": bytes([n]) * 1000 for n in range(12)})
    assert one(source, place).state == "published"
    source.delete(["folder 0/f0"])
    source.write("folder 1/f1", b"changed")
    outcome = one(source, place, delete=True)
    assert (outcome.tally.copied, outcome.deleted) == (1, 1)
    assert data_of(place) == data_of(source)


def test_nothing_to_do_is_known_by_the_stores_own_tags_and_never_by_times(place, tmp_path):
    source = LocalStore(tmp_path / "a")
    make_dataset(source, count=3)
    for start, end in ((source, place), (place, LocalStore(tmp_path / "back"))):
        one(start, end)
        tells = not place.stat("index.json").etag.startswith(TIME_TAG)
        assert bool(unchanged(start, {"there": end})) == tells
    # Somebody exchanges the index at the copy for one of the same size.
    index = place.read("index.json")
    place.write("index.json", index.replace(b'"samples": 10', b'"samples": 99', 1))
    assert unchanged(source, {"there": place}) == {}
    one(source, place)
    assert place.read("index.json") == index


def test_a_tree_that_did_not_change_is_not_read_again_where_the_store_can_tell(place, tmp_path):
    write_tree(tmp_path / "a", {f"f{n}": bytes([n]) * 1000 for n in range(5)})
    one(LocalStore(tmp_path / "a"), place)
    (tmp_path / "copy").mkdir()
    source, b = Spy(place), LocalStore(tmp_path / "b")
    assert one(source, b, as_tree=True).state == "published"
    tells = not place.stat("f0").etag.startswith(TIME_TAG)
    place.write("f1", b"x" * 1000)  # the same size, perhaps in the same second
    source.calls.clear()
    assert one(source, b, as_tree=True).tally.copied == 1
    assert data_of(b) == data_of(place)
    read = {key for operation, key in source.calls if operation.startswith(("read", "stream"))}
    assert ("f0" in read) != tells


# Web servers: to read from


def test_a_web_server_is_a_source(tmp_path):
    shards = make_dataset(LocalStore(tmp_path / "www" / "emoji"), count=3)
    with WebServer(tmp_path / "www") as server:
        source = open_store(f"{server.url}/emoji")
        b = LocalStore(tmp_path / "b")
        assert one(source, b).state == "published"
        assert data_of(b) == data_of(LocalStore(tmp_path / "www" / "emoji"))
        assert receipts.read(b).objects == len(shards)
        assert unchanged(source, {"b": b})
        with pytest.raises(UnsupportedError, match="only be read"):
            source.write("x", b"1")


def test_a_web_server_that_truncates_publishes_nothing_and_the_rerun_completes(tmp_path):
    make_dataset(LocalStore(tmp_path / "www" / "emoji"), count=3)
    with WebServer(tmp_path / "www") as server:
        source, b = open_store(f"{server.url}/emoji"), LocalStore(tmp_path / "b")
        server.fault = lambda handler, data: b"PAR1" not in data[:4] and truncate(handler, data)
        outcome = one(source, b)
        assert outcome.error is not None
        assert receipts.read(b) is None
        assert "index.json" not in data_of(b)
        server.fault = None
        assert one(source, b).state == "published"
        assert data_of(b) == data_of(LocalStore(tmp_path / "www" / "emoji"))


def test_a_web_server_without_ranges_gives_whole_objects(tmp_path):
    make_dataset(LocalStore(tmp_path / "www" / "emoji"), count=3)
    with WebServer(tmp_path / "www") as server:
        server.ranges = False
        source, b = open_store(f"{server.url}/emoji"), LocalStore(tmp_path / "b")
        outcome = one(source, b)
        assert outcome.error is None
        assert data_of(b) == data_of(LocalStore(tmp_path / "www" / "emoji"))


# A hub of datasets: to read from


@pytest.mark.parametrize("as_tree", [False, True])
def test_a_hub_is_a_source(tmp_path, as_tree):
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    make_dataset(LocalStore(tmp_path / "hub" / "emoji"), count=3)
    with Hub(tmp_path / "hub") as endpoint:
        source = open_store("hf://datasets/user/data/emoji", options={"endpoint": endpoint, "token": False})
        b = LocalStore(tmp_path / "b")
        outcome = one(source, b, as_tree=as_tree)
        assert (outcome.state, outcome.tally.copied) == ("published", 4 if as_tree else 3)
        assert data_of(b) == data_of(LocalStore(tmp_path / "hub" / "emoji"))
        assert one(source, b, as_tree=as_tree).tally.copied == 0
        assert bool(unchanged(source, {"b": b})) != as_tree


def test_one_object_of_a_hub_is_asked_for_without_its_folder(tmp_path):
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    write_tree(tmp_path / "hub", {f"data/{n:04d}.bin": bytes([n % 251]) * 100 for n in range(500)})
    hub = Hub(tmp_path / "hub")
    with hub as endpoint:
        source = open_store("hf://datasets/user/data", options={"endpoint": endpoint, "token": False})
        tags = {info.key: info.etag for info in source.list()}
        hub.asked.clear()
        info = source.stat("data/0007.bin")
        assert (info.bytes, info.etag) == (100, tags["data/0007.bin"])
        assert source.read("data/0007.bin", start=10, length=5, etag=info.etag) == bytes([7]) * 5
        with pytest.raises(NotFoundError):
            source.stat("data/none.bin")
        with pytest.raises(NotFoundError):
            source.stat("data")
        assert not [path for path in hub.asked if "/tree/" in path], hub.asked
        assert len(hub.asked) < 20
