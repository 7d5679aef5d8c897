"""One suite over every store: what `datasync.storage.base` promises, kept by each of them."""

from __future__ import annotations

import hashlib
import multiprocessing
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from datasync.errors import ConflictError, CorruptError, NotFoundError, StoreError, UnsupportedError
from datasync.storage import Store, open_store
from shards.digests import crc32c
from tests.storage.sftpserver import PASSWORD, USER, sftp_server

STORES = ["local", "memory", "sftp", "seaweedfs", "ministack", "azurite", "fake-gcs"]


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    place = f"{tmp_path.name}/root"
    if request.param == "local":
        yield open_store(tmp_path / "root")
    elif request.param == "memory":
        memory = open_store(f"memory://{place}")
        yield memory
        memory.delete([info.key for info in memory.list()])
    elif request.param == "sftp":
        with sftp_server(tmp_path) as port:
            options = {"port": port, "username": USER, "password": PASSWORD, "look_for_keys": False}
            yield open_store("sftp://127.0.0.1/root", options={**options, "allow_agent": False})
    elif request.param in ("seaweedfs", "ministack"):
        server = request.getfixturevalue("s3_a" if request.param == "seaweedfs" else "s3_other")
        yield server.store("root")
    else:
        yield request.getfixturevalue("azure" if request.param == "azurite" else "google")(place)


def _has(store: Store, ability: str) -> None:
    """Skip where the store says that it cannot; that it says so truly is tested where it says it can."""
    if not getattr(store.abilities(), ability):
        pytest.skip(f"{store.url} has no {ability}")


def _keys(store: Store, prefix: str = "", after: str = "") -> list[str]:
    return [info.key for info in store.list(prefix, after=after)]


# Objects


def test_what_is_written_is_read(store: Store) -> None:
    data = bytes(range(256)) * 5000
    info = store.write("a/b/c", data)
    assert (info.key, info.bytes) == ("a/b/c", len(data))
    assert store.read("a/b/c") == data
    found = store.stat("a/b/c")
    assert (found.key, found.bytes) == ("a/b/c", len(data))
    if info.etag is not None:
        assert found.etag == info.etag
    if found.crc32c is not None:
        assert found.crc32c == crc32c(data)


@pytest.mark.parametrize(
    "kind", [bytes, bytearray, memoryview, lambda b: memoryview(bytearray(b"x" + b))[1:]]
)
def test_every_kind_of_buffer_is_written(store: Store, kind: Callable[[bytes], bytes]) -> None:
    data = hashlib.sha256(b"x").digest() * 4000
    store.write("k", kind(data))
    assert store.read("k") == data


def test_an_empty_object_is_an_object(store: Store) -> None:
    store.write("empty", b"")
    assert store.read("empty") == b""
    assert store.stat("empty").bytes == 0
    assert _keys(store) == ["empty"]
    with store.stream("empty") as pieces:
        assert b"".join(pieces) == b""


def test_an_object_or_a_range_is_read_into_memory_of_the_caller(store: Store) -> None:
    data = bytes(range(256)) * 12_000  # more than one piece
    etag = store.write("k", data).etag
    memory = bytearray(b"?" * len(data))
    filled = store.read_into("k", memoryview(memory), etag=etag)
    assert (filled.bytes, filled.crc32c, filled.sha256) == (len(data), crc32c(data), None)
    assert memory == data
    filled = store.read_into("k", memoryview(memory), sha256=True)
    assert filled.sha256 == hashlib.sha256(data).hexdigest()
    part = memoryview(memory)[:1000]
    filled = store.read_into("k", part, start=7)
    assert (filled.bytes, filled.crc32c) == (1000, crc32c(data[7:1007]))
    assert part == data[7:1007]


def test_an_object_of_another_size_than_the_memory_says_its_size(store: Store) -> None:
    store.write("k", b"12345")
    assert store.read_into("k", memoryview(bytearray(4))).bytes == 5
    memory = bytearray(8)
    assert store.read_into("k", memoryview(memory)).bytes == 5
    assert memory[:5] == b"12345"
    assert store.read_into("k", memoryview(memory), start=3).bytes == 2
    assert memory[:2] == b"45"
    store.write("empty", b"")
    filled = store.read_into("empty", memoryview(memory), sha256=True)
    assert (filled.bytes, filled.sha256) == (0, hashlib.sha256().hexdigest())
    with pytest.raises(NotFoundError):
        store.read_into("no", memoryview(memory))
    with pytest.raises(ConflictError):
        store.read_into("k", memoryview(memory), etag="0" * 32)


