"""Pixels of images, from the bytes of their files.

A JPEG goes through libjpeg-turbo: by simplejpeg where it is installed (extra `media`), which writes the
pixels where they are wanted; else by torchvision. Everything else, and a JPEG that those do not read, goes
through Pillow, which also has the last word on what is damaged. Pixels are uint8 (height, width, channels),
or (height, width) in mode L; a tensor is a view of the same memory with its channels first.

Sizes are checked before anything is decoded (invariant 10).
"""

from __future__ import annotations

import importlib.util
import io
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from datasync.errors import UsageError
from datasync.streaming.buffers import tensor_of
from shards.media import MediaError, check_pixels, image_size

if TYPE_CHECKING:
    import PIL.Image

Pixels = np.ndarray[Any, np.dtype[np.uint8]]

MODES = ("L", "RGB", "RGBA")
_COLOURS = {"RGB": "RGB", "L": "GRAY"}  # what libjpeg-turbo converts to, as simplejpeg calls it
_JPEG = b"\xff\xd8"


def decode_image(value: Any, *, to: str = "tensor", mode: str = "RGB") -> Any:
    """Decode one image.

    Args:
        value (bytes | memoryview | PIL.Image.Image): A file, or an opened image.
        to (str): ``pil``, ``numpy`` or ``tensor``. Default: ``tensor``.
        mode (str): ``L``, ``RGB`` or ``RGBA``. Default: ``RGB``.

    Raises:
        MediaError: It is no image, is damaged, or has too many pixels.
    """
    if to == "pil":
        return _loaded(value, mode)
    pixels = decode_pixels(value, mode)
    return pixels if to == "numpy" else as_tensor(pixels)


def decode_pixels(value: Any, mode: str, into: Pixels | None = None) -> Pixels:
    """Decode one image to an array.

    Args:
        value (bytes | memoryview | PIL.Image.Image): A file, or an opened image.
        mode (str): ``L``, ``RGB`` or ``RGBA``.
        into (Pixels | None): Where to write the pixels. Default: a new array.

    Raises:
        MediaError: It is no image, is damaged, or has too many pixels.
        UsageError: It has another size than `into`.
    """
    data = _unread_bytes(value)
    if data is not None and mode in _COLOURS and bytes(data[:2]) == _JPEG:
        if _has("simplejpeg"):
            pixels = _simplejpeg(data, mode, into)
        else:
            pixels = _torchvision(data, mode) if _has("torchvision") else None
        if pixels is None:
            pixels = _from_pillow(value, mode)
    else:
        pixels = _from_pillow(value, mode)
    if into is None or pixels is into:
        return pixels
    if pixels.shape != into.shape:
        raise UsageError(
            f"an image of {pixels.shape[1]} × {pixels.shape[0]} pixels cannot be stacked with one of "
            f"{into.shape[1]} × {into.shape[0]}",
            mend="give a `transform` that makes them one size, or leave out `stack`",
        )
    into[...] = pixels
    return into


def pixels_shape(value: Any, mode: str) -> tuple[int, ...]:
    """The shape of an image's pixels, without decoding them.

    Raises:
        MediaError: It is no image.
    """
    data = _unread_bytes(value)
    width, height = image_size(bytes(data)) if data is not None else value.size
    return (height, width) if mode == "L" else (height, width, len(mode))


def as_tensor(pixels: Pixels) -> Any:
    """Pixels of one image, or of a batch, as a tensor with its channels before height and width."""
    tensor = tensor_of(pixels)
    if pixels.shape[-1] in (3, 4) and pixels.ndim > 2:
        return tensor.movedim(-1, -3)
    return tensor.unsqueeze(-3)


def file_bytes(value: Any) -> bytes:
    """The bytes of a media file that is not decoded yet.

    Raises:
        MediaError: It is none.
    """
    data = _unread_bytes(value)
    if data is None:
        raise MediaError(f"expected the bytes of a file, got {type(value).__name__}")
    return bytes(data)


def _unread_bytes(value: Any) -> bytes | memoryview | None:
    """The bytes of a file, also of one that Pillow has opened in memory and not decoded yet."""
    if isinstance(value, bytes | memoryview):
        return value
    if isinstance(value, bytearray):
        return memoryview(value)
    file = getattr(value, "fp", None)
    if isinstance(file, io.BytesIO) and getattr(value, "tile", None):
        return file.getvalue()
    return None


def _simplejpeg(data: bytes | memoryview, mode: str, into: Pixels | None) -> Pixels | None:
    """None for a JPEG that it does not read; into another array than `into` if that has another size."""
    import simplejpeg

    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        check_pixels(width, height)
        if colours not in ("YCbCr", "Gray", "RGB"):
            return None
        fits = into is not None and into.shape[:2] == (height, width)
        pixels: Pixels = simplejpeg.decode_jpeg(
            data, colorspace=_COLOURS[mode], buffer=into if fits else None
        )
    except MediaError:
        raise
    except ValueError:
        return None
    if fits:
        return into
    return pixels[:, :, 0] if mode == "L" else pixels


def _torchvision(data: bytes | memoryview, mode: str) -> Pixels | None:
    """None for a JPEG that it does not read."""
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg

    check_pixels(*image_size(bytes(data)))
    wanted = ImageReadMode.RGB if mode == "RGB" else ImageReadMode.GRAY
    try:
        tensor = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=wanted)
    except RuntimeError:
        return None
    pixels: Pixels = tensor.movedim(0, -1).numpy()
    return pixels[:, :, 0] if mode == "L" else pixels


def _from_pillow(value: Any, mode: str) -> Pixels:
    return np.array(_loaded(value, mode))


def _loaded(value: Any, mode: str) -> PIL.Image.Image:
    """An image of Pillow with its pixels decoded, in a mode."""
    import PIL.Image

    try:
        if not isinstance(value, PIL.Image.Image):
            value = PIL.Image.open(io.BytesIO(value))
        check_pixels(*value.size)
        image: PIL.Image.Image = value
        image.load()
        if image.mode == "P" and "transparency" in image.info:
            image = image.convert("RGBA")
        return image if image.mode == mode else image.convert(mode)
    except (MediaError, MemoryError):
        raise
    except Exception as error:
        raise MediaError(f"{type(error).__name__}: {error}") from error


@cache
def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
