"""A large plain file is cut into ranges, and what comes of it is what the whole file gives."""

from __future__ import annotations

import csv
import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shards.convert import convert
from shards.sources import Bad, FileList, Row, SourceOptions, list_files, load, ranges
from tests.shards.corpus import rows

HUGE = 1 << 40
DELIMITED = st.text(alphabet='ab",\n\r;é', max_size=80)


def _read(kind: str, path: Path, target: int, **options: Any) -> tuple[int, list[Row | Bad]]:
    """How many tasks a file gives, and what they yield."""
    source = load(kind)(list_files(str(path)), SourceOptions(target_bytes=target, **options))
    tasks = list(source.tasks())
    assert sum(task.bytes for task in tasks) == path.stat().st_size
    return len(tasks), [item for task in tasks for item in source.read(task.payload)]


@pytest.mark.parametrize("block", [3, 16, 1 << 20])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None)
@given(text=DELIMITED, target=st.integers(1, 20), mark=st.booleans())
def test_delimited_text_of_any_shape_gives_the_same_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, text: str, target: int, mark: bool
) -> None:
    monkeypatch.setattr(ranges, "_BLOCK", block)
    path = tmp_path / "a.csv"
    path.write_bytes(b"\xef\xbb\xbf" * mark + f"a,b\n{text}".encode())
    _, whole = _read("csv", path, HUGE, delimiter=",")
    _, cut = _read("csv", path, target, delimiter=",")
    assert cut == whole


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    table=st.lists(st.tuples(*[st.text(st.characters(codec="utf-8"), max_size=9)] * 2), max_size=30),
    target=st.integers(8, 60),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
)
def test_records_that_a_writer_quoted_are_cut_where_they_begin(
    tmp_path: Path, table: list[tuple[str, str]], target: int, quoting: Any
) -> None:
    path = tmp_path / "a.csv"
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, quoting=quoting).writerows([("a", "b"), *table])
    _, found = _read("csv", path, target, delimiter=",")
    assert [tuple(row.values.values()) for row in found] == table


def test_a_large_table_is_many_tasks_and_small_ones_share_one(tmp_path: Path) -> None:
    body = "".join(f'{number},"line one\nline two, of {number}"\r\n' for number in range(500))
    (tmp_path / "a.csv").write_text("id,text\r\n" + body, newline="")
    tasks, found = _read("csv", tmp_path / "a.csv", 2000)
    assert tasks > 5
    assert [row.values["id"] for row in found] == [str(number) for number in range(500)]
    assert [row.at for row in found] == [2 * number + 3 for number in range(500)]
    convert(tmp_path / "a.csv", tmp_path / "one", size_limit=2000, workers=1)
    convert(tmp_path / "a.csv", tmp_path / "two", size_limit=2000, workers=2)
    assert rows(tmp_path / "one") == rows(tmp_path / "two")
    assert len(rows(tmp_path / "one")) == 500


def test_a_quote_in_the_middle_of_a_field_ends_the_cutting_and_loses_nothing(tmp_path: Path) -> None:
    lines = [f"{number},plain" for number in range(200)]
    lines[100] = '100,5" pipe'
    lines[150] = '150,"quoted\nfield"'
    (tmp_path / "a.csv").write_text("id,text\n" + "\n".join(lines) + "\n")
    tasks, found = _read("csv", tmp_path / "a.csv", 300)
    assert 2 <= tasks <= 5
    assert [row.values["id"] for row in found] == [str(number) for number in range(200)]
    assert found[100].values["text"] == '5" pipe'


def test_records_that_are_no_text_are_refused_alone(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"a,b\n1,x\n2,J\xf6rg\n3,z\n")
    _, found = _read("csv", tmp_path / "a.csv", HUGE)
    assert [item.at for item in found] == [2, 3, 4]
    assert isinstance(found[1], Bad)
    assert found[1].reason == "not utf-8: the byte 0xf6 is no text (try --encoding)"
    assert found[1].data == b"2,J\xf6rg"
    _, found = _read("csv", tmp_path / "a.csv", HUGE, encoding="latin-1")
    assert found[1].values["b"] == "Jörg"


