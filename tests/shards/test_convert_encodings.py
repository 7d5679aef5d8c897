"""Every MDS encoding, asked for by name, from text, JSON and typed columns; and over from MDS as it is."""

from __future__ import annotations

import io
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from shards import ShardWriter, encodings
from shards.convert import convert
from shards.errors import UsageError
from tests.shards.corpus import image_bytes, raw_rows, rows

JPEG, PNG = image_bytes(3, format="JPEG"), image_bytes(4)

# Encoding -> (value as text, as JSON, as an Arrow column; what comes back)
SCALARS: dict[str, tuple[str, Any, pa.Array, Any]] = {
    **{
        name: ("7", 7, pa.array([7], pa.int64()), np.dtype(name).type(7))
        for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    },
    **{
        name: ("0.5", 0.5, pa.array([0.5], pa.float64()), np.dtype(name).type(0.5))
        for name in ("float16", "float32", "float64")
    },
    "int": ("-7", -7, pa.array([-7], pa.int32()), -7),
    "str": ("ü7", "ü7", pa.array(["ü7"]), "ü7"),
    "bytes": ("ü7", "ü7", pa.array(["ü7".encode()]), "ü7".encode()),
    "str_int": (str(10**30), 10**30, pa.array([7], pa.int64()), 10**30),
    "str_float": ("0.1", 0.1, pa.array([0.1]), 0.1),
    "str_decimal": ("1.50", "1.50", pa.array([Decimal("1.50")], pa.decimal128(9, 2)), Decimal("1.50")),
    "json": ("x", {"a": [1, None]}, pa.array([{"a": [1, None]}]), {"a": [1, None]}),
}
LISTS: dict[str, np.ndarray[Any, Any]] = {
    "ndarray": np.arange(6, dtype="int64"),
    "ndarray:uint16": np.arange(6, dtype="uint16"),
    "ndarray:float32:6": np.arange(6, dtype="float32"),
}


def back(path: Path, out: Path, encoding: str) -> Any:
    result = convert(path, out, columns={"v": encoding})
    assert result.columns == {"v": encoding}
    (row,) = rows(out)
    return row["v"]


@pytest.mark.parametrize("encoding", sorted(SCALARS))
def test_a_scalar_in_the_encoding_asked_for(tmp_path: Path, encoding: str) -> None:
    text, value, column, expected = SCALARS[encoding]
    (tmp_path / "a.csv").write_text(f"v\n{text}\n", encoding="utf-8")
    (tmp_path / "a.jsonl").write_text(json.dumps({"v": value}) + "\n")
    pq.write_table(pa.table({"v": column}), tmp_path / "a.parquet")
    found = back(tmp_path / "a.jsonl", tmp_path / "json", encoding)
    assert (type(found), found) == (type(expected), expected)
    if encoding != "json":
        assert back(tmp_path / "a.csv", tmp_path / "csv", encoding) == expected
    typed = back(tmp_path / "a.parquet", tmp_path / "parquet", encoding)
    assert typed == (7 if encoding == "str_int" else expected)


@pytest.mark.parametrize("encoding", sorted(LISTS))
def test_a_list_in_the_encoding_asked_for(tmp_path: Path, encoding: str) -> None:
    expected = LISTS[encoding]
    (tmp_path / "a.jsonl").write_text(json.dumps({"v": expected.tolist()}) + "\n")
    pq.write_table(pa.table({"v": [expected.tolist()]}), tmp_path / "a.parquet")
    # A list in JSON has no type of its own, and none is guessed.
    for name in ("a.parquet",) if encoding == "ndarray" else ("a.jsonl", "a.parquet"):
        found = back(tmp_path / name, tmp_path / f"out-{name}", encoding)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("encoding", "data"), [("jpeg", JPEG), ("png", PNG), ("jpeg", PNG), ("bytes", PNG)])
def test_an_image_is_stored_as_it_is(tmp_path: Path, encoding: str, data: bytes) -> None:
    pq.write_table(pa.table({"v": [data]}), tmp_path / "a.parquet")
    convert(tmp_path / "a.parquet", tmp_path / "out", columns={"v": encoding})
    assert raw_rows(tmp_path / "out") == [{"v": data}]


@pytest.mark.parametrize(
    ("encoding", "value"),
    [("int8", "300"), ("uint8", "-1"), ("int", "x"), ("float32", "x"), ("str_int", "1.5")],
)
def test_a_value_that_does_not_fit_is_a_bad_row_and_nothing_wraps(
    tmp_path: Path, encoding: str, value: str
) -> None:
    (tmp_path / "a.csv").write_text(f"v\n{value}\n1\n")
    result = convert(tmp_path / "a.csv", tmp_path / "out", columns={"v": encoding}, on_error="skip")
    assert (result.rows, result.skipped) == (1, 1)
    assert result.examples[0][0] == "a.csv:2"


def _made() -> dict[str, Any]:
    """A value for every safe encoding that there is."""
    picture = Image.linear_gradient("L").resize((9, 7))
    values: dict[str, Any] = {name: expected for name, (_, _, _, expected) in SCALARS.items()}
    values |= dict(LISTS)
    values |= {"pil": picture, "jpeg": JPEG, "png": PNG, "jpeg_array": [JPEG], "jpegarray": [JPEG, JPEG]}
    values |= {"list[pil]": [picture], "list[jpeg]": [Image.open(io.BytesIO(JPEG))], "list[png]": [picture]}
    return values


def test_every_encoding_goes_over_from_mds_byte_by_byte(tmp_path: Path) -> None:
    made = _made()
    assert {name.partition(":")[0] for name in made} == set(encodings.names()) - {"pkl"}
    with ShardWriter(columns={name: name for name in made}, out=tmp_path / "in", compression="gz") as writer:
        for _ in range(3):
            writer.write(made)
    result = convert(tmp_path / "in", tmp_path / "out", compression="zstd:1", size_limit="4kb")
    assert result.columns == {name: name for name in made}
    assert raw_rows(tmp_path / "out") == raw_rows(tmp_path / "in")


def test_a_column_of_pickles_is_refused_and_may_be_left_behind(tmp_path: Path) -> None:
    with ShardWriter(columns={"a": "int", "p": "pkl"}, out=tmp_path / "in") as writer:
        writer.write({"a": 1, "p": {"x"}})
    with pytest.raises(UsageError, match="could run code"):
        convert(tmp_path / "in", tmp_path / "out")
    convert(tmp_path / "in", tmp_path / "out", select=("a",))
    assert rows(tmp_path / "out") == [{"a": 1}]
