"""Nasty inputs, and what was decided for each: the right rows, or a refusal that says why.

`KEPT` says how many rows a file gives; `REFUSED` how many it gives and which words stand in the reason for
the row, or the rest of the file, that it does not give. Every file is put beside a good one, which must come
through unharmed, and is run twice: once to be skipped, once to fail.
"""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shards.convert import convert
from shards.task import BadRowError
from tests.shards.corpus import image_bytes, raw_rows, rows

FORMATS = {
    "text": "text",
    "jsonl": "jsonl",
    "compressed": "jsonl",
    "images": "images",
    "audio": "audio",
    "video": "video",
    "tars": "webdataset",
}

KEPT: dict[str, int] = {
    # text: UTF-8 and what a byte order mark announces; nothing inside is changed
    "text/empty.txt": 1,
    "text/bom_utf8.txt": 1,
    "text/utf32.txt": 1,
    "text/crlf.txt": 1,
    "text/nel_ls_ps.txt": 1,
    "text/zalgo_rtl_zwj.txt": 1,
    "text/ansi_escape.txt": 1,
    # JSON Lines: odd names are names; types that change make a column json
    "jsonl/mixed_schema.jsonl": 4,
    "jsonl/bom.jsonl": 1,
    "jsonl/crlf.jsonl": 2,
    "jsonl/keys_odd.jsonl": 1,
    # compression is found by its bytes; several members or frames are read to the end
    "compressed/two_members.jsonl.gz": 5001,
    "compressed/not_gzip.jsonl.gz": 5000,
    "compressed/unknown_size.jsonl.zst": 5000,
    "compressed/two_frames.jsonl.zst": 5001,
    "compressed/bitflip.jsonl.zst": 5000,  # no checksum: what comes out is valid, and nobody can know better
    "compressed/empty_frame.zst": 0,
    # images: what the bytes say, whatever the name says; every mode is kept as it is
    "images/png_named.jpg": 1,
    "images/double_ext.jpg.png": 1,
    "images/noextension": 1,
    "images/10000x1.png": 1,
    **{f"images/exif_orientation_{flag}.jpg": 1 for flag in (1, 3, 5, 7)},
    "images/mode_cmyk.jpg": 1,
    "images/mode_progressive.jpg": 1,
    "images/mode_rgba.webp": 1,
    "images/mode_la.png": 1,
    "images/mode_float32.tiff": 1,
    "images/mode_i16.png": 1,
    # audio and video likewise
    "audio/odd_bytes.wav": 1,
    "audio/sr_1hz.wav": 1,
    "audio/24bit.wav": 1,
    "audio/silence.wav": 1,
    "video/mp4_named.webm": 1,
    # tars
    "tars/ok.tar": 20,
    "tars/no_eof_blocks.tar": 20,
    "tars/missing_pair.tar": 20,  # the column of captions becomes json and holds a null
    "tars/empty.tar": 0,
    "tars/gnu_longnames.tar": 1,
    "tars/macos.tar": 1,
    "tars/plain_named.tar.gz": 20,
    # tables
    "tabular/quoted_newlines.csv": 2,
    "tabular/ok.parquet": 1000,
    "tabular/footer_flipped.parquet": 1000,  # the flipped byte is in the name of the writer
    "tabular/all_null_type.parquet": 5,
    "tabular/decimal_ts_dict.parquet": 2,
}

REFUSED: dict[str, tuple[int, str]] = {
    "text/koi8r.txt": (0, "not utf-8"),
    "text/shift_jis.txt": (0, "not utf-8"),
    "text/surrogates_cesu8.txt": (0, "not utf-8"),
    "text/truncated_utf8.txt": (0, "not utf-8"),
    "jsonl/truncated_last.jsonl": (2, "not JSON"),
    "jsonl/dup_keys.jsonl": (0, "stands twice"),
    "jsonl/bigint.jsonl": (0, "too large for a float"),
    "jsonl/lone_surrogate.jsonl": (0, "no valid Unicode"),
    "compressed/truncated.jsonl.gz": (2453, "ended before"),
    "compressed/window_2GB.zst": (0, "not JSON"),
    "compressed/bomb_256MB.gz": (0, "longer than"),
    "images/truncated_half.jpg": (0, "truncated"),
    "images/no_eoi.jpg": (0, "no end marker"),
    "images/html_named.jpg": (0, "HTML"),
    "images/truncated.png": (0, "truncated"),
    "images/0x0.png": (0, "0 x 0 pixels"),
    "audio/empty.wav": (0, "empty"),
    "audio/truncated.wav": (0, "truncated"),
    "audio/truncated.ogg": (0, "truncated"),
    "audio/truncated.mp3": (0, "truncated"),
    "audio/mp3_named.wav": (0, "truncated"),  # which it is, beside its name
    "video/empty.mp4": (0, "empty"),
    "video/no_moov.mp4": (0, "cannot be opened"),
    "video/truncated.webm": (0, "truncated"),
    "tars/traversal.tar": (1, "leaves the archive"),
    "tars/bad_header.tar": (19, "utf-8"),
    "tabular/unterminated.csv": (0, "never closes"),
    "tabular/semicolon_latin1_decimal_comma.csv": (0, "not utf-8"),
}


