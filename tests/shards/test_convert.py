"""The job: what goes in comes out, the same bytes whoever does it, and nothing is done twice."""

from __future__ import annotations

import bz2
import csv
import errno
import fcntl
import gzip
import importlib
import json
import lzma
import os
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from shards import engines
from shards.convert import convert, merge
from shards.errors import ConflictError, DatasyncError, FormatError, StoreError, UsageError
from shards.index import Index
from shards.manifest import Manifest
from shards.sink import LocalSink
from shards.task import BadRowError
from tests.shards.corpus import image_bytes, jsonl, raw_rows, rows, tree

job = importlib.import_module("shards.convert")  # `shards.convert` itself is the function

SMALL = 4096  # bytes of a shard: many tasks from a small corpus


def test_json_lines_come_back_as_they_were(tmp_path: Path) -> None:
    made = jsonl(tmp_path / "a.jsonl", 300)
    result = convert(tmp_path / "a.jsonl", tmp_path / "out", size_limit=SMALL)
    assert rows(tmp_path / "out") == made
    assert (result.rows, result.skipped, result.published[0].samples) == (300, 0, 300)
    assert result.columns == {"id": "int", "score": "float64", "text": "str"}
    assert result.published[0].shards > 5


@pytest.mark.parametrize(
    ("name", "compress"),
    [
        ("gz", gzip.compress),
        ("bz2", bz2.compress),
        ("xz", lzma.compress),
        ("zst", zstandard.ZstdCompressor().compress),
    ],
)
def test_compressed_json_lines_are_found_by_their_bytes(tmp_path: Path, name: str, compress) -> None:
    made = jsonl(tmp_path / "plain.jsonl", 50)
    data = compress((tmp_path / "plain.jsonl").read_bytes())
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / f"a.jsonl.{name}").write_bytes(data)
    (tmp_path / "in" / "b.jsonl").write_bytes(data)  # compressed, whatever its name says
    convert(tmp_path / "in", tmp_path / "out")
    assert rows(tmp_path / "out") == made * 2


def test_parquet_comes_back_as_pyarrow_reads_it(tmp_path: Path) -> None:
    table = pa.table(
        {
            "id": pa.array(range(1000), pa.int32()),
            "text": [f"row {number}" for number in range(1000)],
            "maybe": [None if number % 3 else number for number in range(1000)],
            "tokens": pa.array(
                [list(range(number % 7 + 1)) for number in range(1000)], pa.list_(pa.uint16())
            ),
            "vector": pa.array([[number, number + 1.5] for number in range(1000)], pa.list_(pa.float32(), 2)),
            "nested": [{"a": [number], "b": {"c": str(number)}} for number in range(1000)],
            "word": pa.array(["x", "y"] * 500).dictionary_encode(),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=64)
    result = convert(tmp_path / "a.parquet", tmp_path / "out", size_limit=SMALL, workers=1)
    assert result.columns == {
        "id": "int32",
        "maybe": "json",
        "nested": "json",
        "text": "str",
        "tokens": "ndarray:uint16",
        "vector": "ndarray:float32:2",
        "word": "str",
    }
    assert result.tasks > 3
    for got, expected in zip(rows(tmp_path / "out"), table.to_pylist(), strict=True):
        got = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in got.items()}
        assert got == expected


def test_images_are_stored_as_their_original_bytes_with_captions_beside(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / "in" / "deep").mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / "deep" / f"{number}.png").write_bytes(image_bytes(number))
        (tmp_path / "in" / "deep" / f"{number}.txt").write_text(f"number {number}\n")
    result = convert(tmp_path / "in", tmp_path / "out")
    assert result.columns == {"caption": "str", "file_name": "str", "image": "png"}
    for number, row in enumerate(raw_rows(tmp_path / "out")):
        assert row == {
            "caption": f"number {number}".encode(),
            "file_name": f"deep/{number}.png".encode(),
            "image": image_bytes(number),
        }


