"""ShardWriter: datasets in folders and on stores; the index comes last or not at all."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest

from shards import ShardReader, ShardWriter
from shards.errors import DatasyncError, UsageError
from shards.mds import RowError
from shards.place import Folder, Remote

COLUMNS = {"n": "int", "text": "str"}


def _rows(count: int) -> list[dict[str, Any]]:
    return [{"n": i, "text": f"row {i}"} for i in range(count)]


def _write(out: Any, count: int = 200, **options: Any) -> None:
    with ShardWriter(columns=COLUMNS, out=out, size_limit=1000, **options) as writer:
        for row in _rows(count):
            writer.write(row)


def _fail_after(count: int, writer: ShardWriter) -> None:
    with writer:
        for row in _rows(count):
            writer.write(row)
        raise ZeroDivisionError


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def memory() -> Iterator[Any]:
    fs = fsspec.filesystem("memory")
    yield fs
    if fs.exists("/"):
        fs.rm("/", recursive=True)


@pytest.mark.parametrize("compression", [None, "zstd:3"])
def test_rows_come_back_in_order(tmp_path: Path, compression: str | None) -> None:
    _write(tmp_path / "d", compression=compression)
    reader = ShardReader(tmp_path / "d")
    assert list(reader) == _rows(200)
    assert len(reader.index.shards) > 5
    named = {info.stored.basename for info in reader.index.shards}
    assert set(_files(tmp_path / "d")) == {"index.json", *named}


def test_the_same_rows_give_the_same_bytes_for_any_number_of_threads(tmp_path: Path) -> None:
    for workers in (1, 8):
        _write(tmp_path / str(workers), compression="zstd:3", max_workers=workers)
    assert _files(tmp_path / "1") == _files(tmp_path / "8")
    for name in _files(tmp_path / "1"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "8" / name).read_bytes()


def test_arrow_batches_give_the_same_dataset(tmp_path: Path) -> None:
    _write(tmp_path / "rows")
    with ShardWriter(columns=COLUMNS, out=str(tmp_path / "batches"), size_limit=1000) as writer:
        for start in range(0, 200, 33):
            writer.write_batch(pa.RecordBatch.from_pylist(_rows(200)[start : start + 33]))
    assert (tmp_path / "rows/index.json").read_bytes() == (tmp_path / "batches/index.json").read_bytes()


def test_a_store_gets_shards_and_index_and_no_local_copy(memory: Any, tmp_path: Path) -> None:
    _write("memory://bucket/data", compression="zstd")
    assert list(ShardReader("memory://bucket/data")) == _rows(200)
    _write((str(tmp_path / "local"), "memory://bucket/other"))
    assert list(ShardReader("memory://bucket/other")) == _rows(200)
    assert not (tmp_path / "local").exists()


def test_a_local_copy_is_kept_on_request(memory: Any, tmp_path: Path) -> None:
    _write((str(tmp_path / "local"), "memory://bucket/data"), keep_local=True)
    assert list(ShardReader("memory://bucket/data")) == list(ShardReader(tmp_path / "local")) == _rows(200)


def test_a_remote_that_is_a_folder(tmp_path: Path) -> None:
    _write((str(tmp_path / "local"), f"file://{tmp_path}/remote"))
    assert list(ShardReader(tmp_path / "remote")) == _rows(200)


def test_an_exception_leaves_no_index_and_nothing_else(tmp_path: Path) -> None:
    writer = ShardWriter(columns=COLUMNS, out=str(tmp_path / "d"), size_limit=1000)
    with pytest.raises(ZeroDivisionError):
        _fail_after(200, writer)
    assert _files(tmp_path) == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("shard")]
    with pytest.raises(UsageError, match="finished or was aborted"):
        writer.write(_rows(1)[0])


def test_a_bad_row_can_be_left_out(tmp_path: Path) -> None:
    with ShardWriter(columns=COLUMNS, out=str(tmp_path / "d")) as writer:
        writer.write({"n": 1, "text": "a"})
        with pytest.raises(RowError, match="column 'n'"):
            writer.write({"n": "one", "text": "b"})
        writer.write({"n": 2, "text": "c"})
    assert [row["n"] for row in ShardReader(tmp_path / "d")] == [1, 2]


def test_the_index_is_written_after_every_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    real = Folder.write

    def record(self: Folder, name: str, data: bytes) -> None:
        real(self, name, data)
        written.append(name)

    monkeypatch.setattr(Folder, "write", record)
    _write(tmp_path / "d")
    assert written[-1] == "index.json"
    assert written.count("index.json") == 1


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(UsageError, match="is not empty"):
        _write(tmp_path)
    _write(tmp_path / "d")
    before = (tmp_path / "d/index.json").read_bytes()
    with pytest.raises(UsageError, match="holds a dataset"):
        _write(tmp_path / "d", 10)
    assert (tmp_path / "d/index.json").read_bytes() == before


def test_replacing_a_dataset_removes_its_shards_and_nothing_else(tmp_path: Path) -> None:
    _write(tmp_path, 200)
    (tmp_path / "mine.txt").write_text("keep")
    (tmp_path / "shards/mine.mds").write_text("keep")
    old = {info.stored.basename for info in ShardReader(tmp_path).index.shards}
    _write(tmp_path, 100, exist_ok=True)
    reader = ShardReader(tmp_path)
    new = {info.stored.basename for info in reader.index.shards}
    assert list(reader) == _rows(100)
    assert old - new
    assert set(_files(tmp_path)) == {"index.json", "mine.txt", "shards/mine.mds", *new}


def test_a_replacement_that_fails_leaves_the_old_dataset_whole(tmp_path: Path) -> None:
    _write(tmp_path, 200)
    files = _files(tmp_path)
    with pytest.raises(ZeroDivisionError):
        _fail_after(150, ShardWriter(columns=COLUMNS, out=str(tmp_path), size_limit=1000, exist_ok=True))
    assert _files(tmp_path) == files
    assert list(ShardReader(tmp_path)) == _rows(200)


def test_an_upload_that_fails_is_tried_again_and_then_ends_the_writer(
    memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    real = type(memory).pipe_file

    def flaky(self: Any, path: str, value: bytes, **options: Any) -> None:
        calls.append(path)
        if calls.count(path) <= fails:
            raise OSError("reset by peer")
        real(self, path, value, **options)

    monkeypatch.setattr("shards.place.time.sleep", lambda seconds: None)
    monkeypatch.setattr(type(memory), "pipe_file", flaky)
    fails = 2
    _write("memory://a/d", 20, retry=2)
    assert list(ShardReader("memory://a/d")) == _rows(20)
    fails = 3
    with pytest.raises(DatasyncError, match=r"memory://b/d/shards/00000-.* cannot be written: reset by peer"):
        _write("memory://b/d", 20, retry=2)
    assert not memory.exists("memory://b/d/index.json")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DatasyncError, match=r"file/d.* cannot be written"):
        _write(tmp_path / "file/d")


def test_no_rows_make_an_empty_dataset(tmp_path: Path) -> None:
    _write(tmp_path / "d", 0)
    assert len(ShardReader(tmp_path / "d")) == 0
    assert json.loads((tmp_path / "d/index.json").read_text()) == {"version": 2, "shards": []}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"out": ""}, "out is empty"),
        ({"out": ("a", "b", "c")}, "out is"),
        ({"max_workers": 0}, "max_workers is 0"),
        ({"out": "nope://x/y"}, "nope"),
        ({"compression": "zip"}, "'zip'"),
        ({"columns": {"a": "image"}}, "'image'"),
        ({"out": __file__}, "is no folder"),
    ],
)
def test_a_wrong_argument_is_found_at_once(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ShardWriter(**{"columns": COLUMNS, "out": str(tmp_path / "d"), **options})
    assert _files(tmp_path) == []


def test_memory_is_bounded_while_storing_is_slow(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = threading.Semaphore(0)
    taken = []
    monkeypatch.setattr(Remote, "write", lambda self, name, data: stored.acquire())
    writer = ShardWriter(columns={"b": "bytes"}, out="memory://slow/d", size_limit=1000, max_workers=2)

    def produce() -> None:
        for i in range(50):
            writer.write({"b": bytes(900)})
            taken.append(i)

    thread = threading.Thread(target=produce)
    thread.start()
    thread.join(0.5)
    assert thread.is_alive()
    assert len(taken) <= 6
    for _ in range(60):
        stored.release()
    thread.join(10)
    assert not thread.is_alive()
    assert len(writer.finish().shards) == 50


def test_numpy_rows(tmp_path: Path) -> None:
    with ShardWriter(columns={"x": "ndarray:float32:2,2", "n": "int64"}, out=str(tmp_path / "d")) as writer:
        for i in range(5):
            writer.write({"x": np.full((2, 2), i, "float32"), "n": np.int32(i)})
    batch = ShardReader(tmp_path / "d").batch([4, 0])
    assert batch["x"].shape == (2, 2, 2)  # type: ignore[union-attr]
    assert batch["n"].tolist() == [4, 0]  # type: ignore[union-attr]