def test_a_second_write_replaces_the_first_whole(store: Store) -> None:
    store.write("k", b"long" * 1000)
    store.write("k", b"short")
    assert store.read("k") == b"short"


def test_ranges(store: Store) -> None:
    data = bytes(range(200))
    store.write("k", data)
    assert store.read("k", start=10, length=5) == data[10:15]
    assert store.read("k", start=190) == data[190:]
    assert store.read("k", start=190, length=50) == data[190:]
    assert store.read("k", start=200) == b""
    assert store.read("k", start=300, length=10) == b""
    assert store.read("k", start=5, length=0) == b""


def test_streams_give_the_bytes_in_pieces(store: Store) -> None:
    data = hashlib.sha256(b"x").digest() * 50_000
    store.write("k", data)
    with store.stream("k", chunk=300_000) as pieces:
        parts = [bytes(piece) for piece in pieces]
    assert b"".join(parts) == data
    assert max(map(len, parts)) <= 300_000
    assert len(parts) >= 5
    with store.stream("k", start=100, length=1000, chunk=64) as pieces:
        assert b"".join(pieces) == data[100:1100]


def test_a_stream_may_be_left_early(store: Store) -> None:
    store.write("k", bytes(1 << 20))
    for _ in range(3):
        with store.stream("k", chunk=1000) as pieces:
            next(pieces)
    assert len(store.read("k")) == 1 << 20


def test_what_is_not_there_is_named(store: Store) -> None:
    store.write("a", b"1")
    for ask in (store.stat, store.read):
        with pytest.raises(NotFoundError) as caught:
            ask("no/such")
        assert "no/such" in caught.value.message
        assert caught.value.mend
    with pytest.raises(NotFoundError), store.stream("no/such") as pieces:
        next(pieces)


@pytest.mark.parametrize("key", ["", "../up", "a/../../up", "a/./b", "..", "nul\0", "x" * 2000])
def test_keys_that_leave_the_root_or_name_nothing_are_refused(store: Store, key: str) -> None:
    for attempt in (lambda: store.write(key, b"1"), lambda: store.read(key), lambda: store.delete([key])):
        with pytest.raises(StoreError):
            attempt()


@pytest.mark.parametrize(
    "key", ["with space", "plus+and&", "ünï/çødé", "q?x=1#f", "100%25", "a'b\"c", "日本/語", "~-._!$*()"]
)
def test_odd_keys_are_kept_as_they_are_or_refused_by_name(store: Store, key: str) -> None:
    if store.url.startswith("az:") and "?" in key:
        with pytest.raises(StoreError, match="another name"):
            store.write(key, b"1")
        return
    store.write(key, b"1")
    assert _keys(store) == [key]
    assert store.read(key) == b"1"
    assert store.stat(key).key == key
    store.delete([key])
    assert _keys(store) == []


def test_a_deleted_object_is_gone_and_deleting_again_is_no_error(store: Store) -> None:
    for key in ("a", "b/c", "d"):
        store.write(key, b"1")
    store.delete(["a", "b/c", "never"])
    assert _keys(store) == ["d"]
    store.delete(["a"])
    store.delete([])


# Listings

TREE = ["a", "a.txt", "a0", "b/1", "b/2/x", "b/2/y", "b.c", "c/d/e/f", "z", "é"]


def test_listings_are_sorted_by_the_bytes_of_the_keys(store: Store) -> None:
    tree = ["a/x", "a.txt", "a0", "b/1", "b-1", "b/2/x", "b/2.y", "b/2/y", "z", "é", "\U0001f600"]
    for key in reversed(tree):
        store.write(key, b"12")
    expected = sorted(tree, key=str.encode)
    assert _keys(store) == expected
    for info in store.list():
        assert info.bytes == 2
    for prefix in ("b", "b/", "b/2", "b/2/", "nothing", "a."):
        assert _keys(store, prefix) == [key for key in expected if key.startswith(prefix)], prefix
    for after in (*tree, "a", "b", "b/2/", "b/3"):
        assert _keys(store, "", after) == [k for k in expected if k.encode() > after.encode()], after
    assert _keys(store, "b/", "b/1") == [k for k in expected if k.startswith("b/") and k.encode() > b"b/1"]


