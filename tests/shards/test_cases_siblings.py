"""More of the nasty kinds than were given: made here, each with its decision; and files damaged at random.

A case is a file of a kind, how many rows it gives, and words of the refusal of what it does not give.
"""

from __future__ import annotations

import bz2
import functools
import gzip
import io
import json
import lzma
import os
import shutil
import socket
import struct
import tarfile
import wave
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from shards.convert import convert
from shards.errors import DatasyncError, UsageError
from tests.shards.corpus import image_bytes, raw_rows, rows

J = b'{"a": 1}\n'


def noise(count: int) -> bytes:
    return np.random.default_rng(count).bytes(count)


def picture(format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
    Image.fromarray(noise).save(buffer, format, **options)
    return buffer.getvalue()


def sound(frames: int = 800) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(bytes(2 * frames))
    return buffer.getvalue()


def hungry(data: bytes) -> bytes:
    """An xz file whose first block asks for a dictionary of 4 GiB."""
    block = bytearray(data[12 : 12 + (data[12] + 1) * 4])
    block[block.index(b"\x21\x01") + 2] = 40
    block[-4:] = struct.pack("<I", zlib.crc32(block[:-4]))
    return data[:12] + bytes(block) + data[12 + len(block) :]


def tar(*members: tuple[str | tarfile.TarInfo | bytes, bytes], mode: str = "w") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]  # any mode
        for name, data in members:
            if isinstance(name, bytes):
                archive.fileobj.write(name)
                archive.offset += len(name)
                continue
            member = tarfile.TarInfo(name) if isinstance(name, str) else name
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def special(name: str, kind: bytes) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, "/etc/passwd"
    return member, b""


def sized(name: str, size: bytes, kind: bytes = b"0") -> tuple[bytes, bytes]:
    """A header that says this size, whatever follows."""
    member = tarfile.TarInfo(name)
    member.type = kind
    head = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    head[124:136] = size
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head), b""


def zeros(name: str, size: int) -> bytes:
    """A member of zeros, and the end of the archive."""
    member = tarfile.TarInfo(name)
    member.size = size
    return member.tobuf() + bytes(size) + bytes(1024)


def record(body: bytes, *, kind: bytes = b"resource", length: int | None = None) -> bytes:
    http = b"Content-Type: application/http\r\n" if kind == b"response" else b""
    said = len(body) if length is None else length
    head = b"WARC/1.0\r\nWARC-Type: %s\r\n%sContent-Length: %d\r\n\r\n" % (kind, http, said)
    return head + body + b"\r\n\r\n"


def table(**columns: Any) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer)
    return buffer.getvalue()


ZIPPED = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n"
PARQUET = table(a=[1, 2, 3], b=["x", "y", "z"])
FLAC_CUT = slice(0, 30)

