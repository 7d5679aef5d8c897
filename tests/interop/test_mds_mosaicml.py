"""MosaicML Streaming reads what we write and we read what it writes: every encoding, compression, hash."""

from __future__ import annotations

import inspect
import io
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageChops

from shards import ShardReader, ShardWriter

streaming = pytest.importorskip("streaming")
peer_compression = pytest.importorskip("streaming.base.compression")
peer_encodings = pytest.importorskip("streaming.base.format.mds.encodings")
peer_hashing = pytest.importorskip("streaming.base.hashing")


def _image(mode: str, i: int) -> Image.Image:
    return Image.linear_gradient("L").resize((8 + i, 6)).convert(mode)


def _jpeg(i: int) -> bytes:
    out = io.BytesIO()
    _image("RGB", i).save(out, format="JPEG")
    return out.getvalue()


SAMPLES: dict[str, Any] = {
    "bytes": lambda i: bytes(range(i)),
    "str": lambda i: "ü漢🙂"[:i] + "x" * i,
    "int": lambda i: (-1) ** i * 2 ** (i * 6),
    **{
        name: (lambda i, name=name: getattr(np, name)(i * 9))
        for name in peer_encodings.NDArray._value_dtype2int
    },
    "str_int": lambda i: 10 ** (i * 10) - i,
    "str_float": lambda i: i / 7,
    "str_decimal": lambda i: Decimal(i) / 8,
    "ndarray": lambda i: np.arange(i * 2 + 2, dtype="float16").reshape(2, i + 1),
    "ndarray:int32": lambda i: np.arange(i * 100 + 1, dtype="int32"),
    "ndarray:uint16:3,2": lambda i: np.full((3, 2), i, "uint16"),
    "pil": lambda i: _image("RGBA", i),
    "jpeg": _jpeg,
    "png": lambda i: _image("RGBA", i),
    "jpeg_array": lambda i: [_jpeg(i), _jpeg(i + 1)],
    "jpegarray": lambda i: [_jpeg(i)],
    "list[pil]": lambda i: [_image("L", k) for k in range(i)],
    "list[jpeg]": lambda i: [_image("RGB", k) for k in range(i)],
    "list[png]": lambda i: [_image("L", k) for k in range(i)],
    "pkl": lambda i: {"set": {i}, "none": None},
    "json": lambda i: {"a": [i, None, True, "ü"], "b": i / 3},
}
COUNT = 9
FAMILIES = ["br:3", "bz2:1", "gz:1", "snappy", "zstd:1"]


def _rows() -> list[dict[str, Any]]:
    return [{name: make(i) for name, make in SAMPLES.items()} for i in range(COUNT)]


def _columns() -> dict[str, str]:
    return {name: name for name in SAMPLES}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, bytes) and isinstance(b, Image.Image):
        a = Image.open(io.BytesIO(a))
    if isinstance(a, Image.Image):
        same_form = a.size == b.size and a.mode == b.mode
        return same_form and ImageChops.difference(a.convert("RGBA"), b.convert("RGBA")).getbbox() is None
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b))
    if isinstance(a, float):
        return type(a) is type(b) and math.isclose(a, b, rel_tol=0, abs_tol=0)
    return type(a) is type(b) and bool(a == b)


def _peer_samples(folder: Path, **options: Any) -> list[dict[str, Any]]:
    """Read with MosaicML's own readers, shard by shard, so that no shared memory is left behind."""
    import json

    from streaming.base.format import reader_from_json

    samples: list[dict[str, Any]] = []
    for entry in json.loads((folder / "index.json").read_text())["shards"]:
        reader = reader_from_json(str(folder), None, entry)
        reader.validate(options.get("allow_unsafe_types", False))
        if reader.zip_data is not None:
            packed = (folder / reader.zip_data.basename).read_bytes()
            for name, digest in reader.zip_data.hashes.items():
                assert peer_hashing.get_hash(name, packed) == digest
            raw = peer_compression.decompress(reader.compression, packed)
            (folder / reader.raw_data.basename).write_bytes(raw)
        raw = (folder / reader.raw_data.basename).read_bytes()
        assert len(raw) == reader.raw_data.bytes
        for name, digest in reader.raw_data.hashes.items():
            assert peer_hashing.get_hash(name, raw) == digest
        samples += [reader[i] for i in range(len(reader))]
    return samples


def test_every_encoding_of_the_peer_is_tried() -> None:
    assert {name.partition(":")[0] for name in SAMPLES} == set(peer_encodings.get_mds_encodings())
    assert {name.partition(":")[0] for name in FAMILIES} == set(peer_compression._families)


