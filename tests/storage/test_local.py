"""A folder as a store: what is particular to files, beside the conformance suite."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from datasync.errors import ConflictError, DeniedError, NotFoundError, StoreError, TransientError
from datasync.storage.local import LocalStore
from datasync.storage.temp import HIDDEN


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "root")


def test_nothing_but_objects_is_left_in_the_folder(store: LocalStore) -> None:
    store.write("a/b", b"1")
    upload = store.begin("big", bytes=3)
    upload.complete({1: upload.put(1, b"abc")})
    store.delete(["a/b"])
    assert sorted(str(p.relative_to(store.root)) for p in Path(store.root).rglob("*")) == ["big"]


def _write_and_stop(root: str) -> None:
    """Leave a half-written temporary file behind, as a killed process does."""
    store = LocalStore(root)
    with store._temp.file() as temp:
        os.write(temp.fd, b"half")
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_writer_leaves_nothing_visible_and_the_next_writer_sweeps(store: LocalStore) -> None:
    process = multiprocessing.get_context("fork").Process(target=_write_and_stop, args=(store.root,))
    process.start()
    process.join()
    assert len(list(Path(store.root, HIDDEN).iterdir())) == 1
    assert list(store.list()) == []
    LocalStore(store.root).write("a", b"1")
    assert [p.name for p in Path(store.root).iterdir()] == ["a"]


def test_a_living_writer_is_not_swept(store: LocalStore) -> None:
    with store._temp.file() as temp:
        LocalStore(store.root).write("a", b"1")
        assert os.path.exists(temp.path)


def test_a_file_of_another_host_is_swept_only_when_old(store: LocalStore) -> None:
    hidden = Path(store.root, HIDDEN)
    hidden.mkdir(parents=True)
    fresh, old = hidden / "elsewhere-1", hidden / "elsewhere-2"
    fresh.write_bytes(b"x")
    old.write_bytes(b"x")
    os.utime(old, (time.time() - 7200, time.time() - 7200))
    store.write("a", b"1")
    assert fresh.exists()
    assert not old.exists()


def test_an_upload_survives_the_sweep(store: LocalStore) -> None:
    upload = store.begin("big", bytes=3)
    LocalStore(store.root).write("a", b"1")
    assert [u.upload_id for u in store.uploads()] == [upload.upload_id]


def test_parts_whose_bytes_were_lost_do_not_count(store: LocalStore) -> None:
    upload = store.begin("big", bytes=6)
    upload.put(1, b"abcdef")
    with open(Path(store.root, HIDDEN, upload.upload_id, "data"), "r+b") as file:
        file.write(b"X")
    assert store.resume("big", upload.upload_id, bytes=6).parts() == {}


def test_a_read_only_folder_is_denied(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "makedirs", refuse)
    with pytest.raises(DeniedError, match="a/b"):
        store.write("a/b", b"1")


def test_a_full_disk_is_named_and_leaves_nothing(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    store.write("a", b"old")
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StoreError, match="no space left"):
        store.write("a", b"new")
    monkeypatch.undo()
    assert store.read("a") == b"old"
    assert not Path(store.root, HIDDEN).exists()


def test_a_file_changed_while_it_is_read_is_noticed(store: LocalStore) -> None:
    store.write("a", bytes(100))
    path = Path(store.root, "a")
    with store.stream("a", chunk=10) as pieces:
        next(pieces)
        time.sleep(0.01)
        path.write_bytes(b"1" * 100)
        with pytest.raises(ConflictError):
            list(pieces)
    with store.stream("a", chunk=10) as pieces:
        next(pieces)
        os.truncate(path, 50)
        with pytest.raises(TransientError):
            list(pieces)


def test_a_file_replaced_while_it_is_read_gives_the_old_bytes(store: LocalStore) -> None:
    store.write("a", b"1" * 100)
    with store.stream("a", chunk=10) as pieces:
        first = bytes(next(pieces))
        store.write("a", b"2" * 100)
        assert first + b"".join(pieces) == b"1" * 100


def test_a_loop_of_links_is_named(store: LocalStore) -> None:
    store.write("a/b", b"1")
    os.symlink("..", Path(store.root, "a", "up"))
    with pytest.raises(StoreError, match="link to a folder above it"):
        list(store.list())


def test_a_link_to_nothing_is_named(store: LocalStore) -> None:
    store.write("a", b"1")
    os.symlink("nowhere", Path(store.root, "b"))
    with pytest.raises(StoreError, match="link to nothing"):
        list(store.list())


def test_a_linked_folder_is_followed(store: LocalStore, tmp_path: Path) -> None:
    LocalStore(tmp_path / "elsewhere").write("x", b"1")
    store.write("a", b"1")
    os.symlink(tmp_path / "elsewhere", Path(store.root, "b"))
    assert [o.key for o in store.list()] == ["a", "b/x"]


def test_a_pipe_in_the_tree_is_named(store: LocalStore) -> None:
    store.write("a", b"1")
    os.mkfifo(Path(store.root, "pipe"))
    with pytest.raises(StoreError, match="not a regular file"):
        list(store.list())


def test_a_missing_root_is_no_empty_one(store: LocalStore) -> None:
    with pytest.raises(NotFoundError, match="mounted"):
        list(store.list())


def test_names_that_are_not_utf8_keep_their_bytes(store: LocalStore) -> None:
    os.makedirs(store.root)
    with open(os.path.join(os.fsencode(store.root), b"caf\xe9"), "wb") as file:
        file.write(b"1")
    (found,) = store.list()
    assert store.read(found.key) == b"1"


def test_a_key_and_the_folder_of_other_keys_cannot_share_a_name(store: LocalStore) -> None:
    store.write("a", b"1")
    with pytest.raises(StoreError, match="is a file"):
        store.write("a/b", b"1")
    store.write("c/d", b"1")
    with pytest.raises(StoreError, match="is a folder"):
        store.write("c", b"1")


@pytest.mark.parametrize("key", ["a//b", "/a", "a/", f"{HIDDEN}/x", f"a/{HIDDEN}"])
def test_keys_that_cannot_be_files_are_refused(store: LocalStore, key: str) -> None:
    with pytest.raises(StoreError):
        store.write(key, b"1")


def test_writes_and_deletes_in_one_folder_do_not_disturb_each_other(store: LocalStore) -> None:
    failures: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for _ in range(30):
                store.write(f"deep/folder/{name}", b"1")
                store.delete([f"deep/folder/{name}"])
        except StoreError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(str(n),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert list(Path(store.root).iterdir()) == []
