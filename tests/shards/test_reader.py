"""ShardReader: a whole dataset by sample number, checked against its index."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shards import ShardReader, ShardWriter
from shards.errors import CorruptError, FormatError, UsageError

COLUMNS = {"n": "int", "text": "str", "v": "ndarray:int16:4"}
ROWS = [{"n": i, "text": f"row {i}", "v": np.arange(i, i + 4, dtype="int16")} for i in range(150)]


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in row.items()}


@pytest.fixture(params=[None, "zstd:3", "gz"])
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with ShardWriter(
        columns=COLUMNS, out=tmp_path / "d", size_limit=1000, compression=request.param
    ) as writer:
        for row in ROWS:
            writer.write(row)
    return tmp_path / "d"


def test_by_number_by_slice_and_in_order(dataset: Path) -> None:
    with ShardReader(dataset) as reader:
        assert len(reader) == 150
        assert reader.columns == COLUMNS
        assert _plain(reader[149]) == _plain(reader[-1]) == _plain(ROWS[149])
        assert [row["n"] for row in reader[10:40:7]] == list(range(10, 40, 7))
        assert [_plain(row) for row in reader] == [_plain(row) for row in ROWS]
        for bad in (150, -151):
            with pytest.raises(IndexError):
                reader[bad]


def test_batches_across_shards_keep_the_order_asked_for(dataset: Path) -> None:
    reader = ShardReader(dataset, open_shards=2)
    numbers = np.random.default_rng(0).integers(0, 150, 300)
    batch = reader.batch(numbers)
    assert batch["n"].tolist() == numbers.tolist()  # type: ignore[union-attr]
    assert batch["text"] == [f"row {i}" for i in numbers]
    assert batch["v"].tolist() == [list(range(i, i + 4)) for i in numbers]  # type: ignore[union-attr]
    assert list(reader.batch([3], ["text"])) == ["text"]
    assert reader.batch([], ["text"]) == {"text": []}


def test_a_dataset_on_a_store(dataset: Path, tmp_path: Path) -> None:
    reader = ShardReader(f"file://{dataset}")
    assert _plain(reader[77]) == _plain(ROWS[77])
    assert _plain(ShardReader(dataset.parent, split="d")[5]) == _plain(ROWS[5])


def test_verify_names_every_shard_that_is_not_what_the_index_says(dataset: Path) -> None:
    reader = ShardReader(dataset)
    assert reader.verify() == []
    assert reader.verify(samples=True) == []
    files = [dataset / info.stored.basename for info in reader.index.shards]
    flipped = bytearray(files[1].read_bytes())
    flipped[len(flipped) // 2] ^= 1
    files[1].write_bytes(flipped)
    os.truncate(files[2], 50)
    files[3].unlink()
    problems = ShardReader(dataset).verify()
    assert [problem.shard for problem in problems] == [1, 2, 3]
    for problem, words in zip(problems, ["expected", "truncated: 50 bytes", "missing"], strict=True):
        assert words in str(problem.error)
        assert problem.basename in str(problem.error)


def test_a_damaged_shard_is_never_read(dataset: Path) -> None:
    info = ShardReader(dataset).index.shards[0]
    path = dataset / info.stored.basename
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError, match=info.stored.basename):
        ShardReader(dataset)[0]


def test_no_dataset_there(tmp_path: Path) -> None:
    for source in (tmp_path, tmp_path / "nowhere", "memory://nowhere"):
        with pytest.raises(UsageError, match=r"no dataset at .*: it has no index\.json"):
            ShardReader(source)
    (tmp_path / "index.json").write_text("{}")
    with pytest.raises(FormatError, match=r"index\.json"):
        ShardReader(tmp_path)


def test_an_index_that_points_outside_reads_nothing(tmp_path: Path) -> None:
    with ShardWriter(columns={"a": "int"}, out=tmp_path / "d") as writer:
        writer.write({"a": 1})
    index = tmp_path / "d/index.json"
    name = ShardReader(tmp_path / "d").index.shards[0].stored.basename
    (tmp_path / "secret").write_bytes((tmp_path / "d" / name).read_bytes())
    index.write_text(index.read_text().replace(name, "../secret"))
    with pytest.raises(FormatError, match=r"'\.\./secret' leaves the dataset"):
        ShardReader(tmp_path / "d")


def test_pickled_columns_need_consent(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(tmp_path / "exploded"),))

    with ShardWriter(columns={"a": "pkl"}, out=tmp_path / "d") as writer:
        writer.write({"a": b"plain"})
        writer.write({"a": Bomb()})
    reader = ShardReader(tmp_path / "d")
    with pytest.raises(UsageError, match="allow_unsafe_types=True"):
        reader[0]
    assert reader.verify() == []
    assert not (tmp_path / "exploded").exists()
    assert ShardReader(tmp_path / "d", allow_unsafe_types=True)[0] == {"a": b"plain"}
    assert (
        pickle.loads(ShardReader(tmp_path / "d", allow_unsafe_types=True).shard(0).sample_bytes(0)[4:])
        == b"plain"
    )


def test_a_dataset_of_mosaicml(corpora: Path) -> None:
    reader = ShardReader(corpora / "foreign/mds/tokens_ndarray")
    assert len(reader) == 500
    assert reader.verify(samples=True) == []
    sample = reader[0]
    assert sample["shape"].shape == (2, 3)
    assert sample["tokens"].dtype == np.uint16
