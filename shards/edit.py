"""Changing media on the way, where the user asks for it: smaller images, another format, another sample rate.

An image that has to be changed is decoded, turned as its orientation flag says (the flag goes), shrunk with
Lanczos and encoded again; one that is small enough and in the right format stays as the bytes that it is.
Audio becomes 16-bit WAV with its own channels. The same versions of Pillow and FFmpeg give the same bytes.
"""

from __future__ import annotations

import io
import wave
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shards import media
from shards.media import MediaError

if TYPE_CHECKING:
    from shards.options import ConvertOptions

_PILLOW = {"jpeg": "JPEG", "png": "PNG", "webp": "WEBP"}
_QUALITY = {"JPEG": {"quality": 95, "subsampling": 0}, "WEBP": {"quality": 95}, "PNG": {}}


def editor(options: ConvertOptions) -> Callable[[bytes, str], bytes]:
    """The function from a media file and its kind to what is stored in its place."""
    side, form, rate = options.max_image_size, options.image_format, options.resample

    def edit(data: bytes, kind: str) -> bytes:
        if kind == "image" and (side is not None or form is not None):
            return edit_image(data, side=side, form=form)
        if kind == "audio" and rate is not None:
            return resample(data, rate)
        return data

    return edit


def edit_image(data: bytes, *, side: int | None, form: str | None) -> bytes:
    """An image whose longer side has at most `side` pixels, in the format `form`."""
    from PIL import Image, ImageOps

    size = media.image_size(data)
    found = media.sniff(data).partition("/")[2]
    too_large = side is not None and max(size) > side
    if not too_large and form in (None, found):
        return data
    with media.open_image(data) as opened:
        try:
            image = ImageOps.exif_transpose(opened)
        except Exception as error:
            raise MediaError(f"the image cannot be decoded: {error}") from error
        if too_large:
            assert side is not None
            image.thumbnail((side, side), Image.Resampling.LANCZOS)
        name = _PILLOW[form] if form is not None else (opened.format or "PNG")
        return _encode(image, name if name in _QUALITY else "PNG")


def _encode(image: Any, name: str) -> bytes:
    if name == "JPEG" and image.mode not in ("RGB", "L", "CMYK"):
        image = _flat(image)
    elif name == "WEBP" and image.mode not in ("RGB", "RGBA"):
        image = image.convert("RGBA" if "A" in image.getbands() or "transparency" in image.info else "RGB")
    buffer = io.BytesIO()
    image.save(buffer, name, **_QUALITY[name])
    return buffer.getvalue()


def _flat(image: Any) -> Any:
    """An image without transparency: over white."""
    from PIL import Image

    rgba = image.convert("RGBA")
    white = Image.new("RGBA", rgba.size, "white")
    white.alpha_composite(rgba)
    return white.convert("RGB")


def resample(data: bytes, rate: int) -> bytes:
    """Audio of any kind as 16-bit WAV of `rate` samples a second."""
    import av

    with media.open_av(data, "audio") as container:
        stream = container.streams.audio[0]
        channels = int(stream.channels)
        layout = "mono" if channels == 1 else "stereo" if channels == 2 else stream.layout.name
        resampler = av.AudioResampler(format="s16", layout=layout, rate=rate)
        pieces = []
        try:
            for frame in container.decode(audio=0):
                pieces += [out.to_ndarray().tobytes() for out in resampler.resample(frame)]
            pieces += [out.to_ndarray().tobytes() for out in resampler.resample(None)]
        except Exception as error:
            raise MediaError(f"the audio cannot be decoded: {error}") from error
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(b"".join(pieces))
    return buffer.getvalue()