CASES: dict[str, tuple[bytes | Callable[[], bytes], int, str]] = {
    # JSON Lines
    "nan.jsonl": (b'{"a": NaN}\n{"a": Infinity}\n{"a": 1.5}\n', 3, ""),
    "deep_list.jsonl": (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n" + J, 1, "not JSON"),
    "deep_object.jsonl": (b'{"a": ' + b'{"x":' * 5000 + b"1" + b"}" * 5000 + b"}\n" + J, 1, "not JSON"),
    "huge_integer.jsonl": (b'{"a": ' + b"9" * 5000 + b"}\n" + J, 1, "not JSON"),
    "utf16.jsonl": ('{"a": "ü"}\n{"a": "Ċ"}\n'.encode("utf-16"), 2, ""),
    "utf16_without_mark.jsonl": ('{"a": 1}\n'.encode("utf-16-le") + b"\n" + J, 1, "not JSON"),
    "mixed_line_ends.jsonl": (b'{"a": 1}\r\n{"a": 2}\n\n\r\n{"a": 3}\r{"a": 4}\n', 2, "not JSON"),
    "raw_nul.jsonl": (b'{"a": "x\0y"}\n{"a": "z"}\n', 1, "not JSON"),
    "escaped_nul.jsonl": (b'{"a": "x\\u0000y"}\n{"a": "z"}\n', 2, ""),
    "scalar_among_objects.jsonl": (b"1\n" + J + b"null\n[]\n", 1, "object is expected"),
    "truncated_array.json": (b'[{"a": 1}, {"a": 2}', 2, "not JSON"),
    "scalar_in_array.json": (b'[{"a": 1}, 3, {"a": 2}]', 2, "object is expected"),
    "half_a_pair.jsonl": (b'{"a": "\\ud83d"}\n{"a": "\\ud83d\\ude00"}\n', 1, "no valid Unicode"),
    # compressed
    "cut.jsonl.bz2": (bz2.compress(J * 30_000, 1)[:-20], 22_218, "ended before"),
    "cut.jsonl.xz": (lzma.compress(J * 5000)[:-20], 5000, "ended before"),
    "hungry.jsonl.xz": (hungry(lzma.compress(J * 50)), 0, "Memory usage limit"),
    "two_streams.jsonl.xz": (lzma.compress(J * 5) + bytes(8) + lzma.compress(J * 6), 11, ""),
    "cut.jsonl.zst": (zstandard.compress(J * 5000)[:-5], 0, "ends early"),
    "bad_crc.jsonl.gz": (gzip.compress(J * 50)[:-8] + b"1234" + gzip.compress(J * 50)[-4:], 50, "CRC"),
    "garbage_behind.jsonl.gz": (gzip.compress(J * 50) + b"garbage", 50, "gzip"),
    "zeros_behind.jsonl.gz": (gzip.compress(J * 50) + bytes(100), 50, ""),
    "twice.jsonl.gz": (gzip.compress(gzip.compress(J)), 0, "compressed twice"),
    "noise.jsonl.zst": (noise(64) + bytes(3000), 0, "nor is it text"),
    "noise.csv.gz": (b"\x00\x01" * 500, 0, "nor is it text"),
    # tables of text
    "column_twice.csv": (b"a,a\n1,2\n", 0, "names a column twice"),
    "column_without_name.csv": (b",b\n1,2\n", 1, ""),
    "old_mac.csv": (b"a,b\r1,2\r3,4\r", 2, ""),
    "blank_lines_first.csv": (b"\n\r\na;b\n1;2\n", 1, ""),
    "separator_said.csv": (b"sep=;\na;b\n1;2\n", 1, ""),
    "utf16.csv": ("a,b\n1,ü\n".encode("utf-16"), 1, ""),
    "text_behind_a_quote.csv": (b'a,b\n0,y\n"1","x"y\n2,3\n', 1, "expected after"),
    "long_field.csv": (b"a,b\n1," + b"x" * 200_000 + b"\n", 1, ""),
    "one_endless_line.csv.gz": (gzip.compress(b"a,b\n" + bytes(4 << 20)), 0, "longer than"),
    "one_endless_header.csv.gz": (gzip.compress(b"a" * (4 << 20)), 0, "longer than"),
    # pictures
    **{
        f"cut.{end}": (picture(name)[:-20], 0, "truncated")
        for end, name in (
            ("jpg", "JPEG"),
            ("png", "PNG"),
            ("gif", "GIF"),
            ("webp", "WEBP"),
            ("bmp", "BMP"),
            ("tif", "TIFF"),
        )
    },
    **{
        f"behind.{end}": (picture(name) + b"more", 1, "")
        for end, name in (
            ("jpg", "JPEG"),
            ("png", "PNG"),
            ("gif", "GIF"),
            ("webp", "WEBP"),
            ("bmp", "BMP"),
            ("tif", "TIFF"),
        )
    },
    "large.tif": (picture("TIFF", big_tiff=True), 1, ""),
    "large_cut.tif": (picture("TIFF", big_tiff=True)[:-20], 0, "truncated"),
    "packed.tif": (picture("TIFF", compression="tiff_lzw")[:-300], 0, "cannot be opened"),
    "one_bit.png": (picture("PNG")[:900] + b"\x01" + picture("PNG")[901:], 0, "IDAT has another checksum"),
    "zeros.png": (bytes(500), 0, "something unknown"),
    "vector.png": (b'<svg xmlns="http://www.w3.org/2000/svg"></svg>', 0, "no image"),
    "many_pixels.tif": (lambda: picture_of_pixels("TIFF", compression="group4"), 0, "pixels"),
    # sound
    "head_alone.wav": (sound()[:20], 0, "truncated"),
    "without_samples.wav": (sound(0), 1, ""),
    "rate_of_zero.wav": (sound()[:24] + bytes(8) + sound()[32:], 0, "no format"),
    "length_unknown.wav": (sound()[:40] + b"\xff" * 4 + sound()[44:], 1, ""),
    # archives
    "links.tar": (
        tar(
            special("a.png", tarfile.SYMTYPE),
            special("b.png", tarfile.LNKTYPE),
            special("c.png", tarfile.CHRTYPE),
            special("d.png", tarfile.FIFOTYPE),
            ("e.txt", b"good"),
        ),
        1,
        "link or a device",
    ),
    "slip.tar": (
        tar(("../x.txt", b""), ("/y.txt", b""), ("a/../../z.txt", b""), ("e.txt", b"")),
        1,
        "leaves",
    ),
    "case_twice.tar": (tar(("a.TXT", b"1"), ("a.txt", b"2"), ("b.txt", b"3")), 1, "comes twice"),
    "no_extension.tar": (tar(("plain", b"1"), ("b.txt", b"3")), 1, "no extension"),
    "bad_members.tar": (tar(("a.json", b"{"), ("b.json", b"{}"), ("c.txt", b"\xff")), 1, "json"),
    "cut.tar.gz": (tar(*((f"{n}.bin", noise(900 + n)) for n in range(40)), mode="w:gz")[:9000], 8, "ended"),
    "size_that_lies.tar": (
        zeros("big.bin", 0)[:124] + b"77777777777\0" + zeros("big.bin", 0)[136:],
        0,
        "tar",
    ),
    "negative_size.tar": (
        tar(("a.txt", b"1"), ("c.txt", b"1"), sized("b.txt", b"\xff" * 10 + b"\xfe\0")),
        1,
        "the size -512",
    ),
    "endless_name.tar": (
        tar(("a.txt", b"1"), ("c.txt", b"1"), sized("x", b"\x80" + b"\0" * 6 + b"\1" * 5, b"L")),
        1,
        "the size",
    ),
    "endless_pax.tar": (
        tar(("a.txt", b"1"), ("c.txt", b"1"), sized("x", b"\x80" + b"\0" * 6 + b"\1" * 5, b"x")),
        1,
        "the size",
    ),
    "no_archive.tar": (b"PK\3\4" + bytes(range(256)) * 4, 0, "header"),
    "two.tbz2": (tar(("a.txt", b"1"), ("b.txt", b"2"), mode="w:bz2"), 2, ""),
    "two.txz": (tar(("a.txt", b"1"), ("b.txt", b"2"), mode="w:xz"), 2, ""),
    "two.tzst": (zstandard.compress(tar(("a.txt", b"1"), ("b.txt", b"2"))), 2, ""),
    "bomb.tar.gz": (lambda: gzip.compress(zeros("z.bin", 200 << 20), 1), 0, "far more than the archive"),
    # crawls
    "negative_length.warc": (record(b"x") + record(b"x", length=-1) + record(b"x"), 1, "length"),
    "longer_than_the_file.warc": (record(b"x") + record(b"x", length=500), 1, "ends inside"),
    "no_gzip_in_it.warc": (
        record(b"x") + record(ZIPPED + b"\x1f\x8bxxxx", kind=b"response"),
        1,
        "decompress",
    ),
    "bomb.warc": (
        lambda: record(b"x") + record(ZIPPED + gzip.compress(bytes(300 << 20), 1), kind=b"response"),
        1,
        "grows beyond",
    ),
    "no_status.warc": (record(b"x") + record(b"HTTP/1.1 abc\r\n\r\nx", kind=b"response"), 1, "no HTTP"),
    "status_of_20_digits.warc": (
        record(b"x") + record(b"HTTP/1.1 99999999999999999999 OK\r\n\r\nx", kind=b"response"),
        1,
        "status",
    ),
    "cut.warc.gz": (gzip.compress(record(b"x")) + gzip.compress(record(b"x"))[:-10], 2, "ended before"),
    # typed tables
    "cut.parquet": (PARQUET[:-10], 0, "magic bytes"),
    "head_alone.parquet": (PARQUET[:8], 0, "magic bytes"),
    "footer_lost.parquet": (PARQUET[:-60] + bytes(52) + PARQUET[-8:], 0, ""),
    "pages_lost.parquet": (PARQUET[:4] + b"\xff" * 60 + PARQUET[64:], 0, ""),
    "old.feather": (b"FEA1" + bytes(200) + b"FEA1", 0, "Feather of version 1"),
    "column_without_name.parquet": (table(**{"": [1]}), 1, ""),
}
KINDS = {
    "jsonl": "jsonl", "json": "jsonl", "csv": "csv", "tar": "webdataset", "warc": "warc",
    "parquet": "parquet", "wav": "audio", "arrow": "arrow", "feather": "arrow",
}  # fmt: skip


def picture_of_pixels(format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(buffer, format, **options)
    return buffer.getvalue()


def kind_of(name: str) -> str:
    part = name.split(".")
    known = part[-2] if part[-1] in ("gz", "bz2", "xz", "zst") else part[-1]
    return "webdataset" if part[-1] in ("tbz2", "txz", "tzst") else KINDS.get(known, "images")


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_sibling_of_the_cases(tmp_path: Path, name: str) -> None:
    data, count, said = CASES[name]
    (tmp_path / name).write_bytes(data() if callable(data) else data)
    source, options = tmp_path / name, {"on_error": "skip", "max_line_bytes": 1 << 20}
    if not count:
        with pytest.raises(DatasyncError) as caught:
            convert(source, tmp_path / "out", format=kind_of(name), **options)
        assert said in str(caught.value)
        assert name in str(caught.value)
        return
    result = convert(source, tmp_path / "out", format=kind_of(name), **options)
    assert result.rows == count
    assert bool(result.skipped) == bool(said)
    assert any(said in reason for _, reason in result.examples) or not said
    found = raw_rows(tmp_path / "out")
    assert len(found) == result.rows


def test_names_that_no_dataset_can_have_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"\\ud83d": 1, "b": 2}\n')
    with pytest.raises(UsageError, match="no valid Unicode"):
        convert(tmp_path / "a.jsonl", tmp_path / "out")
    convert(tmp_path / "a.jsonl", tmp_path / "out", select=("b",))
    pq.write_table(pa.table([pa.array([1]), pa.array([2])], names=["a", "a"]), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match="two columns called 'a'"):
        convert(tmp_path / "a.parquet", tmp_path / "twice")


def test_files_of_one_kind_whose_columns_do_not_agree_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"a": [1]}), tmp_path / "in" / "1.parquet")
    pq.write_table(pa.table({"a": ["x"]}), tmp_path / "in" / "2.parquet")
    with pytest.raises(UsageError, match="do not have the same columns"):
        convert(tmp_path / "in", tmp_path / "out")