def test_a_metadata_file_decides_rows_columns_and_order(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.jpg").write_bytes(image_bytes(number, format="JPEG"))
    order = [2, 0, 1, 2]
    lines = [json.dumps({"file_name": f"{n}.jpg", "text": f"t{n}", "tags": ["a", n]}) for n in order]
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    result = convert(folder, tmp_path / "out")
    assert result.columns == {"file_name": "str", "image": "jpeg", "tags": "json", "text": "str"}
    found = rows(tmp_path / "out")
    assert [(row["text"], row["tags"]) for row in found] == [(f"t{n}", ["a", n]) for n in order]
    assert [row["image"] for row in raw_rows(tmp_path / "out")] == [
        image_bytes(n, format="JPEG") for n in order
    ]
    assert result.notes == ("1 file that the metadata does not name left out",)


def test_metadata_may_be_csv(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.png").write_bytes(image_bytes(number))
    with open(folder / "metadata.csv", "w", newline="") as file:
        csv.writer(file).writerows(
            [["file_name", "text"], *([f"{n}.png", f'says "{n}",\nand more'] for n in range(3))]
        )
    convert(folder, tmp_path / "out")
    assert [row["text"] for row in rows(tmp_path / "out")] == [f'says "{n}",\nand more' for n in range(3)]


def test_the_folder_is_the_label_where_nothing_else_is_said(tmp_path: Path) -> None:
    for label in ("cat", "dog"):
        (tmp_path / "in" / label).mkdir(parents=True)
        (tmp_path / "in" / label / "1.png").write_bytes(image_bytes(ord(label[0])))
    convert(tmp_path / "in", tmp_path / "out")
    assert [row["label"] for row in rows(tmp_path / "out")] == ["cat", "dog"]


def test_the_bytes_do_not_depend_on_workers_or_on_where_tasks_run(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", 2000)
    convert(tmp_path / "a.jsonl", tmp_path / "here", size_limit=SMALL, workers=1)
    convert(tmp_path / "a.jsonl", tmp_path / "three", size_limit=SMALL, workers=3)
    assert tree(tmp_path / "here") == tree(tmp_path / "three")
    assert len(tree(tmp_path / "here")) > 20


def test_a_second_run_finds_nothing_to_do(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", 100)
    first = convert(tmp_path / "a.jsonl", tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    second = convert(tmp_path / "a.jsonl", tmp_path / "out")
    assert (first.finished, second.finished) == (False, True)
    assert (second.rows, second.published) == (first.rows, first.published)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before


def test_a_changed_source_is_a_new_version_and_readers_of_the_old_one_keep_theirs(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", 100)
    convert(tmp_path / "a.jsonl", tmp_path / "out")
    old = tree(tmp_path / "out")
    made = jsonl(tmp_path / "a.jsonl", 130)
    convert(tmp_path / "a.jsonl", tmp_path / "out")
    assert rows(tmp_path / "out") == made
    assert {name for name in old if name.startswith("shards/")} <= set(tree(tmp_path / "out"))


def test_another_source_does_not_replace_a_dataset_unasked(tmp_path: Path) -> None:
    first = jsonl(tmp_path / "a.jsonl", 10)
    second = jsonl(tmp_path / "b.jsonl", 20)
    convert(tmp_path / "a.jsonl", tmp_path / "out")
    with pytest.raises(UsageError, match="made from something else"):
        convert(tmp_path / "b.jsonl", tmp_path / "out")
    assert rows(tmp_path / "out") == first
    convert(tmp_path / "b.jsonl", tmp_path / "out", overwrite=True)
    assert rows(tmp_path / "out") == second


def test_finished_tasks_are_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jsonl(tmp_path / "a.jsonl", 400)
    convert(tmp_path / "a.jsonl", tmp_path / "calm", size_limit=SMALL)
    ran: list[int] = []
    real = engines.run_task

    def breaking(job_, number, task, report):
        if number == 5 and 5 not in ran:
            ran.append(number)
            raise RuntimeError("the machine goes down")
        ran.append(number)
        return real(job_, number, task, report)

    monkeypatch.setattr(engines, "run_task", breaking)
    with pytest.raises(RuntimeError):
        convert(tmp_path / "a.jsonl", tmp_path / "out", size_limit=SMALL, workers=1)
    assert not (tmp_path / "out" / "index.json").exists()
    result = convert(tmp_path / "a.jsonl", tmp_path / "out", size_limit=SMALL, workers=1)
    assert sorted(ran) == sorted([*range(result.tasks), 5])
    assert result.ran == result.tasks - 5
    assert tree(tmp_path / "out") == tree(tmp_path / "calm")


def test_a_shard_that_went_missing_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jsonl(tmp_path / "a.jsonl", 400)
    convert(tmp_path / "a.jsonl", tmp_path / "calm", size_limit=SMALL)
    convert(tmp_path / "a.jsonl", tmp_path / "out", size_limit=SMALL, task=(0, 2))
    next(iter((tmp_path / "out" / "shards").iterdir())).unlink()
    convert(tmp_path / "a.jsonl", tmp_path / "out", size_limit=SMALL)
    assert tree(tmp_path / "out") == tree(tmp_path / "calm")


def test_shares_of_a_job_and_a_merge_give_the_same_dataset(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", 400)
    convert(tmp_path / "a.jsonl", tmp_path / "calm", size_limit=SMALL)
    for share in (2, 0):
        result = convert(tmp_path / "a.jsonl", tmp_path / "out", size_limit=SMALL, task=(share, 3))
        assert result.published == ()
    with pytest.raises(FormatError, match="tasks are not finished, the first is 1"):
        merge(tmp_path / "out")
    convert(tmp_path / "a.jsonl", tmp_path / "out", size_limit=SMALL, task=(1, 3))
    assert not (tmp_path / "out" / "index.json").exists()
    assert merge(tmp_path / "out").rows == 400
    assert tree(tmp_path / "out") == tree(tmp_path / "calm")
    with pytest.raises(UsageError, match="no job that waits"):
        merge(tmp_path / "out")


def test_the_index_names_version_schema_and_manifest(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", 100)
    result = convert(tmp_path / "a.jsonl", tmp_path / "out", size_limit=SMALL)
    index = Index.parse((tmp_path / "out" / "index.json").read_bytes(), where="index")
    manifest = Manifest.from_parquet((tmp_path / "out" / index.extra["manifest"]).read_bytes())
    assert index.extra["version"] == manifest.version == result.published[0].version
    assert index.extra["schema"] == result.columns
    assert index.extra["fingerprint"] == index.fingerprint
    assert {entry.key: (entry.bytes, entry.samples) for entry in manifest.entries} == {
        shard.stored.basename: (shard.stored.bytes, shard.samples) for shard in index.shards
    }


def test_appending_adds_a_version_that_shares_the_shards(tmp_path: Path) -> None:
    first = jsonl(tmp_path / "a.jsonl", 100)
    second = jsonl(tmp_path / "b.jsonl", 60)
    convert(tmp_path / "a.jsonl", tmp_path / "out", size_limit=SMALL)
    old = tree(tmp_path / "out")
    result = convert(tmp_path / "b.jsonl", tmp_path / "out", size_limit=SMALL, append=True)
    assert result.published[0].samples == 160
    assert rows(tmp_path / "out") == first + second
    assert {
        name: digest
        for name, digest in tree(tmp_path / "out").items()
        if name in old and name != "index.json"
    } == {name: digest for name, digest in old.items() if name != "index.json"}
    assert convert(tmp_path / "b.jsonl", tmp_path / "out", size_limit=SMALL, append=True).finished
    assert len(rows(tmp_path / "out")) == 160


def test_appending_other_columns_is_refused(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", 10)
    (tmp_path / "b.jsonl").write_text('{"id": "text now"}\n')
    convert(tmp_path / "a.jsonl", tmp_path / "out")
    with pytest.raises(UsageError, match="id:str"):
        convert(tmp_path / "b.jsonl", tmp_path / "out", append=True)
    with pytest.raises(UsageError, match="no dataset"):
        convert(tmp_path / "b.jsonl", tmp_path / "elsewhere", append=True)


def test_splits_are_stable_as_the_corpus_grows(tmp_path: Path) -> None:
    options = {"split": {"train": 0.8, "val": 0.2}, "key": "id", "size_limit": SMALL}
    made = jsonl(tmp_path / "a.jsonl", 500)
    result = convert(tmp_path / "a.jsonl", tmp_path / "small", **options)
    larger = jsonl(tmp_path / "a.jsonl", 700)
    convert(tmp_path / "a.jsonl", tmp_path / "large", **options)
    small = {name: {row["id"] for row in rows(tmp_path / "small" / name)} for name in ("train", "val")}
    large = {name: {row["id"] for row in rows(tmp_path / "large" / name)} for name in ("train", "val")}
    assert small["train"] | small["val"] == {row["id"] for row in made}
    assert large["train"] | large["val"] == {row["id"] for row in larger}
    assert not small["train"] & small["val"]
    assert small["train"] <= large["train"]
    assert small["val"] <= large["val"]
    assert 60 < len(small["val"]) < 140
    assert [part.prefix for part in result.published] == ["train/", "val/"]


def test_a_split_looks_at_the_whole_of_an_array(tmp_path: Path) -> None:
    values = [[0] * 700 + [number] + [0] * 700 for number in range(64)]  # all alike where NumPy shortens them
    pq.write_table(pa.table({"a": values}), tmp_path / "a.parquet")
    convert(tmp_path / "a.parquet", tmp_path / "out", split={"train": 0.5, "val": 0.5})
    assert all(10 < len(rows(tmp_path / "out" / split)) < 54 for split in ("train", "val"))


def test_columns_are_selected_dropped_renamed_and_given(tmp_path: Path) -> None:
    made = jsonl(tmp_path / "a.jsonl", 20)
    convert(tmp_path / "a.jsonl", tmp_path / "a", select=("text", "id"), rename={"text": "caption"})
    assert rows(tmp_path / "a") == [{"caption": row["text"], "id": row["id"]} for row in made]
    convert(tmp_path / "a.jsonl", tmp_path / "b", drop=("text",))
    assert rows(tmp_path / "b") == [{"id": row["id"], "score": row["score"]} for row in made]
    result = convert(tmp_path / "a.jsonl", tmp_path / "c", columns={"id": "uint16", "text": "bytes"})
    assert result.columns == {"id": "uint16", "text": "bytes"}
    assert rows(tmp_path / "c")[3]["text"] == made[3]["text"].encode()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": {"txt": "str"}}, "no column 'txt'"),
        ({"columns": {"text": "strr"}}, "no encoding 'strr'"),
        ({"drop": ("id", "text", "score")}, "no column is left"),
        ({"rename": {"id": "text"}}, "two columns are called 'text'"),
        ({"format": "parqet"}, "no format 'parqet'"),
        ({"compression": "zstd:99"}, "level"),
        ({"split": {"a": 0.5}}, "add up to 1"),
        ({"on_error": "ignore"}, "--on-error"),
        ({"task": (3, 3)}, "--task"),
        ({"key": "nokey", "split": {"a": 0.5, "b": 0.5}}, "nokey"),
        ({"key": "id"}, "--key needs --split"),
        ({"eos": 3}, "--eos needs --tokenizer"),
        ({"delimiter": ";"}, "--delimiter is not for jsonl"),
        ({"encoding": "latin-1"}, "--encoding is not for jsonl"),
        ({"lines": True}, "--lines is not for jsonl"),
        ({"caption": "x"}, "--caption is not for jsonl"),
        ({"resample": 8000}, "--resample: no column is audio"),
        ({"max_image_size": 9}, "--max-image-size: no column is image"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_written(tmp_path: Path, options, message: str) -> None:
    jsonl(tmp_path / "a.jsonl", 5)
    with pytest.raises(UsageError, match=message) as caught:
        convert(tmp_path / "a.jsonl", tmp_path / "out", **options)
    assert caught.value.mend
    assert not (tmp_path / "out").exists()


def test_a_bad_row_fails_the_job_by_default_and_names_its_place(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": 2}\n{"a": \n{"a": 3}\n')
    with pytest.raises(BadRowError, match=r"a\.jsonl:3: not JSON"):
        convert(tmp_path / "a.jsonl", tmp_path / "out")
    assert not (tmp_path / "out" / "index.json").exists()


def test_skipped_rows_are_in_the_quarantine_with_reason_and_place(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": \n[1]\n{"a": 3}\n')
    result = convert(tmp_path / "a.jsonl", tmp_path / "out", on_error="skip")
    assert [row["a"] for row in rows(tmp_path / "out")] == [1, 3]
    assert result.skipped == 2
    bad = rows(result.quarantine)
    assert [(row["where"], row["data"]) for row in bad] == [("a.jsonl:2", b'{"a": '), ("a.jsonl:3", b"[1]")]
    assert bad[1]["reason"] == "a JSON object is expected, not a list"
    assert result.examples[1] == ("a.jsonl:3", "a JSON object is expected, not a list")


def test_changing_one_s_mind_about_bad_rows_keeps_finished_tasks(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", 300)
    with open(tmp_path / "a.jsonl", "a") as file:
        file.write("broken\n")
    with pytest.raises(BadRowError):
        convert(tmp_path / "a.jsonl", tmp_path / "out", size_limit=SMALL, workers=1)
    result = convert(tmp_path / "a.jsonl", tmp_path / "out", size_limit=SMALL, workers=1, on_error="skip")
    assert (result.rows, result.skipped, result.ran) == (300, 1, 1)


def test_a_corpus_without_rows_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(FormatError, match="no rows"):
        convert(tmp_path / "a.jsonl", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_destination_may_not_lie_in_the_source(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", 5)
    with pytest.raises(UsageError, match="inside the source"):
        convert(tmp_path, tmp_path / "out")


def test_a_file_that_changes_during_the_job_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jsonl(tmp_path / "a.jsonl", 50)
    real = job._Run.tasks

    def later(self) -> None:
        with open(tmp_path / "a.jsonl", "a") as file:
            file.write('{"id": 51, "text": "new", "score": 1.5}\n')
        os.utime(tmp_path / "a.jsonl", ns=(time.time_ns(), time.time_ns() + 10**9))
        real(self)

    monkeypatch.setattr(job._Run, "tasks", later)
    with pytest.raises(DatasyncError, match=r"a\.jsonl changed while it was being read"):
        convert(tmp_path / "a.jsonl", tmp_path / "out")
    monkeypatch.undo()
    assert convert(tmp_path / "a.jsonl", tmp_path / "out").rows == 51


def test_two_writers_do_not_overwrite_each_other_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jsonl(tmp_path / "a.jsonl", 5)
    jsonl(tmp_path / "b.jsonl", 9)
    real = job._Run.tasks

    def beaten(self) -> None:
        monkeypatch.undo()
        convert(tmp_path / "b.jsonl", tmp_path / "out")
        real(self)

    monkeypatch.setattr(job._Run, "tasks", beaten)
    with pytest.raises(ConflictError, match="published by someone else"):
        convert(tmp_path / "a.jsonl", tmp_path / "out")
    assert len(rows(tmp_path / "out")) == 9


@pytest.mark.parametrize("same_version_there", [False, True])
def test_a_run_that_was_overtaken_by_the_same_job_publishes_nothing_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_version_there: bool
) -> None:
    made = jsonl(tmp_path / "a.jsonl", 400)
    if same_version_there:
        convert(tmp_path / "a.jsonl", tmp_path / "out", size_limit=SMALL)
        os.utime(tmp_path / "a.jsonl", (1, 1))  # another job, with the same bytes
    real = job._Run.commit

    def late(self) -> Any:
        monkeypatch.undo()
        convert(tmp_path / "a.jsonl", tmp_path / "out", size_limit=SMALL)
        # What this run recorded after the other one had published and forgotten its records.
        self._journal.record(0, {"rows": 0, "skipped": 0, "examples": [], "shards": {}, "quarantine": []})
        return real(self)

    monkeypatch.setattr(job._Run, "commit", late)
    result = convert(tmp_path / "a.jsonl", tmp_path / "out", size_limit=SMALL)
    assert (result.finished, result.rows) == (True, 400)
    assert rows(tmp_path / "out") == made


def test_a_run_whose_journal_was_swept_by_another_job_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = jsonl(tmp_path / "a.jsonl", 40)
    real = job._Run.commit

    def late(self) -> Any:
        monkeypatch.undo()
        convert(tmp_path / "a.jsonl", tmp_path / "out", compression="zstd:9")
        return real(self)

    monkeypatch.setattr(job._Run, "commit", late)
    with pytest.raises(ConflictError, match="published by another run"):
        convert(tmp_path / "a.jsonl", tmp_path / "out")
    assert rows(tmp_path / "out") == made


def test_a_transform_maps_filters_and_splits_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = jsonl(tmp_path / "a.jsonl", 10)
    (tmp_path / "mytransform.py").write_text(
        "def change(row):\n"
        "    if row['id'] % 2: return None\n"
        "    return [{'n': row['id'], 'part': part} for part in ('x', 'y')]\n"
    )
    monkeypatch.chdir(tmp_path)
    convert(tmp_path / "a.jsonl", tmp_path / "out", transform="mytransform:change")
    assert rows(tmp_path / "out") == [
        {"n": row["id"], "part": part} for row in made if row["id"] % 2 == 0 for part in ("x", "y")
    ]


def test_what_a_transform_may_not_give_is_a_bad_row_that_says_so(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", 6)
    odd = [5, {1: 2}, {"id": object()}, [{"id": 0}, "x"], {"id": {"b", "a", "c"}}, None]

    def change(row: dict[str, Any]) -> Any:
        return odd[row["id"]]

    result = convert(tmp_path / "a.jsonl", tmp_path / "out", transform=change, on_error="skip", workers=1)
    assert [row["id"] for row in rows(tmp_path / "out")] == [0, ["a", "b", "c"]]
    reasons = [row["reason"] for row in rows(result.quarantine)]
    for reason, said in zip(reasons, ("int", "is no text", "no place in JSON", "gave str"), strict=True):
        assert said in reason


def test_a_folder_that_may_not_be_looked_at_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = LocalSink(tmp_path)
    sink.write("a/b", b"1")

    def refuse(path: Any, *_: Any, **__: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", refuse)
        with pytest.raises(StoreError, match=r"cannot be listed: Permission denied"):
            list(sink.list())
        patched.setattr(os, "stat", refuse)
        with pytest.raises(StoreError, match=r"a/b cannot be looked at: Permission denied"):
            sink.stat("a/b")
    assert [info.key for info in sink.list()] == ["a/b"]


def test_a_local_sink_keeps_conditions(tmp_path: Path) -> None:
    sink = LocalSink(tmp_path / "sink")
    first = sink.write("a/b", b"1", if_absent=True)
    with pytest.raises(ConflictError):
        sink.write("a/b", b"2", if_absent=True)
    second = sink.write("a/b", b"22", if_match=first.etag)
    with pytest.raises(ConflictError):
        sink.write("a/b", b"3", if_match=first.etag)
    assert sink.read("a/b", start=1) == b"2"
    assert [info.key for info in sink.list("a/")] == ["a/b"]
    assert second.etag != first.etag
    sink.delete(["a/b", "not/there"])
    assert list(sink.list()) == []


def test_what_a_dead_writer_left_is_swept_and_what_a_live_one_writes_is_not(tmp_path: Path) -> None:
    temporary = tmp_path / ".datasync-tmp"
    temporary.mkdir()
    (temporary / "dead").write_bytes(b"half a sh")
    with open(temporary / "live", "xb") as live:
        fcntl.flock(live, fcntl.LOCK_EX)
        LocalSink(tmp_path).write("a", b"whole")
        assert [path.name for path in temporary.iterdir()] == ["live"]
    LocalSink(tmp_path).write("b", b"whole")
    assert not temporary.exists()