@pytest.fixture(scope="session")
def given_cases(cases: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cases")
    with tarfile.open(cases / "shard" / "given.tar.gz") as archive:
        archive.extractall(folder, filter="fully_trusted")
    return folder


def _format(case: str) -> str:
    kind, _, name = case.partition("/")
    return FORMATS.get(kind) or name.rpartition(".")[2]


def _good(folder: Path, kind: str) -> None:
    """A good file of the same kind, which comes last."""
    if kind == "images":
        (folder / "zz_good.png").write_bytes(image_bytes(7))
    elif kind == "text":
        (folder / "zz_good.txt").write_text("good")


def test_every_case_has_a_decision(given_cases: Path) -> None:
    found = {
        path.relative_to(given_cases).as_posix()
        for path in given_cases.rglob("*")
        if path.is_file() and path.relative_to(given_cases).parts[0] != "names"
    }
    assert found == set(KEPT) | set(REFUSED)
    assert not set(KEPT) & set(REFUSED)


@pytest.mark.parametrize("case", sorted(KEPT))
def test_kept(given_cases: Path, tmp_path: Path, case: str) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    shutil.copy(given_cases / case, folder)
    _good(folder, case.split("/")[0])
    extra = len(list(folder.iterdir())) - 1
    if KEPT[case] + extra == 0:
        with pytest.raises(ValueError, match="no rows"):
            convert(folder, tmp_path / "out", format=_format(case))
        return
    result = convert(folder, tmp_path / "out", format=_format(case))
    assert (result.rows, result.skipped) == (KEPT[case] + extra, 0)
    rows(tmp_path / "out")
    kind = case.split("/")[0]
    if kind in ("images", "audio", "video"):
        column = {"images": "image"}.get(kind, kind)
        assert raw_rows(tmp_path / "out")[0][column] == (given_cases / case).read_bytes()


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_refused(given_cases: Path, tmp_path: Path, case: str) -> None:
    kept, reason = REFUSED[case]
    folder = tmp_path / "in"
    folder.mkdir()
    shutil.copy(given_cases / case, folder)
    _good(folder, case.split("/")[0])
    extra = len(list(folder.iterdir())) - 1
    name = case.split("/")[1]
    if kept + extra == 0:
        with pytest.raises(ValueError, match="no row") as caught:
            convert(folder, tmp_path / "out", format=_format(case), on_error="skip")
        assert reason in str(caught.value)
        assert name in str(caught.value)
        return
    result = convert(folder, tmp_path / "out", format=_format(case), on_error="skip")
    assert result.rows == kept + extra
    bad = rows(result.quarantine)
    assert len(bad) == result.skipped > 0
    assert all(row["where"].startswith(name) for row in bad)
    assert any(reason in row["reason"] for row in bad)
    with pytest.raises(BadRowError) as caught:
        convert(folder, tmp_path / "strict", format=_format(case), on_error="fail")
    assert name in str(caught.value)
    assert reason in str(caught.value)
    assert not (tmp_path / "strict" / "index.json").exists()


def test_all_cases_of_a_kind_together(given_cases: Path, tmp_path: Path) -> None:
    """One bad file does not harm the others: a folder gives the sum of what its files give."""
    for kind in ("text", "images", "audio", "video"):
        result = convert(given_cases / kind, tmp_path / kind, format=FORMATS[kind], on_error="skip")
        assert result.rows == sum(count for case, count in KEPT.items() if case.startswith(f"{kind}/"))
        assert result.skipped == sum(case.startswith(f"{kind}/") for case in REFUSED)


def test_names_are_kept_as_they_are(given_cases: Path, tmp_path: Path) -> None:
    result = convert(given_cases / "names", tmp_path / "out", on_error="skip")
    found = {row["file_name"]: row["text"] for row in rows(tmp_path / "out")}
    expected: dict[str, Any] = {}
    for path in (given_cases / "names").rglob("*.txt"):
        name = path.relative_to(given_cases / "names").as_posix()
        if path.is_file() and not path.name.startswith(".") and "\udce9" not in name:
            expected[name] = path.read_bytes().decode()
    assert found == expected
    assert len(found) == 10
    reasons = {row["where"]: row["reason"] for row in rows(result.quarantine)}
    assert reasons["link_dangling.txt"] == "no such file"
    (other,) = [why for where, why in reasons.items() if where != "link_dangling.txt"]
    assert "no valid Unicode" in other
    assert "1 hidden file or marker left out" in result.notes


def test_values_of_the_cases_that_are_kept(given_cases: Path, tmp_path: Path) -> None:
    def read(case: str, **options: Any) -> list[dict[str, Any]]:
        out = tmp_path / case.replace("/", "_")
        convert(given_cases / case, out, format=_format(case), **options)
        return rows(out)

    assert read("jsonl/mixed_schema.jsonl") == [
        {"extra": None, "id": 1, "text": "a"},
        {"extra": None, "id": "2", "text": None},
        {"extra": {"a": 1}, "id": [3], "text": None},
        {"extra": None, "id": None, "text": None},
    ]
    assert read("jsonl/keys_odd.jsonl") == [{"": 1, "\0": 4, "__key__": "k", "a.b": 3, "a/b": 2, "text": "x"}]
    assert read("tabular/quoted_newlines.csv") == [
        {"id": 1, "text": 'line one\nline two, with comma and "quotes"'},
        {"id": 2, "text": "x"},
    ]
    assert read("tabular/decimal_ts_dict.parquet") == [
        {"c": "a", "d": None, "t": "1970-01-01T00:00:00.000000000Z", "u": 0},
        {"c": "b", "d": "1.0000000000", "t": "2116-02-20T23:53:38.427387904Z", "u": 2**64 - 1},
    ]
    latin = read("tabular/semicolon_latin1_decimal_comma.csv", encoding="latin-1")
    assert latin == [{"id": 1, "näme": "Jörg", "wert": "3,14"}]
    assert read("text/koi8r.txt", encoding="koi8-r")[0]["text"] == (
        given_cases / "text/koi8r.txt"
    ).read_bytes().decode("koi8-r")
    pairs = read("tars/missing_pair.tar")
    assert sum(row["txt"] is None for row in pairs) == 1
    table = pq.read_table(given_cases / "tabular/ok.parquet").to_pylist()
    assert [(row["id"], row["text"]) for row in read("tabular/footer_flipped.parquet")] == [
        (row["id"], row["text"]) for row in table
    ]


def test_links_that_go_in_circles_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "sub" / "a.txt").write_text("a")
    (tmp_path / "in" / "sub" / "up").symlink_to(tmp_path / "in", target_is_directory=True)
    (tmp_path / "in" / "again").symlink_to(tmp_path / "in" / "sub", target_is_directory=True)
    result = convert(tmp_path / "in", tmp_path / "out")
    assert [row["file_name"] for row in rows(tmp_path / "out")] == ["again/a.txt", "sub/a.txt"]
    assert result.notes == ("2 links to a folder above them left out",)