def test_a_folder_with_everything_that_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    monkeypatch.chdir(folder)  # a socket's name is short
    (folder / "a.txt").write_text("small")
    (folder / "A.txt").write_text("large")
    (folder / "new\nline.txt").write_text("odd")
    (folder / "empty.txt").write_text("")
    os.mkfifo("pipe.txt")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket.txt")
    (folder / "device.txt").symlink_to("/dev/zero")
    (folder / "one.txt").symlink_to("two.txt")
    (folder / "two.txt").symlink_to("one.txt")
    with open(folder / "sparse.txt", "wb") as file:
        file.truncate(6 << 30)
    result = convert(folder, tmp_path / "out", on_error="skip")
    found = {row["file_name"]: row["text"] for row in rows(tmp_path / "out")}
    assert found == {"a.txt": "small", "A.txt": "large", "new\nline.txt": "odd", "empty.txt": ""}
    assert result.notes == ("3 pipes, sockets and devices left out",)
    reasons = {row["where"]: row["reason"] for row in rows(result.quarantine)}
    assert reasons.pop("sparse.txt") == "more than 134,217,728 bytes of text"
    assert reasons == dict.fromkeys(("one.txt", "two.txt"), "a link that leads to itself")


@functools.cache
def good() -> dict[str, bytes]:
    """A good file of each kind."""
    lines = "".join(json.dumps({"id": n, "text": f"text {n}", "x": [n]}) + "\n" for n in range(30)).encode()
    stream = io.BytesIO()
    rows_ = pa.table({"id": list(range(30)), "t": [f"text {n}" for n in range(30)]})
    with pa.ipc.new_file(stream, rows_.schema) as writer:
        writer.write_table(rows_, max_chunksize=7)
    members = [
        (f"{n:02}.{end}", image_bytes(n) if end == "png" else b"1")
        for n in range(9)
        for end in ("png", "cls")
    ]
    return {
        "a.jsonl": lines,
        "a.jsonl.gz": gzip.compress(lines),
        "a.jsonl.zst": zstandard.compress(lines),
        "a.jsonl.xz": lzma.compress(lines),
        "a.json": b"[" + lines.strip().replace(b"\n", b",") + b"]",
        "a.csv": b"id,text\n" + b"".join(b'%d,"text ""%d"""\n' % (n, n) for n in range(30)),
        "a.tar": tar(*members),
        "a.tar.gz": gzip.compress(tar(*members)),
        "a.warc": b"".join(record(ZIPPED + gzip.compress(b"page"), kind=b"response") for _ in range(5)),
        "a.parquet": table(
            id=list(range(30)), t=[f"text {n}" for n in range(30)], l=[[n] for n in range(30)]
        ),
        "a.arrow": stream.getvalue(),
        "a.jpg": picture("JPEG"),
        "a.png": picture("PNG"),
        "a.gif": picture("GIF"),
        "a.tif": picture("TIFF", compression="tiff_lzw"),
        "a.webp": picture("WEBP"),
        "a.bmp": picture("BMP"),
        "a.wav": sound(),
    }


