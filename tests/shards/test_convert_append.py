"""Appending: what is in the dataset already is not added again, and what has changed is not taken for new."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shards.convert import convert, merge
from shards.errors import UsageError
from shards.journal import Journal, jobs
from shards.sink import LocalSink
from tests.shards.corpus import image_bytes, jsonl, rows


def test_appending_a_folder_again_adds_only_its_new_files(tmp_path: Path) -> None:
    first = jsonl(tmp_path / "in" / "a.jsonl", 30)
    convert(tmp_path / "in", tmp_path / "out")
    again = convert(tmp_path / "in", tmp_path / "out", append=True)
    assert (again.finished, again.rows) == (True, 30)
    second = jsonl(tmp_path / "in" / "b.jsonl", 20)
    added = convert(tmp_path / "in", tmp_path / "out", append=True)
    assert added.notes == ("1 file that the dataset has already left out",)
    assert rows(tmp_path / "out") == first + second
    third = jsonl(tmp_path / "in" / "c.jsonl", 10)
    assert convert(tmp_path / "in" / "c.jsonl", tmp_path / "out", append=True, task=(0, 1)).rows == 10
    merge(tmp_path / "out")
    assert rows(tmp_path / "out") == first + second + third
    assert convert(tmp_path / "in", tmp_path / "out", append=True).finished


def test_appending_a_file_that_has_changed_is_refused_by_name(tmp_path: Path) -> None:
    jsonl(tmp_path / "in" / "a.jsonl", 30)
    convert(tmp_path / "in", tmp_path / "out")
    jsonl(tmp_path / "in" / "a.jsonl", 31)
    with pytest.raises(UsageError, match=r"a\.jsonl was added before and has changed since"):
        convert(tmp_path / "in", tmp_path / "out", append=True)
    convert(tmp_path / "in", tmp_path / "out", overwrite=True)
    assert len(rows(tmp_path / "out")) == 31
    assert convert(tmp_path / "in", tmp_path / "out", append=True).finished


def test_appending_a_part_of_what_a_metadata_file_names_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.png").write_bytes(image_bytes(number))
        with open(folder / "metadata.jsonl", "a") as file:
            file.write(json.dumps({"file_name": f"{number}.png", "n": number}) + "\n")
        if number == 1:
            convert(folder, tmp_path / "out")
    with pytest.raises(UsageError, match="2 of the 4 files"):
        convert(folder, tmp_path / "out", append=True)


def test_a_file_that_a_newer_dataset_was_made_without_is_new_to_it(tmp_path: Path) -> None:
    """The first shards of both are the same, since the first file is."""
    first = jsonl(tmp_path / "in" / "a.jsonl", 300)
    (tmp_path / "in" / "b.jsonl").write_text('{"id": 7, "text": "b", "score": 0.5}\n')
    convert(tmp_path / "in", tmp_path / "out", size_limit=4096)
    (tmp_path / "in" / "b.jsonl").rename(tmp_path / "b.jsonl")
    convert(tmp_path / "in", tmp_path / "out", size_limit=4096)
    assert len(rows(tmp_path / "out")) == 300
    (tmp_path / "b.jsonl").rename(tmp_path / "in" / "b.jsonl")
    added = convert(tmp_path / "in", tmp_path / "out", size_limit=4096, append=True)
    assert (added.finished, added.rows) == (False, 1)
    assert rows(tmp_path / "out") == [*first, {"id": 7, "text": "b", "score": 0.5}]
    assert convert(tmp_path / "in", tmp_path / "out", size_limit=4096, append=True).finished


@pytest.mark.parametrize("which", [0, 1])
def test_a_job_that_was_killed_behind_its_index_is_known_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    """The instant between publishing and saying so, of the first job or of one that appends."""
    made = []
    for number, name in enumerate("abc"):
        made += jsonl(tmp_path / "in" / f"{name}.jsonl", 20 + number)
        with monkeypatch.context() as patched:
            if number == which:
                patched.setattr(Journal, "finish", lambda *_: (_ for _ in ()).throw(SystemExit))
                with pytest.raises(SystemExit):
                    convert(tmp_path / "in", tmp_path / "out", append=number > 0)
            else:
                convert(tmp_path / "in", tmp_path / "out", append=number > 0)
        assert rows(tmp_path / "out") == made
    sink = LocalSink(tmp_path / "out")
    assert all(Journal(sink, name).done() for name in jobs(sink))


def test_a_split_that_has_no_rows_yet_is_appended_to(tmp_path: Path) -> None:
    shares = {"train": 0.999999, "val": 0.000001}
    jsonl(tmp_path / "a.jsonl", 3)
    jsonl(tmp_path / "b.jsonl", 2)
    convert(tmp_path / "a.jsonl", tmp_path / "out", split=shares)
    convert(tmp_path / "b.jsonl", tmp_path / "out", split=shares, append=True)
    assert [len(rows(tmp_path / "out" / split)) for split in shares] == [5, 0]


def test_what_an_overwritten_dataset_had_is_new_to_the_next(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", 10)
    second = jsonl(tmp_path / "b.jsonl", 5)
    convert(tmp_path / "a.jsonl", tmp_path / "out")
    convert(tmp_path / "b.jsonl", tmp_path / "out", overwrite=True)
    convert(tmp_path / "a.jsonl", tmp_path / "out", append=True)
    assert len(rows(tmp_path / "out")) == 15
    assert rows(tmp_path / "out")[:5] == second


def test_a_part_of_what_a_dataset_is_made_of_does_not_replace_it_unasked(tmp_path: Path) -> None:
    days = {"mon": 10, "tue": 20, "wed": 30}
    parts = [jsonl(tmp_path / f"{day}.jsonl", count) for day, count in days.items()]
    out = tmp_path / "out"
    convert(tmp_path / "mon.jsonl", out)
    for day in ("tue", "wed"):
        convert(tmp_path / f"{day}.jsonl", out, append=True)
    assert convert(tmp_path / "tue.jsonl", out, append=True).finished
    for day in days:
        with pytest.raises(UsageError, match="made from something else"):
            convert(tmp_path / f"{day}.jsonl", out)
    assert rows(out) == [row for part in parts for row in part]
    convert(tmp_path / "tue.jsonl", out, overwrite=True)
    assert rows(out) == parts[1]
    assert convert(tmp_path / "tue.jsonl", out, compression="zstd:9").rows == 20


def test_a_corpus_that_was_appended_to_may_be_sharded_anew(tmp_path: Path) -> None:
    first = jsonl(tmp_path / "in" / "a.jsonl", 10)
    convert(tmp_path / "in", tmp_path / "out")
    second = jsonl(tmp_path / "in" / "b.jsonl", 20)
    convert(tmp_path / "in", tmp_path / "out", append=True)
    convert(tmp_path / "in", tmp_path / "out", compression="zstd:9")
    assert rows(tmp_path / "out") == first + second
