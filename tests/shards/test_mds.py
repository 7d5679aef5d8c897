"""The bytes of a shard: what is written is read, row by row and in batches; damage is named, not decoded."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shards.builder import FinishedShard, ShardBuilder
from shards.errors import CorruptError, FormatError, UsageError
from shards.mds import RowError, Shard, unpack

COLUMNS = {
    "text": "str",
    "raw": "bytes",
    "n": "int",
    "f": "float32",
    "v": "ndarray:int16",
    "fixed": "ndarray:uint8:3",
}
rows = st.lists(
    st.fixed_dictionaries(
        {
            "text": st.text(max_size=20),
            "raw": st.binary(max_size=20),
            "n": st.integers(-(2**63), 2**63 - 1),
            "f": st.floats(width=32, allow_nan=False),
            "v": st.lists(st.integers(-(2**15), 2**15 - 1), max_size=5),
            "fixed": st.lists(st.integers(0, 255), min_size=3, max_size=3),
        }
    ),
    min_size=1,
    max_size=20,
)


def _build(
    samples: list[dict[str, Any]], columns: dict[str, str] = COLUMNS, **options: Any
) -> list[FinishedShard]:
    builder = ShardBuilder(columns, **options)
    shards = [shard for row in samples for shard in builder.write(row)]
    return shards + builder.finish()


def _open(shard: FinishedShard, **options: Any) -> Shard:
    return Shard(unpack(shard.data, shard.info), shard.info, **options)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


@given(samples=rows, compression=st.sampled_from([None, "zstd:1"]), data=st.data())
@settings(max_examples=40, deadline=None)
def test_rows_come_back_one_by_one_and_in_batches(
    samples: list[dict[str, Any]], compression: str | None, data: st.DataObject
) -> None:
    (finished,) = _build(samples, compression=compression)
    shard = _open(finished)
    assert len(shard) == len(samples)
    assert [{k: _plain(v) for k, v in row.items()} for row in shard] == samples
    which = data.draw(st.lists(st.integers(0, len(samples) - 1), max_size=30))
    batch = shard.batch(which)
    for name in COLUMNS:
        assert [_plain(value) for value in batch[name]] == [samples[row][name] for row in which]
    assert isinstance(batch["n"], np.ndarray)
    assert isinstance(batch["fixed"], np.ndarray)
    assert batch["fixed"].shape == (len(which), 3)


def test_the_layout_is_the_documented_one() -> None:
    (finished,) = _build([{"b": "é", "a": 7}, {"b": "", "a": -1}], {"b": "str", "a": "int"})
    data = bytes(finished.data)
    count, first, second, end = struct.unpack_from("<4I", data)
    config = data[16:first]
    assert count == 2
    assert config.startswith(b'{"column_encodings": ["int", "str"], "column_names": ["a", "b"]')
    assert data[first:second] == struct.pack("<Iq", 2, 7) + "é".encode()
    assert data[second:end] == struct.pack("<Iq", 0, -1)
    assert end == len(data)


def test_a_shard_is_mapped_from_its_file_and_outlived_by_its_values(tmp_path: Path) -> None:
    (finished,) = _build([{"v": np.arange(1000)}], {"v": "ndarray"})
    path = tmp_path / "a.mds"
    path.write_bytes(finished.data)
    shard = Shard(path, finished.info)
    value = shard[0]["v"]
    shard.close()
    assert value.sum() == 499_500
    value[0] = 5
    with pytest.raises(ValueError, match="closed"):
        shard[0]


def test_some_columns_of_some_rows() -> None:
    (finished,) = _build([{"a": i, "b": str(i)} for i in range(10)], {"a": "int", "b": "str"})
    shard = _open(finished)
    assert shard.batch([3, 1], ["b"]) == {"b": ["3", "1"]}
    assert shard.batch(np.array([9, 9, 0]), ["a"])["a"].tolist() == [9, 9, 0]
    assert shard.sample_bytes(2) == struct.pack("<Iq", 1, 2) + b"2"
    with pytest.raises(UsageError, match="no column 'c'"):
        shard.batch([0], ["c"])
    for bad in ([10], [-1]):
        with pytest.raises(IndexError):
            shard.batch(bad)
        with pytest.raises(IndexError):
            shard[bad[0]]


@given(which=st.lists(st.integers(0, 49), max_size=40))
@settings(max_examples=20, deadline=None)
def test_batches_of_columns_that_all_have_a_fixed_size(which: list[int]) -> None:
    columns = {"a": "int", "h": "float16", "v": "ndarray:uint16:2,3"}
    samples = [
        {"a": -i, "h": i / 2, "v": np.arange(i, i + 6, dtype="uint16").reshape(2, 3)} for i in range(50)
    ]
    (finished,) = _build(samples, columns)
    batch = _open(finished).batch(which)
    assert [_plain(value) for value in batch["a"]] == [-i for i in which]
    assert [_plain(value) for value in batch["h"]] == [i / 2 for i in which]
    assert isinstance(batch["v"], np.ndarray)
    assert batch["v"].shape == (len(which), 2, 3)
    assert batch["v"].flags.writeable
    assert all(np.array_equal(value, samples[i]["v"]) for value, i in zip(batch["v"], which, strict=True))


@pytest.mark.parametrize("compression", [None, "zstd:3"])
def test_damage_anywhere_in_a_file_is_found(compression: str | None) -> None:
    (finished,) = _build(
        [{"a": i, "b": str(i)} for i in range(5)], {"a": "int", "b": "str"}, compression=compression
    )
    for at in range(len(finished.data)):
        damaged = bytearray(finished.data)
        damaged[at] ^= 0x10
        with pytest.raises(CorruptError, match=finished.info.stored.basename):
            unpack(damaged, finished.info)
    for size in range(len(finished.data)):
        with pytest.raises(CorruptError, match="truncated"):
            unpack(finished.data[:size], finished.info)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_damage_that_no_digest_caught_ends_in_a_named_error_or_a_value(data: st.DataObject) -> None:
    samples = [{"a": i, "b": "x" * i, "v": np.arange(i)} for i in range(6)]
    (finished,) = _build(samples, {"a": "int", "b": "str", "v": "ndarray"})
    damaged = bytearray(finished.data)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        shard = Shard(damaged, finished.info)
        for row in range(len(shard)):
            shard[row]
        shard.batch(range(len(shard)))
    except (CorruptError, FormatError) as error:
        assert "mds" in str(error)  # noqa: PT017  most damage is caught, some only changes a value


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    (finished,) = _build([{"a": 1}], {"a": "int"})
    path = tmp_path / "half.mds"
    for size in (0, 3, len(finished.data) - 1):
        path.write_bytes(finished.data[:size])
        with pytest.raises(CorruptError, match=r"half\.mds is truncated"):
            Shard(path, finished.info)


def test_pickle_is_refused_unless_asked_for() -> None:
    (finished,) = _build([{"x": {"a": 1}}], {"x": "pkl"})
    with pytest.raises(UsageError, match="can run code") as error:
        _open(finished)
    assert "allow_unsafe_types=True" in str(error.value)
    assert _open(finished, allow_unsafe_types=True)[0] == {"x": {"a": 1}}


def test_a_row_without_a_column_or_with_a_wrong_value_is_refused_by_name() -> None:
    builder = ShardBuilder({"a": "int", "b": "str"})
    builder.write({"a": 1, "b": "x"})
    with pytest.raises(RowError, match="no column 'b'"):
        builder.write({"a": 1})
    with pytest.raises(RowError, match="column 'a'"):
        builder.write({"a": "x", "b": "x"})
    assert builder.pending == 1
    (finished,) = builder.finish()
    assert _open(finished)[0] == {"a": 1, "b": "x"}


def test_a_value_that_cannot_be_decoded_is_named() -> None:
    (finished,) = _build([{"i": b"no image"}], {"i": "jpeg"})
    with pytest.raises(FormatError, match=r"row 0: cannot read 'i' \(jpeg\)"):
        _open(finished)[0]


def test_an_index_of_another_dataset_is_noticed() -> None:
    (finished,) = _build([{"a": 1}], {"a": "int"})
    (other,) = _build([{"a": 1}, {"a": 2}], {"a": "int"})
    from dataclasses import replace

    with pytest.raises(CorruptError, match="2 samples"):
        Shard(finished.data, replace(finished.info, samples=2))
    with pytest.raises(CorruptError):
        Shard(other.data, finished.info)
    with pytest.raises(FormatError, match="values of 4 bytes"):
        Shard(finished.data, replace(finished.info, column_sizes=(4,)))
    unknown = replace(finished.info, column_encodings=("celsius",))
    with pytest.raises(UsageError, match="celsius"):
        Shard(finished.data, unknown)[0]