def test_tables_in_utf_16_are_known_by_their_mark(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_bytes("a\tb\n1\tÖ\n".encode("utf-16"))
    tasks, found = _read("csv", tmp_path / "a.tsv", 4)
    assert tasks == 1
    assert found[0].values == {"a": "1", "b": "Ö"}


def test_a_header_longer_than_a_buffer_is_one_header(tmp_path: Path) -> None:
    names = [f"column_{number:05d}" for number in range(8000)]
    (tmp_path / "a.csv").write_text(",".join(names) + "\n" + ",".join("1" * 8000) + "\n")
    _, found = _read("csv", tmp_path / "a.csv", HUGE)
    assert list(found[0].values) == names


@pytest.mark.parametrize("kind", ["jsonl", "text"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text("ab é\u2028", max_size=12), max_size=30), target=st.integers(1, 40))
def test_lines_are_cut_where_they_begin(tmp_path: Path, kind: str, texts: list[str], target: int) -> None:
    path = tmp_path / f"a.{kind}"
    head = '{{"a": "{}"}}\n' if kind == "jsonl" else "x{}\r\n"
    path.write_text("".join(head.format(text) for text in texts), newline="", encoding="utf-8")
    _, found = _read(kind, path, target, whole_files=False)
    said = [row.values["a"] if kind == "jsonl" else row.values["text"][1:] for row in found]
    assert said == texts


def test_lines_of_utf_16_are_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("eins\r\nzwei\n\nĊĀ vier".encode("utf-16"))
    _, found = _read("text", tmp_path / "a.txt", 4, whole_files=False)
    assert [row.values["text"] for row in found] == ["eins", "zwei", "ĊĀ vier"]


def _tar(path: Path, members: list[tuple[str, bytes]], format: int = tarfile.PAX_FORMAT) -> None:
    with tarfile.open(path, "w", format=format) as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_a_large_tar_is_cut_between_its_samples(tmp_path: Path, format: int) -> None:
    members = []
    for number in range(40):
        stem = f"{'long/' * 30}{number:03d}é" if number % 7 == 0 else f"{number:03d}"
        members += [(f"{stem}.txt", b"t%d" % number), (f"{stem}.bin", b"x" * (number * 40))]
        members += [(f".hidden{number}", b"h")] * (number % 3 == 0)
    members += [("003.json", b"1"), ("zz.txt", b"last"), ("004.cls", b"1"), ("../up.txt", b"")]
    _tar(tmp_path / "a.tar", members, format)
    tasks, cut = _read("webdataset", tmp_path / "a.tar", 3000)
    one, whole = _read("webdataset", tmp_path / "a.tar", HUGE)
    assert (tasks > 8, one) == (True, 1)
    assert cut == whole
    refused = [item for item in cut if isinstance(item, Bad)]
    assert [item.at for item in refused] == ["003", "../up.txt", "004"]


def test_a_tar_that_is_damaged_gives_the_same_cut_or_whole(tmp_path: Path) -> None:
    _tar(tmp_path / "a.tar", [(f"{number:03d}.bin", bytes([number]) * 600) for number in range(40)])
    good = (tmp_path / "a.tar").read_bytes()
    damaged = [good[:at] + b"\xff\xff" + good[at + 2 :] for at in (512 * 3 * 20 + 150, 512 * 3 * 39 + 150)]
    for data in (*damaged, good[: 512 * 3 * 20 + 700], good[: 512 * 3 * 20 + 100]):
        (tmp_path / "a.tar").write_bytes(data)
        _, cut = _read("webdataset", tmp_path / "a.tar", 4000)
        assert cut == _read("webdataset", tmp_path / "a.tar", HUGE)[1]
        assert isinstance(cut[-1], Bad)


def test_a_large_warc_is_cut_between_its_records(tmp_path: Path) -> None:
    record = "WARC/1.0\r\nWARC-Type: {}\r\nWARC-Record-ID: <urn:{}>\r\nContent-Length: {}\r\n\r\n{}\r\n\r\n"
    body = "WARC/1.0 is no record here\r\n\r\n" * 9
    text = "".join(
        record.format("request" if n % 5 == 0 else "resource", n, len(body), body) for n in range(60)
    )
    (tmp_path / "a.warc").write_text(text, newline="")
    tasks, cut = _read("warc", tmp_path / "a.warc", 2000)
    assert tasks > 8
    assert cut == _read("warc", tmp_path / "a.warc", HUGE)[1]
    assert [row.at for row in cut] == [n + 1 for n in range(60) if n % 5]
    (tmp_path / "a.warc").write_text(text[:9000], newline="")
    assert _read("warc", tmp_path / "a.warc", 2000)[1] == _read("warc", tmp_path / "a.warc", HUGE)[1]


def test_where_there_are_many_files_none_is_cut(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(33):
        (tmp_path / "in" / f"{number}.csv").write_text("a\n" + "12345\n" * 100)
    source = load("csv")(list_files(str(tmp_path / "in")), SourceOptions(target_bytes=200))
    assert len(list(source.tasks())) == 33
    (tmp_path / "in" / "large.csv").write_text("a\n" + "12345\n" * 1000)
    source = load("csv")(list_files(str(tmp_path / "in")), SourceOptions(target_bytes=200))
    assert len(list(source.tasks())) > 33 + 20


@pytest.mark.parametrize("name", ["a.csv", "a.tar", "a.warc", "a.jsonl", "a.txt"])
def test_a_large_file_that_may_not_be_read_is_refused_and_planning_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).write_bytes(bytes(5000))

    def refuse(self: FileList, number: int) -> Any:
        raise PermissionError(13, "denied")

    monkeypatch.setattr(FileList, "open", refuse)
    kind = {"a.tar": "webdataset", "a.txt": "text"}.get(name, name[2:])
    _, found = _read(kind, tmp_path / name, 100, whole_files=False)
    assert {item.reason for item in found} == {"permission denied"}


def test_compressed_files_stay_whole(tmp_path: Path) -> None:
    import gzip

    with gzip.open(tmp_path / "a.csv.gz", "wt") as file:
        file.write("a\n" + "12345\n" * 100)
    assert _read("csv", tmp_path / "a.csv.gz", 20)[0] == 1