def test_listings_longer_than_a_page_are_whole(store: Store) -> None:
    keys = [f"many/{number:05d}" for number in range(1203)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.write(key, b""), keys))
    assert _keys(store) == keys
    assert _keys(store, "many/", after=keys[1000]) == keys[1001:]
    store.delete(keys)
    assert _keys(store, "many/") == []


def test_a_child_has_its_own_root(store: Store) -> None:
    child = store.child("below/here")
    child.write("k", b"1")
    store.write("below/hereafter", b"2")
    assert _keys(child) == ["k"]
    assert store.read("below/here/k") == b"1"
    assert child.url == f"{store.url}/below/here"
    assert store.child("below").child("here") == child
    with pytest.raises(StoreError):
        child.read("../hereafter")
    with pytest.raises(ValueError, match=r"\.\."):
        store.child("../elsewhere")


# Integrity and conditions


def test_a_wrong_crc_is_refused_and_nothing_is_written(store: Store) -> None:
    store.write("k", b"old")
    with pytest.raises(CorruptError):
        store.write("k", b"new", crc32c=crc32c(b"other"))
    assert store.read("k") == b"old"
    store.write("k", b"new", crc32c=crc32c(b"new"))
    assert store.read("k") == b"new"


def test_one_of_many_creates(store: Store) -> None:
    _has(store, "if_absent")
    results: list[str] = []

    def create(number: int) -> None:
        try:
            store.write("lease", f"{number}".encode(), if_absent=True)
            results.append(f"{number}")
        except ConflictError:
            results.append("lost")

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [result for result in results if result != "lost"]
    assert len(results) == 8
    assert len(winners) == 1
    assert store.read("lease") == winners[0].encode()


def test_a_replacement_can_be_bound_to_a_version(store: Store) -> None:
    _has(store, "if_match")
    first = store.write("k", b"1").etag
    assert first is not None
    second = store.write("k", b"22", if_match=first).etag
    assert second is not None
    with pytest.raises(ConflictError):
        store.write("k", b"333", if_match=first)
    with pytest.raises(ConflictError):
        store.write("absent", b"1", if_match=first)
    assert store.read("k") == b"22"


def test_one_of_many_replaces(store: Store) -> None:
    _has(store, "if_match")
    etag = store.write("k", b"start").etag

    def replace(number: int) -> int:
        try:
            store.write("k", f"{number}".encode(), if_match=etag)
        except ConflictError:
            return -1
        return number

    with ThreadPoolExecutor(8) as pool:
        winners = [number for number in pool.map(replace, range(8)) if number >= 0]
    assert len(winners) == 1
    assert store.read("k") == f"{winners[0]}".encode()


def test_a_read_can_be_bound_to_a_version(store: Store) -> None:
    etag = store.write("k", b"1" * 1000).etag
    if etag is None:
        pytest.skip("no versions here")
    assert store.read("k", etag=etag) == b"1" * 1000
    assert store.read("k", start=10, length=10, etag=etag) == b"1" * 10
    store.write("k", b"2" * 999)
    with pytest.raises(ConflictError):
        store.read("k", etag=etag)
    with pytest.raises(ConflictError), store.stream("k", etag=etag) as pieces:
        next(pieces)


# Files, uploads, copies


