"""What users bring along: transforms that print or exit, scripts for modules, wrong tokenizers, columns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.shards.corpus import image_bytes, jsonl, rows, run

CODE = """
import sys
print("hello from the module")

def prints(row):
    print("hello from a row")
    return row

def leaves(row):
    sys.exit(0)

def sometimes(row):
    if row["id"] == 3:
        sys.exit(0)
    return row
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(CODE)
    (tmp_path / "script.py").write_text("import sys\nsys.exit(0)\n")
    jsonl(tmp_path / "a.jsonl", 400)
    return tmp_path


@pytest.mark.parametrize("workers", ["1", "2"])
def test_what_a_transform_prints_is_not_in_the_result(folder: Path, workers: str) -> None:
    options = ("--transform", "mine:prints", "--workers", workers, "--size-limit", "4kb")
    done = run("shard", "a.jsonl", "out", "--json", *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"] == 400
    assert "hello from a row" in done.stderr


def test_a_transform_that_exits_makes_its_row_bad_and_not_the_run_good(folder: Path) -> None:
    done = run("shard", "a.jsonl", "out", "--transform", "mine:leaves", cwd=folder)
    assert done.returncode == 1
    assert "the transform raised SystemExit" in done.stderr
    done = run("shard", "a.jsonl", "out", "--transform", "mine:sometimes", "--on-error", "skip", cwd=folder)
    assert done.returncode == 3
    assert len(rows(folder / "out")) == 399


def test_a_module_that_is_a_script_is_an_error(folder: Path) -> None:
    done = run("shard", "a.jsonl", "out", "--transform", "script:change", cwd=folder)
    assert done.returncode == 2
    assert "importing script raised SystemExit" in done.stderr


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--packing", "best-fit"], "--packing needs --seq-len"),
        (["--tokenizer", "bytes", "--packing", "best-fit"], "--packing needs --seq-len"),
        (["--text", "words"], "--text needs --tokenizer"),
        (["--tokenizer", "a.jsonl"], "a.jsonl cannot be read: line 1 is not a token in base64 and its rank"),
    ],
)
def test_options_that_would_do_nothing_are_refused(folder: Path, options: list[str], why: str) -> None:
    done = run("shard", "a.jsonl", "out", *options, cwd=folder)
    assert done.returncode == 2
    assert why in done.stderr
    assert not (folder / "out").exists()


def test_text_in_a_column_of_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"word": "one"}\n{"word": "two"}\n')
    (tmp_path / "t.csv").write_text("word\none\ntwo\n")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "p.png").write_bytes(image_bytes(1))
    for source, column in (("t.jsonl", "word"), ("t.csv", "word"), ("pictures", "file_name")):
        done = run("shard", source, "out", "--columns", f"{column}:jpeg", cwd=tmp_path)
        assert done.returncode == 1, source
        assert "no image but text" in done.stderr
        assert not (tmp_path / "out" / "index.json").exists()


def test_bytes_in_a_column_of_images_are_checked(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"file": pa.array([image_bytes(1), b"nothing"], pa.binary())})
    pq.write_table(table, tmp_path / "t.parquet")
    done = run(
        "shard", "t.parquet", "out", "--columns", "file:png", "--on-error", "skip", "--json", cwd=tmp_path
    )
    assert done.returncode == 3
    assert json.loads(done.stdout)["rows"] == 1
