"""index.json: what is written is read, what is not sound is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shards.errors import FormatError, UsageError
from shards.index import FileInfo, Index, ShardInfo, merge
from shards.sizes import parse_bytes

names = st.lists(st.text("abcdefXYZ0123456789-_.é ", min_size=1, max_size=8), min_size=1, max_size=3).map(
    "/".join
)
files = st.builds(
    FileInfo,
    names.filter(lambda name: all(part not in (".", "..") for part in name.split("/"))),
    st.integers(0, 2**32 - 1),
    st.dictionaries(
        st.sampled_from(["sha256", "xxh3_64"]), st.text("0123456789abcdef", min_size=1, max_size=8)
    ),
)


@st.composite
def shard_infos(draw: st.DrawFn) -> ShardInfo:
    columns = draw(st.dictionaries(st.text(max_size=6), st.sampled_from(["str", "bytes", "int"]), min_size=1))
    ordered = sorted(columns)
    zipped = draw(st.none() | files)
    return ShardInfo(
        samples=draw(st.integers(0, 10**6)),
        size_limit=draw(st.none() | st.integers(1, 2**32 - 1)),
        compression=None if zipped is None else "zstd:3",
        hashes=("sha256",),
        column_names=tuple(ordered),
        column_encodings=tuple(columns[name] for name in ordered),
        column_sizes=tuple(8 if columns[name] == "int" else None for name in ordered),
        raw=draw(files),
        zip=zipped,
    )


@given(st.lists(shard_infos(), max_size=5), st.dictionaries(st.text(max_size=5), st.text(max_size=5)))
@settings(max_examples=60)
def test_what_is_written_is_read(shards: list[ShardInfo], extra: dict[str, str]) -> None:
    index = Index(shards, extra)
    back = Index.parse(index.dumps(), where="x")
    assert list(back.shards) == shards
    assert back.extra == extra
    assert back.samples == index.samples == sum(info.samples for info in shards)
    assert back.sizes.tolist() == [info.samples for info in shards]
    assert back.fingerprint == index.fingerprint
    assert back.dumps() == index.dumps()


def test_shards_are_a_sequence() -> None:
    index = Index.parse(Index([_info(f"a{i}.mds") for i in range(5)]).dumps(), where="x")
    assert [info.raw.basename for info in index.shards] == [f"a{i}.mds" for i in range(5)]
    assert index.shards[-1].raw.basename == "a4.mds"
    assert [info.raw.basename for info in index.shards[1:3]] == ["a1.mds", "a2.mds"]
    with pytest.raises(IndexError):
        index.shards[5]


def test_the_fingerprint_is_of_content_and_order_not_of_text_or_extra() -> None:
    a, b = _info("a.mds"), _info("b.mds")
    base = Index([a, b])
    assert Index([a, b], {"version": "1"}).fingerprint == base.fingerprint
    assert Index([b, a]).fingerprint != base.fingerprint
    spaced = json.dumps(json.loads(base.dumps()), indent=3)
    assert Index.parse(spaced, where="x").fingerprint == base.fingerprint


def test_an_index_of_mosaicml(corpora: Path) -> None:
    text = (corpora / "foreign/mds/tokens_ndarray/index.json").read_bytes()
    index = Index.parse(text, where="x")
    assert index.samples == 500
    assert index.extra == {}
    assert index.columns == {"shape": "ndarray:float32:2,3", "tokens": "ndarray:uint16"}
    assert json.loads(index.dumps())["shards"] == json.loads(text)["shards"]


def _info(name: str, samples: int = 3) -> ShardInfo:
    return ShardInfo(
        samples=samples,
        size_limit=None,
        compression=None,
        hashes=(),
        column_names=("x",),
        column_encodings=("str",),
        column_sizes=(None,),
        raw=FileInfo(name, 100),
        zip=None,
    )


def _entry(**changes: Any) -> dict[str, Any]:
    return {**_info("a.mds").to_dict(), **changes}


@pytest.mark.parametrize(
    "name",
    [
        "../a.mds",
        "/etc/passwd",
        "a/../../b",
        "",
        ".",
        "a//b",
        "a/./b",
        "..",
        "a\\..\\b",
        "a\0b",
        5,
        None,
        ["a"],
    ],
)
@pytest.mark.parametrize("key", ["raw_data", "zip_data"])
def test_a_name_that_leaves_the_dataset_is_refused(name: Any, key: str) -> None:
    file = {"basename": name, "bytes": 1, "hashes": {}}
    changes = {key: file, "compression": "zstd"} if key == "zip_data" else {key: file}
    text = json.dumps({"version": 2, "shards": [_entry(), _entry(**changes)]})
    with pytest.raises(FormatError, match=r"here\.json, shard 1: "):
        Index.parse(text, where="here.json")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"samples": -1}, "samples is -1"),
        ({"samples": 1.5}, "samples is 1.5"),
        ({"samples": True}, "samples is True"),
        ({"samples": "3"}, "samples is '3'"),
        ({"samples": 2**32}, "samples"),
        ({"raw_data": {"basename": "a", "bytes": 2**32}}, "bytes is 4294967296"),
        ({"raw_data": None}, "raw_data is no object"),
        ({"raw_data": {"basename": "a", "bytes": 1, "hashes": {"md5": 5}}}, "hashes"),
        ({"version": 3}, "version 3; this datasync reads version 2"),
        ({"version": 1}, "version 1"),
        ({"version": None}, "version None"),
        ({"format": "csv"}, "format 'csv'"),
        ({"compression": "zstd"}, "compression and zip_data"),
        ({"compression": 7, "zip_data": {"basename": "a", "bytes": 1}}, "compression is 7"),
        ({"column_names": None}, "no lists of columns"),
        ({"column_names": ["x", "y"]}, "differ in length"),
        ({"column_names": [5]}, "must be text"),
        ({"column_sizes": [-4]}, "size of column 'x' is -4"),
        (
            {"column_names": ["x", "x"], "column_encodings": ["str", "str"], "column_sizes": [None, None]},
            "each name once",
        ),
    ],
)
def test_an_entry_that_is_not_sound_is_refused(changes: dict[str, Any], words: str) -> None:
    text = json.dumps({"shards": [_entry(**changes)], "version": 2})
    with pytest.raises(FormatError, match=r"here\.json, shard 0") as error:
        Index.parse(text, where="here.json")
    assert words in str(error.value)
    assert "mend:" in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"version": 2}',
        '{"shards": []}',
        '{"version": 2, "shards": {}}',
        '{"version": 2, "shards": []} more',
        '{"version": 2, "shards": [,]}',
        '{"version": 2, "shards": [], }',
        '{"version": 2, "shards": [5]}',
        '{"version": 3, "shards": []}',
        '{"version": true, "shards": []}',
        b"\xff",
        "[" * 100_000,
    ],
)
def test_text_that_is_no_index_is_refused(text: str | bytes) -> None:
    with pytest.raises(FormatError, match=r"here\.json"):
        Index.parse(text, where="here.json")


def test_an_empty_dataset_is_legal() -> None:
    index = Index.parse(Index([]).dumps(), where="x")
    assert index.samples == 0
    assert len(index.shards) == 0
    assert index.columns == {}


def test_merging_keeps_nested_folders() -> None:
    merged = merge([("", Index([_info("a.mds", 1)])), ("deep/er/", Index([_info("shards/b.mds", 2)]))])
    assert [info.stored.basename for info in merged.shards] == ["a.mds", "deep/er/shards/b.mds"]
    assert merged.samples == 3
    with pytest.raises(FormatError):
        merge([("../up", Index([_info("a.mds")]))])


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (7, 7),
        ("7", 7),
        ("100kb", 102400),
        ("1.5 GiB", 3 << 29),
        ("64MB", 1 << 26),
        ("9b", 9),
        (2.5, 2),
        ("0", 0),
    ],
)
def test_sizes_as_people_write_them(value: Any, count: int) -> None:
    assert parse_bytes(value) == count


@pytest.mark.parametrize("value", ["", "x", "5 parsecs", "-1", -1, True, None, "ib", "1ib"])
def test_what_is_no_size_is_refused(value: Any) -> None:
    with pytest.raises(UsageError):
        parse_bytes(value)


def test_shards_of_another_format_say_how_they_are_converted(tmp_path: Path) -> None:
    """Their own index would be taken for a row, so it is the shards that are named."""
    entry = {"format": "json", "version": 2, "samples": 1}
    with pytest.raises(FormatError) as refused:
        Index.parse(json.dumps({"version": 2, "shards": [entry]}).encode(), where="there")
    assert "datasync shard 'FOLDER/shard.*.json' OUT" in str(refused.value)