def test_a_file_is_written(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content" * 1000)
    info = store.write_file("k", path)
    assert info.bytes == 7000
    assert store.read("k") == path.read_bytes()
    if store.abilities().if_absent:
        with pytest.raises(ConflictError):
            store.write_file("k", path, if_absent=True)


def _parts(data: bytes, size: int) -> dict[int, bytes]:
    return {number + 1: data[start : start + size] for number, start in enumerate(range(0, len(data), size))}


def test_an_upload_appears_when_it_is_completed(store: Store) -> None:
    data = hashlib.sha256(b"x").digest() * ((33 << 20) // 32)
    upload = store.begin("big", bytes=len(data))
    parts = _parts(data, upload.part_bytes)
    with ThreadPoolExecutor(len(parts)) as pool:
        sent = {
            number: pool.submit(upload.put, number, part, crc32c=crc32c(part))
            for number, part in reversed(parts.items())
        }
        tags = {number: future.result() for number, future in sent.items()}
    assert _keys(store) == []
    info = upload.complete(tags)
    assert info.bytes == len(data)
    assert _keys(store) == ["big"]
    assert store.read("big") == data
    if info.crc32c is not None:
        assert info.crc32c == crc32c(data)
    assert list(store.uploads()) == []


def test_an_upload_goes_on_where_it_was_left(store: Store) -> None:
    _has(store, "multipart")
    begun = store.begin("big", bytes=(16 << 20) + 5)
    first, second = bytes(begun.part_bytes), b"tail!"
    assert begun.part_bytes == 16 << 20
    tag = begun.put(1, first)
    (found,) = store.uploads()
    assert (found.key, found.upload_id) == ("big", begun.upload_id)
    assert list(store.uploads("other")) == []
    again = pickle.loads(pickle.dumps(store)).resume("big", found.upload_id, bytes=(16 << 20) + 5)
    assert again.parts() == {1: (tag, 16 << 20)}
    info = again.complete({1: tag, 2: again.put(2, second)})
    assert info.bytes == (16 << 20) + 5
    assert store.read("big", start=16 << 20) == b"tail!"


def test_a_damaged_part_is_refused(store: Store) -> None:
    upload = store.begin("big", bytes=4)
    with pytest.raises(CorruptError):
        upload.put(1, b"good", crc32c=crc32c(b"evil"))
    assert upload.parts() == {}
    upload.abort()


def test_an_aborted_upload_leaves_nothing(store: Store) -> None:
    upload = store.begin("big", bytes=4)
    upload.put(1, b"1234")
    upload.abort()
    upload.abort()
    assert list(store.uploads()) == []
    assert _keys(store) == []
    with pytest.raises(StoreError):
        store.resume("big", upload.upload_id, bytes=4).put(2, b"x")


def test_completing_can_be_conditional(store: Store) -> None:
    _has(store, "multipart")
    _has(store, "if_absent")
    store.write("big", b"there")
    upload = store.begin("big", bytes=4)
    tag = upload.put(1, b"1234")
    with pytest.raises(ConflictError):
        upload.complete({1: tag}, if_absent=True)
    assert store.read("big") == b"there"
    upload.abort()


def test_a_copy_inside_the_store(store: Store) -> None:
    _has(store, "server_copy")
    store.write("from/ö +x", b"content" * 1000)
    info = store.child("to").copy(store, "from/ö +x", "k")
    assert (info.key, info.bytes) == ("k", 7000)
    assert store.read("to/k") == b"content" * 1000
    with pytest.raises(NotFoundError):
        store.copy(store, "no/such", "x")


def test_no_copy_between_different_stores(store: Store, tmp_path: Path) -> None:
    other = open_store("memory://elsewhere") if store.url.startswith("/") else open_store(tmp_path / "other")
    other.write("k", b"1")
    with pytest.raises(UnsupportedError):
        store.copy(other, "k", "k")


# Processes


def test_a_store_pickles(store: Store) -> None:
    store.write("k", b"1")
    again = pickle.loads(pickle.dumps(store))
    assert again == store
    assert hash(again) == hash(store)
    assert again.url == store.url
    assert again.read("k") == b"1"


def _read_in_child(store: Store, results: multiprocessing.SimpleQueue[bytes]) -> None:
    results.put(store.read("k"))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_use_a_store_that_the_parent_has_used(store: Store, method: str) -> None:
    if store.url.startswith("memory"):
        pytest.skip("the memory of another process is another memory")
    store.write("k", b"1")
    context = multiprocessing.get_context(method)
    results: multiprocessing.SimpleQueue[bytes] = context.SimpleQueue()
    children = [context.Process(target=_read_in_child, args=(store, results)) for _ in range(2)]
    for child in children:
        child.start()
    assert store.read("k") == b"1"
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    assert [results.get(), results.get()] == [b"1", b"1"]