def damaged(data: bytes, edits: list[tuple[str, float, int]]) -> bytes:
    for what, where, value in edits:
        at = int(where * len(data))
        if what == "flip":
            data = data[:at] + bytes([value]) + data[at + 1 :]
        elif what == "cut":
            data = data[:at]
        elif what == "drop":
            data = data[:at] + data[at + value :]
        elif what == "again":
            data = data[:at] + data[max(at - value, 0) :]
        else:
            data = data[:at] + struct.pack("<Q", zlib.crc32(b"%d" % value) * value) + data[at:]
    return data


EDITS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "flip", "flip", "cut", "drop", "again", "put"]),
        st.floats(0, 1, exclude_max=True),
        st.integers(0, 255),
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("name", sorted(good()))
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(edits=EDITS)
def test_what_is_damaged_at_random_gives_rows_or_refusals_and_nothing_else(
    tmp_path: Path, name: str, edits: list[tuple[str, float, int]]
) -> None:
    (tmp_path / name).write_bytes(damaged(good()[name], edits))
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    try:
        result = convert(
            tmp_path / name,
            tmp_path / "out",
            format=kind_of(name),
            on_error="skip",
            overwrite=True,
            workers=1,
        )
    except DatasyncError as error:
        said = error.message
    else:
        said = ""
        assert len(raw_rows(tmp_path / "out")) == result.rows
        assert all(reason for _, reason in result.examples)
    assert not said or name in said or "column" in said