def test_an_image_bomb_is_refused_unread(tmp_path: Path) -> None:
    import struct
    import zlib

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    png = (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    )
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(image_bytes(1))
    (tmp_path / "in" / "bomb.png").write_bytes(png)
    result = convert(tmp_path / "in", tmp_path / "out", on_error="skip")
    assert (result.rows, result.skipped) == (1, 1)
    assert "60,000 x 60,000 pixels" in result.examples[0][1]


def test_a_pipe_in_the_corpus_does_not_hang(tmp_path: Path) -> None:
    import os

    (tmp_path / "in").mkdir()
    os.mkfifo(tmp_path / "in" / "pipe.txt")
    (tmp_path / "in" / "a.txt").write_text("a")
    result = convert(tmp_path / "in", tmp_path / "out")
    assert result.rows == 1
    assert result.notes == ("1 pipe, socket or device left out",)


def test_a_row_that_no_shard_can_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is 4 GiB; it is lowered here, since a row of that size does not fit a test."""
    from shards import builder

    monkeypatch.setattr(builder, "U32_MAX", 2000)
    (tmp_path / "a.jsonl").write_text('{"a": "x"}\n{"a": "' + "y" * 3000 + '"}\n{"a": "z"}\n')
    result = convert(tmp_path / "a.jsonl", tmp_path / "out", on_error="skip", size_limit=1500)
    assert [row["a"] for row in rows(tmp_path / "out")] == ["x", "z"]
    assert "4 GiB" in result.examples[0][1]


def test_rows_beside_one_that_no_shard_can_hold_keep_their_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shards import builder

    monkeypatch.setattr(builder, "U32_MAX", 2000)
    values = [[1, 2], [3] * 3000, [4, 5]]
    pq.write_table(pa.table({"a": pa.array(values, pa.list_(pa.int16()))}), tmp_path / "a.parquet")
    result = convert(
        tmp_path / "a.parquet", tmp_path / "out", on_error="skip", size_limit=1500, columns={"a": "ndarray"}
    )
    found = [row["a"] for row in rows(tmp_path / "out")]
    assert [(value.dtype.name, value.tolist()) for value in found] == [("int16", [1, 2]), ("int16", [4, 5])]
    assert result.examples[0][0] == "a.parquet:1"


def test_members_of_one_key_that_stand_apart_are_refused(tmp_path: Path) -> None:
    import io

    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in ("a.txt", "a.cls", "b.txt", "b.cls", "a.json"):
            data = b"1"
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    result = convert(
        tmp_path / "a.tar", tmp_path / "out", on_error="skip", columns={"txt": "str", "cls": "int"}
    )
    assert [row["txt"] for row in rows(tmp_path / "out")] == ["1", "1"]
    assert result.examples == (("a.tar:a", "members of this key stand apart from each other"),)


def test_a_record_with_too_few_fields_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,2\n3\n4,5\n")
    result = convert(tmp_path / "a.csv", tmp_path / "out", on_error="skip")
    assert [(row["a"], row["b"]) for row in rows(tmp_path / "out")] == [(1, 2), (4, 5)]
    assert result.examples == (("a.csv:3", "1 fields, the header has 2"),)
