"""Encodings: round trips of every value they can hold, refusal of every other."""

from __future__ import annotations

import io
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from shards import encodings
from shards.errors import UsageError
from shards.values import Encoding, EncodingError

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "bytes": st.binary(max_size=100),
    "str": st.text(max_size=100),
    "int": st.integers(-(2**63), 2**63 - 1),
    "str_int": st.integers(-(10**60), 10**60),
    "str_float": st.floats(allow_nan=False),
    "str_decimal": st.decimals(allow_nan=False),
    "json": json_values,
    "pkl": json_values | st.binary(max_size=9),
    **{
        f"{sign}int{bits}": st.integers(
            *((0, 2**bits - 1) if sign else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1))
        )
        for bits in (8, 16, 32, 64)
        for sign in ("", "u")
    },
    **{f"float{bits}": st.floats(width=bits, allow_nan=False) for bits in (16, 32, 64)},
}
dtypes = st.sampled_from(
    [
        "uint8",
        "int8",
        "uint16",
        "int16",
        "float16",
        "uint32",
        "int32",
        "float32",
        "uint64",
        "int64",
        "float64",
    ]
)


@pytest.mark.parametrize("name", sorted(VALUES))
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_a_value_comes_back(name: str, data: st.DataObject) -> None:
    value = data.draw(VALUES[name])
    coder = encodings.get(name)
    encoded = coder.encode(value)
    assert coder.size in (None, len(encoded))
    assert coder.decode(memoryview(encoded)) == value


@given(dtype=dtypes, shape=st.lists(st.integers(0, 5), max_size=4), wide=st.booleans())
@settings(max_examples=60)
def test_an_array_comes_back_writable(dtype: str, shape: list[int], wide: bool) -> None:
    shape = [300, *shape[1:]] if wide and shape else shape
    value = np.arange(math.prod(shape)).astype(dtype).reshape(shape)
    names = ["ndarray", f"ndarray:{dtype}"]
    if shape and min(shape) > 0:
        names.append(f"ndarray:{dtype}:{','.join(map(str, shape))}")
    for name in names:
        coder = encodings.get(name)
        back = coder.decode(memoryview(coder.encode(value)))
        assert back.dtype == value.dtype
        assert back.shape == value.shape
        assert np.array_equal(back, value)
        assert back.flags.writeable


def test_array_bytes_do_not_depend_on_the_memory_layout() -> None:
    value = np.arange(12, dtype="int32").reshape(3, 4)
    coder = encodings.get("ndarray")
    assert coder.encode(value) == coder.encode(value.astype(">i4")) == coder.encode(np.asfortranarray(value))


@given(st.lists(st.integers(-128, 127), min_size=1, max_size=20))
def test_a_list_is_taken_where_the_type_is_known(values: list[int]) -> None:
    coder = encodings.get("ndarray:int8")
    assert coder.encode(values) == coder.encode(np.array(values, "int8"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bytes", "text"),
        ("str", 5),
        ("str", None),
        ("str", b"\xff"),
        ("str", "\ud800"),
        ("int", 1.5),
        ("int", 2**63),
        ("int", None),
        ("int", "7"),
        ("int", b"123"),
        ("uint8", 256),
        ("uint8", -1),
        ("int16", float("nan")),
        ("float32", None),
        ("float32", "1.5"),
        ("float32", [1.0]),
        ("float64", 1j),
        ("str_int", 1.5),
        ("str_float", "1"),
        ("str_decimal", 1.5),
        ("json", {1, 2}),
        ("json", b"{"),
        ("pkl", lambda: 0),
        ("ndarray", [1, 2]),
        ("ndarray", np.array(["a"])),
        ("ndarray", np.array([True])),
        ("ndarray:int32", np.zeros(3)),
        ("ndarray:int32", [1.5]),
        ("ndarray:int8", [300]),
        ("ndarray:float32", [None]),
        ("ndarray:float32", ["1"]),
        ("ndarray:int8:3", np.zeros(2, "int8")),
        ("ndarray:int8:3", b"12"),
        ("jpeg", "photo.jpg"),
        ("jpeg_array", []),
        ("list[jpeg]", b"x".decode()),
    ],
)
def test_what_cannot_be_held_is_refused(name: str, value: Any) -> None:
    with pytest.raises(EncodingError):
        encodings.get(name).encode(value)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("str", b"\xff"),
        ("int", b"1234567"),
        ("float32", b""),
        ("str_int", b"abc"),
        ("str_float", b"abc"),
        ("str_decimal", b"abc"),
        ("json", b"{"),
        ("json", b"[" * 100_000),
        ("ndarray", b""),
        ("ndarray", b"\x05"),
        ("ndarray", b"\x08\x04\x09"),
        ("ndarray:int32", b"\x07\xff"),
        ("pil", b"\0" * 5),
        ("pil", b"\xff" * 8 + b"\x03\0\0\0RGB"),
        ("jpeg", b"no image"),
        ("png", b"\x89PNG"),
        ("list[jpeg]", b"\0\0\0\0\xff\xff\xff\xff"),
        ("jpeg_array", b"\x01\0\0\0\xff\0\0\0x"),
    ],
)
def test_bytes_that_are_no_value_are_refused(name: str, data: bytes) -> None:
    with pytest.raises(EncodingError):
        encodings.get(name).decode(data)


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "I", "F", "I;16"])
def test_raw_images_keep_mode_size_and_pixels(mode: str) -> None:
    image = Image.new(mode, (13, 7), 1 if mode in ("1", "L", "P", "I", "F", "I;16") else None)
    coder = encodings.get("pil")
    back = coder.decode(memoryview(coder.encode(image)))
    assert (back.mode, back.size, back.tobytes()) == (image.mode, image.size, image.tobytes())
    both = encodings.get("list[pil]")
    assert [one.tobytes() for one in both.decode(both.encode([image, image]))] == [image.tobytes()] * 2


