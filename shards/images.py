"""The image encodings of MDS: `pil`, `jpeg`, `png`, lists of them, and `jpeg_array`.

Kept apart from `shards.encodings` because Pillow is imported here. Bytes go in and out unchanged; a Pillow
image is encoded, except that a JPEG file opened and left as it was keeps its own bytes. Decoding is as lazy
as Pillow: the pixels of a JPEG or PNG are decoded when they are used.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, JpegImagePlugin

from shards.values import Buffer, Encoding, EncodingError

_U32_MAX = (1 << 32) - 1


class Pil(Encoding):
    """Raw pixels: [width u32] [height u32] [bytes of mode u32] [mode] [pixels]."""

    passes_bytes = True

    def encode(self, value: Any) -> bytes:
        if isinstance(value, bytes):
            return value
        image = _image(value)
        mode = image.mode.encode()
        return np.array([*image.size, len(mode)], "<u4").tobytes() + mode + image.tobytes()

    def decode(self, data: Buffer) -> Image.Image:
        if len(data) < 12:
            raise EncodingError(f"it is no raw image: {len(data)} bytes")
        width, height, mode_bytes = (int(number) for number in np.frombuffer(data[:12], "<u4"))
        pixels = data[12 + mode_bytes :]
        # A row of one-bit pixels is the least that any mode needs; checked before Pillow makes room for them.
        if mode_bytes > 16 or (width + 7) // 8 * height > len(pixels):
            raise EncodingError(f"it is no raw image: {width} × {height} pixels in {len(pixels)} bytes")
        try:
            return Image.frombytes(str(data[12 : 12 + mode_bytes], "ascii"), (width, height), bytes(pixels))
        except (ValueError, KeyError) as error:
            raise EncodingError(f"it is no raw image: {error}") from error


class _File(Encoding):
    """An image as a file of one format."""

    passes_bytes = True
    is_file = True
    format: str

    def encode(self, value: Any) -> bytes:
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value)
        return self._encode_image(_image(value))

    def decode(self, data: Buffer) -> Image.Image:
        try:
            return Image.open(io.BytesIO(data))
        except (OSError, ValueError, SyntaxError, TypeError, NotImplementedError) as error:
            raise EncodingError(f"it is no image: {error}") from error

    def _encode_image(self, image: Image.Image) -> bytes:
        out = io.BytesIO()
        try:
            image.save(out, format=self.format)
        except (OSError, ValueError, KeyError) as error:
            raise EncodingError(
                f"an image of mode {image.mode} cannot be stored as {self.format}: {error}; convert it first"
            ) from error
        return out.getvalue()


class Jpeg(_File):
    """A JPEG file."""

    format = "JPEG"

    def _encode_image(self, image: Image.Image) -> bytes:
        original = _original_file(image)
        return super()._encode_image(image) if original is None else original


class Png(_File):
    """A PNG file."""

    format = "PNG"


class _List(Encoding):
    """Several values: [0 u32] [count u32] [bytes of each u32] values."""

    passes_bytes = True
    item: type[Encoding]

    def encode(self, value: Any) -> bytes:
        if isinstance(value, bytes):
            return value
        if not isinstance(value, list | tuple):
            raise EncodingError(f"expected a list of images, got {type(value).__name__}")
        item = self.item()
        return b"\0\0\0\0" + _join([item.encode(one) for one in value])

    def decode(self, data: Buffer) -> list[Any]:
        item = self.item()
        return [item.decode(one) for one in _split(data, 4)]


class PilList(_List):
    """Several raw images."""

    item = Pil


class JpegList(_List):
    """Several JPEG files."""

    item = Jpeg


class PngList(_List):
    """Several PNG files."""

    item = Png


class JpegArray(Encoding):
    """At least one JPEG file: [count u32] [bytes of each u32] files."""

    passes_bytes = True

    def encode(self, value: Any) -> bytes:
        if isinstance(value, bytes):
            return value
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise EncodingError(f"expected a list of JPEG files, got {type(value).__name__}")
        if not value:
            raise EncodingError("it needs at least one image; use list[jpeg] where there may be none")
        item = Jpeg()
        return _join([item.encode(one) for one in value])

    def decode(self, data: Buffer) -> list[Image.Image]:
        item = Jpeg()
        return [item.decode(one) for one in _split(data, 0)]


def _join(values: list[bytes]) -> bytes:
    if sum(map(len, values)) > _U32_MAX:
        raise EncodingError("a value is at most 4 GiB")
    return b"".join([np.array([len(values), *map(len, values)], "<u4").tobytes(), *values])


def _split(data: Buffer, at: int) -> list[memoryview]:
    """The inverse of `_join`, from position `at` on."""
    view = memoryview(data)
    if len(view) < at + 4:
        raise EncodingError(f"it is no list of images: {len(view)} bytes")
    count = int.from_bytes(view[at : at + 4], "little")
    start = at + 4 + 4 * count
    if start > len(view):
        raise EncodingError(f"it is no list of images: {count} of them in {len(view)} bytes")
    values = []
    for size in np.frombuffer(view[at + 4 : start], "<u4").tolist():
        values.append(view[start : start + size])
        start += size
    if start > len(view):
        raise EncodingError(f"it is no list of images: it ends {start - len(view)} bytes early")
    return values


def _image(value: Any) -> Image.Image:
    if not isinstance(value, Image.Image):
        raise EncodingError(f"expected an image or bytes, got {type(value).__name__}")
    return value


def _original_file(image: Image.Image) -> bytes | None:
    """The bytes of the file that `image` was opened from, if it still shows exactly what that file holds."""
    path = getattr(image, "filename", "")
    if not isinstance(image, JpegImagePlugin.JpegImageFile) or not path:
        return None
    try:
        with open(path, "rb") as file:
            data = file.read()
        with Image.open(io.BytesIO(data)) as stored:
            if stored.format != "JPEG" or stored.mode != image.mode or stored.size != image.size:
                return None
            # An image whose pixels were decoded may have been drawn on: then its pixels decide.
            touched = not image.tile
            return data if not touched or stored.tobytes() == image.tobytes() else None
    except (OSError, ValueError, SyntaxError):
        return None
