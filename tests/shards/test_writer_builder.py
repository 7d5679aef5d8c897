"""ShardBuilder: rows and Arrow batches give the same bytes, and shards end where MDSWriter's would."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shards.builder import FinishedShard, Recipe, ShardBuilder, ShardCutter
from shards.errors import UsageError
from shards.mds import RowError, Shard, unpack

ARROW: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "str": (pa.string(), st.text(max_size=30)),
    "str/large": (pa.large_string(), st.text(max_size=30)),
    "str/view": (pa.string_view(), st.text(max_size=30)),
    "str/dictionary": (pa.dictionary(pa.int8(), pa.string()), st.sampled_from(["a", "bé", ""])),
    "str/binary": (pa.binary(), st.text(max_size=5).map(str.encode)),
    "bytes": (pa.binary(), st.binary(max_size=30)),
    "bytes/large": (pa.large_binary(), st.binary(max_size=30)),
    "bytes/fixed": (pa.binary(4), st.binary(min_size=4, max_size=4)),
    "jpeg": (pa.binary(), st.binary(max_size=30)),
    "int": (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    "int/bool": (pa.bool_(), st.booleans()),
    "int8": (pa.int64(), st.integers(-128, 127)),
    "uint64": (pa.uint64(), st.integers(0, 2**64 - 1)),
    "int64/whole": (pa.float64(), st.integers(-(2**50), 2**50).map(float)),
    "float16": (pa.float32(), st.floats(width=32, allow_nan=False)),
    "float32": (pa.float64(), st.floats(allow_nan=False)),
    "float32/int": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "float64": (pa.float64(), st.floats(allow_nan=False)),
    "ndarray:int32": (pa.list_(pa.int32()), st.lists(st.integers(-(2**31), 2**31 - 1), max_size=6)),
    "ndarray:int16": (pa.large_list(pa.int64()), st.lists(st.integers(-(2**15), 2**15 - 1), max_size=6)),
    "ndarray:float32": (pa.list_(pa.float64()), st.lists(st.floats(allow_nan=False), max_size=6)),
    "ndarray:float32/int": (pa.list_(pa.int64()), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4)),
    "ndarray:uint8:3": (pa.list_(pa.uint8()), st.lists(st.integers(0, 255), min_size=3, max_size=3)),
    "ndarray:uint8:2": (pa.list_(pa.uint8(), 2), st.lists(st.integers(0, 255), min_size=2, max_size=2)),
    "ndarray:uint8:2,2": (
        pa.list_(pa.list_(pa.uint8())),
        st.lists(st.lists(st.integers(0, 255), min_size=2, max_size=2), min_size=2, max_size=2),
    ),
    "ndarray:uint8/bool": (pa.list_(pa.bool_()), st.lists(st.booleans(), max_size=6)),
    "json": (pa.struct({"a": pa.int64()}), st.fixed_dictionaries({"a": st.none() | st.integers(0, 9)})),
    "json/null": (pa.string(), st.none() | st.text(max_size=5)),
    "str_decimal": (
        pa.decimal128(20, 2),
        st.integers(-(10**9), 10**9).map(lambda cents: Decimal(cents) / 100),
    ),
    "str_int": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
}


def _by_rows(columns: dict[str, str], rows: list[dict[str, Any]], **options: Any) -> list[FinishedShard]:
    builder = ShardBuilder(columns, **options)
    return [shard for row in rows for shard in builder.write(row)] + builder.finish()


def _by_batches(
    columns: dict[str, str], batches: list[pa.RecordBatch], **options: Any
) -> list[FinishedShard]:
    builder = ShardBuilder(columns, **options)
    return [shard for batch in batches for shard in builder.write_batch(batch)] + builder.finish()


@given(data=st.data())
@settings(max_examples=120, deadline=None)
def test_arrow_batches_give_the_bytes_of_rows(data: st.DataObject) -> None:
    keys = data.draw(st.lists(st.sampled_from(sorted(ARROW)), min_size=1, max_size=5, unique=True))
    count = data.draw(st.integers(1, 40))
    columns = {key: key.partition("/")[0] for key in keys}
    arrays = {
        key: pa.array(data.draw(st.lists(ARROW[key][1], min_size=count, max_size=count)), ARROW[key][0])
        for key in keys
    }
    batch = pa.record_batch(arrays)
    options = {"size_limit": data.draw(st.integers(1, 3000)), "ordinal": 7}
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=3)))
    pieces = [batch.slice(a, b - a) for a, b in zip([0, *cuts], [*cuts, count], strict=True)]
    expected = _by_rows(columns, batch.to_pylist(), **options)
    assert _by_batches(columns, [batch], **options) == expected
    assert _by_batches(columns, pieces, **options) == expected


@given(lengths=st.lists(st.integers(0, 3000), min_size=1, max_size=200))
@settings(max_examples=30, deadline=None)
def test_long_and_short_values_of_any_length(lengths: list[int]) -> None:
    values = [bytes([i % 256]) * length for i, length in enumerate(lengths)]
    batch = pa.record_batch({"b": values, "s": [value.hex() for value in values]})
    columns = {"b": "bytes", "s": "str"}
    assert _by_batches(columns, [batch]) == _by_rows(columns, batch.to_pylist())


def test_arrays_without_a_fixed_type_take_that_of_the_arrow_column() -> None:
    values = [[1], [2, 3], list(range(300))]
    batch = pa.record_batch({"v": pa.array(values, pa.list_(pa.int16()))})
    rows = [{"v": np.array(value, "int16")} for value in values]
    assert _by_batches({"v": "ndarray"}, [batch]) == _by_rows({"v": "ndarray"}, rows)
    nested = pa.record_batch({"v": pa.array([[[1, 2]], [[3, 4]]], pa.list_(pa.list_(pa.float32())))})
    rows = [{"v": np.array([[1, 2]], "float32")}, {"v": np.array([[3, 4]], "float32")}]
    assert _by_batches({"v": "ndarray"}, [nested]) == _by_rows({"v": "ndarray"}, rows)


def test_a_batch_of_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shards.arrow._PIECE_BYTES", 1000)
    batch = pa.record_batch(
        {"t": pa.array([list(range(i, i + 8)) for i in range(500)], pa.list_(pa.int32(), 8))}
    )
    columns = {"t": "ndarray:int32:8"}
    assert _by_batches(columns, [batch], size_limit=5000) == _by_rows(
        columns, batch.to_pylist(), size_limit=5000
    )


@given(sizes=st.lists(st.integers(0, 400), min_size=1, max_size=60), limit=st.integers(1, 1500))
@settings(max_examples=50)
def test_a_shard_exceeds_its_limit_only_for_a_single_row(sizes: list[int], limit: int) -> None:
    shards = _by_rows({"b": "bytes"}, [{"b": bytes(size)} for size in sizes], size_limit=limit)
    assert sum(shard.info.samples for shard in shards) == len(sizes)
    for shard, after in zip(shards, [*shards[1:], None], strict=True):
        assert shard.info.samples > 0
        assert shard.info.raw.bytes <= limit or shard.info.samples == 1
        if after is not None:
            first = len(Shard(after.data, after.info).sample_bytes(0))
            assert shard.info.raw.bytes + 4 + first > limit


def test_names_say_ordinal_and_content() -> None:
    (raw,) = _by_rows({"a": "int"}, [{"a": 1}], ordinal=42)
    (packed,) = _by_rows({"a": "int"}, [{"a": 1}], ordinal=42, compression="gz")
    for shard, end in ((raw, ".mds"), (packed, ".mds.gz")):
        digest = shard.info.stored.hashes["sha256"]
        assert shard.info.stored.basename == f"shards/00042-{digest[:16]}{end}"
        assert len(shard.data) == shard.info.stored.bytes
    assert f"{packed.info.raw.basename}.gz" == packed.info.stored.basename
    assert set(packed.info.stored.hashes) == {"sha256", "xxh3_64"}
    assert set(packed.info.raw.hashes) == {"xxh3_64"}


def test_asked_for_digests_are_kept_for_both_files() -> None:
    (shard,) = _by_rows({"a": "int"}, [{"a": 1}], hashes=["md5"], compression="zstd")
    assert set(shard.info.stored.hashes) == {"md5", "sha256", "xxh3_64"}
    assert set(shard.info.raw.hashes) == {"md5", "xxh3_64"}
    assert shard.info.hashes == ("md5", "sha256", "xxh3_64")


@pytest.mark.parametrize(
    ("array", "encoding", "words"),
    [
        (pa.array(["a", None]), "str", "1 of 2 are null"),
        (pa.array([1, 300]), "uint8", "300 is outside uint8"),
        (pa.array([1.5]), "int", "whole number"),
        (pa.array(["x"]), "bytes", "expected bytes"),
        (pa.array([b"\xff"]), "str", "invalid UTF-8|Invalid UTF8|UTF8"),
        (pa.array([[1, 2], [3]]), "ndarray:int32:2", r"expected the shape \(2,\), got \(1,\)"),
        (pa.array([[1, None]]), "ndarray:int32", "null"),
        (pa.array([[1, 2**40]]), "ndarray:int32", "outside int32"),
        (pa.array([[1.5]]), "ndarray:int32", "only numbers that fit|int32"),
    ],
)
def test_a_batch_that_cannot_be_held_changes_nothing(array: pa.Array, encoding: str, words: str) -> None:
    builder = ShardBuilder({"x": encoding})
    with pytest.raises(RowError, match=words) as error:
        builder.write_batch(pa.record_batch({"x": array}))
    assert "column 'x'" in str(error.value)
    assert error.value.written == 0
    assert builder.finish() == []


def test_invalid_utf8_in_an_arrow_string_is_found() -> None:
    bad = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
    )
    with pytest.raises(RowError, match="column 'x'"):
        ShardBuilder({"x": "str"}).write_batch(pa.record_batch({"x": bad}))


def test_after_an_error_in_a_batch_the_rows_before_it_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shards.arrow._PIECE_BYTES", 64)
    values = [*range(100), None, *range(100, 110)]
    batch = pa.record_batch({"x": pa.array(values, pa.int64())})
    builder = ShardBuilder({"x": "int"}, size_limit=500)
    shards, row = [], 0
    skipped = []
    while row < batch.num_rows:
        try:
            shards += builder.write_batch(batch.slice(row))
            break
        except RowError as error:
            row += error.written
        while row < batch.num_rows:
            try:
                shards += builder.write_batch(batch.slice(row, 1))
            except RowError:
                skipped.append(row)
                row += 1
                break
            row += 1
    shards += builder.finish()
    assert skipped == [100]
    found = [sample["x"] for shard in shards for sample in Shard(unpack(shard.data, shard.info), shard.info)]
    assert found == list(range(110))
    assert shards == _by_rows({"x": "int"}, [{"x": x} for x in range(110)], size_limit=500)


def test_a_batch_without_a_column_is_refused_by_name() -> None:
    with pytest.raises(RowError, match="no column 'b'"):
        ShardBuilder({"a": "int", "b": "int"}).write_batch(pa.record_batch({"a": [1]}))


def test_nothing_wraps_at_four_gib() -> None:
    huge = np.zeros((1 << 32) + 10, np.uint8)  # never touched, so it takes no memory
    cutter = ShardCutter(Recipe({"b": "bytes"}))
    with pytest.raises(RowError, match="4 GiB"):
        cutter._check(len(huge))
    limit = (1 << 32) - 1
    full = ShardCutter(Recipe({"b": "bytes"}, size_limit=None))
    full.write({"b": b"first"})
    full._bytes = limit - 10
    drafts = full.write({"b": b"too much for it"})
    assert [len(draft.sizes) for draft in drafts] == [1]
    with pytest.raises(UsageError, match="below 4 GiB"):
        Recipe({"b": "bytes"}, size_limit="4gb")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"columns": {}}, "at least one column"),
        ({"columns": {"a": "strr"}}, "'strr'"),
        ({"compression": "zst"}, "'zst'"),
        ({"hashes": ["sha"]}, "'sha'"),
        ({"size_limit": "big"}, "'big'"),
        ({"ordinal": -1}, "-1"),
    ],
)
def test_a_wrong_argument_is_found_at_once(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ShardBuilder(**{"columns": {"a": "int"}, **options})