def _file(format: str) -> bytes:
    out = io.BytesIO()
    Image.linear_gradient("L").resize((40, 30)).convert("RGB").save(out, format=format)
    return out.getvalue()


def test_image_files_are_stored_as_they_are(tmp_path: Path) -> None:
    for name, format in (("jpeg", "JPEG"), ("png", "PNG")):
        data = _file(format)
        assert encodings.get(name).encode(data) == data
        assert encodings.get(name).decode(memoryview(data)).size == (40, 30)
        several = encodings.get(f"list[{name}]")
        assert [image.size for image in several.decode(several.encode([data, data]))] == [(40, 30)] * 2
        assert several.decode(several.encode([])) == []
    array = encodings.get("jpeg_array")
    assert [image.size for image in array.decode(array.encode([_file("JPEG")]))] == [(40, 30)]


def test_an_opened_jpeg_keeps_its_bytes_until_it_is_drawn_on(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(_file("JPEG"))
    coder = encodings.get("jpeg")
    with Image.open(path) as image:
        assert coder.encode(image) == path.read_bytes()
        image.load()
        assert coder.encode(image) == path.read_bytes()
        image.paste((255, 0, 0), (0, 0, 20, 20))
        assert coder.decode(coder.encode(image)).getpixel((5, 5))[0] > 200
    with Image.open(path) as image:
        image.thumbnail((10, 10))
        assert coder.decode(coder.encode(image)).size == image.size
    with Image.open(path) as image:
        path.unlink()
        assert coder.decode(coder.encode(image)).size == (40, 30)


def test_a_transparent_image_is_no_jpeg() -> None:
    with pytest.raises(EncodingError, match="RGBA"):
        encodings.get("jpeg").encode(Image.new("RGBA", (4, 4)))


class Celsius(Encoding):
    """Degrees with one decimal in two bytes."""

    size = 2

    def encode(self, value: float) -> bytes:
        return round(value * 10).to_bytes(2, "little", signed=True)

    def decode(self, data: Any) -> float:
        return int.from_bytes(data, "little", signed=True) / 10


class Theirs:
    """As an encoding for MosaicML Streaming is written."""

    size = None

    def __init__(self, base: int = 10) -> None:
        self.base = base

    @classmethod
    def from_str(cls, text: str) -> Theirs:
        return cls(int(text))

    def encode(self, obj: int) -> bytes:
        return str(obj).encode()

    def decode(self, data: bytes) -> int:
        assert isinstance(data, bytes)
        return int(data, self.base)


def test_own_encodings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encodings, "_FOREIGN", {})
    encodings.register("celsius", Celsius)
    encodings.register("theirs", Theirs)
    try:
        assert encodings.get("celsius").decode(encodings.get("celsius").encode(-12.3)) == -12.3
        assert encodings.get("theirs").decode(memoryview(b"11")) == 11
        assert encodings.get("theirs:16").decode(b"11") == 17
        assert {"celsius", "theirs"} <= set(encodings.names())
        encodings.register("risky", Celsius, safe=False)
        assert not encodings.is_safe("risky")
        assert encodings.is_safe("celsius")
        with pytest.raises(UsageError, match="one of MDS's own"):
            encodings.register("str", Celsius)
        with pytest.raises(UsageError, match="colon"):
            encodings.register("a:b", Celsius)
        with pytest.raises(UsageError, match="no class"):
            encodings.register("x", Celsius())  # type: ignore[arg-type]
    finally:
        encodings.get.cache_clear()


@pytest.mark.parametrize(
    "name", ["nope", "int:3", "jpeg:90", "ndarray:foo", "ndarray:int8:0", "ndarray:int8:a", "ndarray::3", ""]
)
def test_an_unknown_encoding_is_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError, match=repr(name)):
        encodings.get(name)
    assert not encodings.known(name)


def test_only_pickle_is_unsafe() -> None:
    assert [name for name in encodings.names() if not encodings.is_safe(name)] == ["pkl"]
    assert encodings.get("pkl").decode(pickle.dumps(b"raw")) == b"raw"