@pytest.mark.parametrize("compression", [None, *FAMILIES])
def test_they_read_ours(tmp_path: Path, compression: str | None) -> None:
    rows = _rows()
    with ShardWriter(
        columns=_columns(), out=tmp_path / "d", compression=compression, size_limit="8kb"
    ) as writer:
        for row in rows:
            writer.write(row)
    read = _peer_samples(tmp_path / "d", allow_unsafe_types=True)
    ours = list(ShardReader(tmp_path / "d", allow_unsafe_types=True))
    assert len(read) == len(ours) == COUNT
    for theirs, mine, row in zip(read, ours, rows, strict=True):
        for name in SAMPLES:
            assert _same(mine[name], theirs[name]), name
            if "jpeg" not in name or name == "jpeg":
                assert _same(row[name], theirs[name]), name


@pytest.mark.parametrize("compression", [None, *FAMILIES])
def test_we_read_theirs(tmp_path: Path, compression: str | None) -> None:
    rows = _rows()
    hashes = sorted(peer_hashing.get_hashes())
    with streaming.MDSWriter(
        columns=_columns(), out=str(tmp_path / "d"), compression=compression, hashes=hashes, size_limit="8kb"
    ) as writer:
        for row in rows:
            writer.write(row)
    reader = ShardReader(tmp_path / "d", allow_unsafe_types=True)
    assert reader.verify(samples=True) == []
    assert len(reader.index.shards) > 1
    theirs = _peer_samples(tmp_path / "d", allow_unsafe_types=True)
    for mine, other in zip(reader, theirs, strict=True):
        for name in SAMPLES:
            assert _same(mine[name], other[name]), name


def test_samples_and_shards_are_the_same_bytes(tmp_path: Path) -> None:
    """The same rows end in the same shards with the same samples; only names, hashes and config differ."""
    rows = [{name: value for name, value in row.items() if name != "pkl"} for row in _rows()]
    columns = {name: name for name in rows[0]}
    with streaming.MDSWriter(columns=columns, out=str(tmp_path / "theirs"), size_limit=6000) as writer:
        for row in rows:
            writer.write(row)
    # Our config names our hashes, so it is longer by that much; the limit makes room for it.
    longer = len('"sha256", "xxh3_64"')
    with ShardWriter(columns=columns, out=tmp_path / "ours", size_limit=6000 + longer) as ours:
        for row in rows:
            ours.write(row)
    mine, other = ShardReader(tmp_path / "ours"), ShardReader(tmp_path / "theirs")
    assert mine.index.sizes.tolist() == other.index.sizes.tolist()
    for i in range(COUNT):
        shard, row = mine.locate(i)
        assert mine.shard(shard).sample_bytes(row) == other.shard(shard).sample_bytes(row)


@pytest.mark.parametrize("validate", ["sha256", "xxh3_64"])
@pytest.mark.parametrize("compression", [None, "zstd:3"])
def test_streaming_dataset_streams_ours(tmp_path: Path, compression: str | None, validate: str) -> None:
    with ShardWriter(
        columns={"n": "int"}, out=tmp_path / "remote", compression=compression, size_limit=2000
    ) as w:
        for i in range(1000):
            w.write({"n": i})
    assert len(w._shards) > 3
    streaming.base.util.clean_stale_shared_memory()
    dataset = streaming.StreamingDataset(
        remote=str(tmp_path / "remote"),
        local=str(tmp_path / "local"),
        validate_hash=validate,
        shuffle=False,
        batch_size=1,
    )
    assert [int(sample["n"]) for sample in dataset] == list(range(1000))
    del dataset
    streaming.base.util.clean_stale_shared_memory()


def test_our_writer_takes_the_arguments_of_theirs_with_their_defaults(tmp_path: Path) -> None:
    ours = inspect.signature(ShardWriter.__init__).parameters
    for name, theirs in inspect.signature(streaming.MDSWriter.__init__).parameters.items():
        if theirs.kind is not inspect.Parameter.VAR_KEYWORD:
            assert (ours[name].kind, ours[name].default) == (theirs.kind, theirs.default)
    # What theirs takes by **kwargs, as its documentation lists it.
    options = {"progress_bar": False, "max_workers": 2, "retry": 1, "exist_ok": True}
    for writer, out in ((streaming.MDSWriter, tmp_path / "theirs"), (ShardWriter, tmp_path / "ours")):
        with writer(columns={"a": "int"}, out=str(out), hashes=["sha1"], size_limit="1kb", **options) as made:
            made.write({"a": 1})
    assert _peer_samples(tmp_path / "ours") == _peer_samples(tmp_path / "theirs") == [{"a": 1}]
