"""Images, audio and video as files: what they are, whether they are whole, and cheap facts about them.

Media goes into shards as its original bytes. `check` looks at as little as it can:

    none     nothing
    kind     the first bytes: that it is an image, audio or video; that an image has a sane number of pixels
    whole    also its structure: that it does not end early
    full     also decodes it once

A file whose name says one kind and whose bytes say another is what its bytes say. An image of more than
`MAX_PIXELS` is refused unread (invariant 10). Orientation flags are kept and not applied.
"""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from collections.abc import Callable
from typing import Any

MAX_PIXELS = 178_956_970  # where Pillow itself refuses: 0.5 GiB of RGB

KINDS = ("image", "audio", "video")

NONE, KIND, WHOLE, FULL = CHECKS = ("none", "kind", "whole", "full")

IMAGE_EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".jfif", ".avif"}
)
AUDIO_EXTENSIONS = frozenset(
    {".wav", ".flac", ".mp3", ".ogg", ".oga", ".opus", ".m4a", ".aac", ".aiff", ".aif"}
)
VIDEO_EXTENSIONS = frozenset(
    {".mp4", ".webm", ".mkv", ".mov", ".avi", ".ogv", ".m4v", ".mpg", ".mpeg", ".ts"}
)


class MediaError(ValueError):
    """A file that is no media of the kind it should be, or is damaged."""


def sniff(data: bytes) -> str:
    """What `data` is by its first bytes, ``image/jpeg``, ``audio/wav``, …; empty if it is unknown."""
    head = data[:16]
    for magic, kind in _MAGIC:
        if head.startswith(magic):
            return kind
    if head[:4] == b"RIFF":
        return {b"WEBP": "image/webp", b"WAVE": "audio/wav", b"AVI ": "video/avi"}.get(head[8:12], "")
    if head[:4] == b"FORM" and head[8:12] in (b"AIFF", b"AIFC"):
        return "audio/aiff"
    if head[4:8] == b"ftyp":
        brand = head[8:12]
        if brand in (b"avif", b"avis"):
            return "image/avif"
        if brand in (b"heic", b"heix", b"mif1"):
            return "image/heic"
        return "audio/mp4" if brand in (b"M4A ", b"M4B ") else "video/mp4"
    if head[4:8] in (b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "video/mp4"
    if head[:4] == b"OggS":
        page = data[:256]
        return "video/ogg" if b"theora" in page else "audio/ogg"
    if head[:4] == b"\x1aE\xdf\xa3":
        return "video/webm" if b"webm" in data[:64] else "video/matroska"
    if len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0:
        return "audio/aac" if head[1] & 0x06 == 0 else "audio/mpeg"
    return ""


_MAGIC = (
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"BM", "image/bmp"),
    (b"II*\0", "image/tiff"),
    (b"MM\0*", "image/tiff"),
    (b"II+\0", "image/tiff"),
    (b"MM\0+", "image/tiff"),
    (b"fLaC", "audio/flac"),
    (b"ID3", "audio/mpeg"),
    (b"\0\0\x01\xba", "video/mpeg"),
)


def check(data: bytes, kind: str, *, level: str = WHOLE) -> None:
    """Check media of `kind`: ``image``, ``audio`` or ``video``.

    Raises:
        MediaError: It is empty, of another kind, too large, or ends early, or (``full``) cannot be decoded.
    """
    if level == NONE:
        return
    found = sniff(data)
    if not data:
        raise MediaError("the file is empty")
    if not found.startswith(kind) and not (kind == "audio" and found.startswith("video")):
        raise MediaError(f"no {kind} but {_describe(data, found)}")
    if level == KIND:
        if found in ("image/jpeg", "image/png"):
            _check_known_pixels(data)
        return
    if found == "image/jpeg":
        check_pixels(*_whole_jpeg(data))
    else:
        check_whole(data)
    if kind == "image" and found != "image/jpeg":
        check_pixels(*image_size(data))
    if level == FULL:
        _DECODE[kind](data)
    elif kind != "image" and found not in ("audio/wav", "audio/ogg"):
        _open_media(data, kind)


def check_whole(data: bytes) -> None:
    """Follow the structure of a file that is no JPEG, where its format says how long it is.

    Raises:
        MediaError: It ends early.
    """
    structure = _STRUCTURE.get(sniff(data))
    if structure is not None:
        structure(data)


def _check_known_pixels(data: bytes) -> None:
    """Check the pixels of an image whose header says them; one cut before that is for ``whole``."""
    try:
        size = image_size(data)
    except MediaError:
        return
    if size != (0, 0) or data[:2] != b"\xff\xd8":
        check_pixels(*size)


def _describe(data: bytes, found: str) -> str:
    if found:
        return found
    start = data[:64].lstrip().lower()
    if start.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "an HTML or XML page"
    return "something unknown"


def check_pixels(width: int, height: int) -> None:
    """Refuse an image without pixels, and one with so many that decoding it would take the machine down."""
    if width < 1 or height < 1:
        raise MediaError(f"an image of {width} x {height} pixels")
    if width * height > MAX_PIXELS:
        raise MediaError(f"an image of {width:,} x {height:,} pixels, more than {MAX_PIXELS:,} in all")


def image_size(data: bytes) -> tuple[int, int]:
    """Width and height as the header says them, before any orientation is applied."""
    if data[:8] == b"\x89PNG\r\n\x1a\n" and data[12:16] == b"IHDR":
        return struct.unpack(">II", data[16:24]) if len(data) >= 24 else (0, 0)
    if data[:2] == b"\xff\xd8":
        return _jpeg_segments(data)[1]
    with open_image(data) as image:
        return int(image.size[0]), int(image.size[1])


def open_image(data: bytes) -> Any:
    """Open an image without decoding it; every way in which Pillow fails becomes a MediaError."""
    from PIL import Image, UnidentifiedImageError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return Image.open(io.BytesIO(data))
        except Image.DecompressionBombError as error:
            raise MediaError(f"an image with too many pixels: {error}") from error
        except MemoryError:
            raise
        except UnidentifiedImageError as error:
            raise MediaError("the image cannot be opened: its format is not one that Pillow reads") from error
        except Exception as error:  # Pillow raises seven kinds on bad files
            raise MediaError(f"the image cannot be opened: {error}") from error


def _jpeg_segments(data: bytes) -> tuple[int, tuple[int, int]]:
    """Where the first scan of a JPEG begins, and its width and height."""
    at, size = 2, (0, 0)
    while at + 4 <= len(data):
        if data[at] != 0xFF:  # between two segments decoders pass over what is none
            at = data.find(b"\xff", at)
            if at < 0:
                break
            continue
        marker = data[at + 1]
        if marker == 0:
            at += 2
            continue
        if marker in (0xFF, 0x01) or 0xD0 <= marker <= 0xD7:
            at += 1 if marker == 0xFF else 2
            continue
        if marker == 0xDA:
            return at, size
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack(">HH", data[at + 5 : at + 9].ljust(4, b"\0"))
            size = width, height
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    raise MediaError("the JPEG is truncated before its first scan")


def _whole_jpeg(data: bytes) -> tuple[int, int]:
    """Width and height. The end marker must come behind the first scan; a thumbnail has one of its own."""
    scan, size = _jpeg_segments(data)
    # Nearly always it is the last thing; only else is it worth a search.
    if not data.endswith(b"\xff\xd9", scan) and data.find(b"\xff\xd9", scan) < 0:
        raise MediaError("the JPEG is truncated: it has no end marker")
    return size


_PNG_PICTURE = (b"IHDR", b"PLTE", b"IDAT")


def _whole_png(data: bytes) -> None:
    """Follow the chunks to IEND; those that make the picture have a checksum."""
    at, view = 8, memoryview(data)
    while at + 12 <= len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        name, end = data[at + 4 : at + 8], at + 8 + length
        if name == b"IEND":
            return
        said = int.from_bytes(data[end : end + 4], "big")
        if name in _PNG_PICTURE and end + 4 <= len(data) and zlib.crc32(view[at + 4 : end]) != said:
            raise MediaError(f"the PNG is damaged: its chunk {name.decode()} has another checksum")
        at = end + 4
    raise MediaError("the PNG is truncated: it has no end chunk")


def _whole_riff(data: bytes) -> None:
    """The length in the header must be there; a recorder that was cut off says zero or the maximum."""
    said = int.from_bytes(data[4:8], "big" if data[:4] == b"FORM" else "little")
    if said not in (0, 0xFFFFFFFF) and said + 8 > len(data) + 1:
        raise MediaError(f"the file is truncated: {len(data):,} bytes of {said + 8:,}")


def _whole_ogg(data: bytes) -> None:
    """The last page must be there, whole, and be marked as the end of its stream."""
    at = data.rfind(b"OggS")
    if at + 27 > len(data):
        raise MediaError("the Ogg file is truncated")
    segments = data[at + 26]
    size = 27 + segments + sum(data[at + 27 : at + 27 + segments])
    if at + size > len(data) or not data[at + 5] & 4:
        raise MediaError("the Ogg file is truncated: it has no end page")


def _whole_gif(data: bytes) -> None:
    """Follow the blocks to the trailer."""
    at = 13 + _color_table(data[10:11])
    while at < len(data):
        kind = data[at]
        if kind == 0x3B:
            return
        if kind == 0x21:
            at += 2
        elif kind == 0x2C:
            at += 11 + _color_table(data[at + 9 : at + 10])
        else:
            raise MediaError(f"the GIF is damaged at byte {at:,}")
        while at < len(data) and data[at]:
            at += 1 + data[at]
        at += 1
    raise MediaError("the GIF is truncated: it has no trailer")


def _color_table(flags: bytes) -> int:
    """Bytes of the colour table that the flags of a GIF announce."""
    return 3 << (flags[0] & 7) + 1 if flags and flags[0] & 0x80 else 0


def _whole_bmp(data: bytes) -> None:
    """Pixels must be there as many as the header says; compressed ones as many bytes as it says."""
    if len(data) < 54:
        raise MediaError("the BMP is truncated in its header")
    begin = int.from_bytes(data[10:14], "little")
    if int.from_bytes(data[14:18], "little") < 40:
        return
    width, height, _, bits, packed, size = struct.unpack("<iiHHII", data[18:38])
    needed = size if packed in (1, 2, 4, 5) else (abs(width) * bits + 31) // 32 * 4 * abs(height)
    if begin + needed > len(data):
        raise MediaError(f"the BMP is truncated: {len(data):,} bytes of {begin + needed:,}")


def _whole_tiff(data: bytes) -> None:
    """The strips or tiles of every page must lie inside the file."""
    with open_image(data) as image:
        try:
            for page in range(getattr(image, "n_frames", 1)):
                image.seek(page)
                for offsets, sizes in ((273, 279), (324, 325)):
                    places, lengths = image.tag_v2.get(offsets, ()), image.tag_v2.get(sizes, ())
                    end = max(map(sum, zip(places, lengths, strict=False)), default=0)
                    if end > len(data):
                        raise MediaError(f"the TIFF is truncated: {len(data):,} bytes of {end:,}")
        except MediaError:
            raise
        except Exception as error:  # Pillow raises seven kinds on bad files
            raise MediaError(f"the TIFF is damaged: {error}") from error


def _whole_wav(data: bytes) -> None:
    _whole_riff(data)
    _wav_info(data)


def _whole_mp4(data: bytes) -> None:
    """Follow the boxes; the last may say 0, to the end of the file."""
    at = 0
    while at + 8 <= len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        if size == 1:
            size = int.from_bytes(data[at + 8 : at + 16], "big")
        if size == 0:
            return
        if size < 8:
            raise MediaError("the file is damaged: a box of no size")
        at += size
    if at > len(data):
        raise MediaError(f"the file is truncated: {len(data):,} bytes of {at:,}")


def _whole_matroska(data: bytes) -> None:
    """The segment must be there as long as it says, where it says (a live recording does not)."""
    size, at = _ebml_number(data, 4)
    at += size
    if data[at : at + 4] != b"\x18\x53\x80\x67":
        return
    size, begin = _ebml_number(data, at + 4)
    if size >= 0 and begin + size > len(data):
        raise MediaError(f"the file is truncated: {len(data):,} bytes of {begin + size:,}")


def _whole_mp3(data: bytes) -> None:
    """The bytes that the first frame counts must be there, where an encoder wrote such a frame."""
    at = 0
    if data[:3] == b"ID3":
        at = 10 + sum((byte & 0x7F) << 7 * (3 - i) for i, byte in enumerate(data[6:10]))
    for name in (b"Xing", b"Info"):
        tag = data.find(name, at, at + 64)
        if tag < 0:
            continue
        flags = int.from_bytes(data[tag + 4 : tag + 8], "big")
        counted = tag + 8 + (4 if flags & 1 else 0)
        end = at + int.from_bytes(data[counted : counted + 4], "big")
        # A tag of 128 bytes at the end may have been taken off.
        if flags & 2 and end > len(data) + 128:
            raise MediaError(f"the file is truncated: {len(data):,} bytes of {end:,}")
        return


def _ebml_number(data: bytes, at: int) -> tuple[int, int]:
    """A variable-length number, and where it ends; -1 where it means unknown."""
    if at >= len(data) or not data[at]:
        raise MediaError("the file is damaged in its header")
    width = 9 - data[at].bit_length()
    value = int.from_bytes(data[at : at + width], "big") & ((1 << 7 * width) - 1)
    return (-1 if value == (1 << 7 * width) - 1 else value), at + width


_STRUCTURE: dict[str, Callable[[bytes], None]] = {
    "image/png": _whole_png,
    "image/gif": _whole_gif,
    "image/webp": _whole_riff,
    "image/bmp": _whole_bmp,
    "image/tiff": _whole_tiff,
    "image/avif": _whole_mp4,
    "image/heic": _whole_mp4,
    "audio/wav": _whole_wav,
    "audio/aiff": _whole_riff,
    "audio/ogg": _whole_ogg,
    "audio/mpeg": _whole_mp3,
    "audio/mp4": _whole_mp4,
    "video/avi": _whole_riff,
    "video/mp4": _whole_mp4,
    "video/ogg": _whole_ogg,
    "video/webm": _whole_matroska,
    "video/matroska": _whole_matroska,
}


def _decode_image(data: bytes) -> None:
    with open_image(data) as image:
        try:
            image.load()
        except MemoryError:
            raise
        except Exception as error:  # as above
            raise MediaError(f"the image cannot be decoded: {error}") from error


def _decode_audio(data: bytes) -> None:
    _decode_av(data, "audio")


def _decode_video(data: bytes) -> None:
    _decode_av(data, "video")


def _decode_av(data: bytes, kind: str) -> None:
    with open_av(data, kind) as container:
        try:
            frames = sum(1 for _ in container.decode(**{kind: 0}))
        except Exception as error:  # PyAV has a class for each error of FFmpeg
            raise MediaError(f"the {kind} cannot be decoded: {error}") from error
    if not frames:
        raise MediaError(f"the {kind} has no frames")


_DECODE: dict[str, Callable[[bytes], None]] = {
    "image": _decode_image,
    "audio": _decode_audio,
    "video": _decode_video,
}


def _open_media(data: bytes, kind: str) -> None:
    """Open audio or video with FFmpeg where it is installed, to see that there is a stream of that kind."""
    try:
        import av  # noqa: F401
    except ImportError:
        return
    with open_av(data, kind):
        pass


def open_av(data: bytes, kind: str) -> Any:
    try:
        import av
    except ImportError as error:
        raise MediaError("audio and video need the media extra: pip install 'datasync[media]'") from error
    try:
        container = av.open(io.BytesIO(data), mode="r", metadata_errors="replace")
    except Exception as error:  # PyAV has a class for each error of FFmpeg
        raise MediaError(
            f"the {kind} cannot be opened: {getattr(error, 'strerror', None) or error}"
        ) from error
    if not getattr(container.streams, kind):
        container.close()
        raise MediaError(f"the file has no {kind} stream")
    return container


def image_info(data: bytes) -> dict[str, Any]:
    """``width``, ``height``, ``format`` (as Pillow names it) and ``mode``."""
    with open_image(data) as image:
        return {"width": image.size[0], "height": image.size[1], "format": image.format, "mode": image.mode}


def audio_info(data: bytes) -> dict[str, Any]:
    """``sample_rate`` in Hz, ``channels``, ``duration`` in seconds, ``format``."""
    found = _wav_info(data) if sniff(data) == "audio/wav" else None
    if found is not None:
        return found
    with open_av(data, "audio") as container:
        stream = container.streams.audio[0]
        return {
            "sample_rate": int(stream.rate or 0),
            "channels": int(stream.channels or 0),
            "duration": _duration(container, stream),
            "format": sniff(data).partition("/")[2] or str(container.format.name),
        }


def _wav_info(data: bytes) -> dict[str, Any] | None:
    """Read a RIFF WAVE header; None for what it leaves to FFmpeg."""
    at, rate, channels, byte_rate = 12, 0, 0, 0
    while at + 8 <= len(data):
        name, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        if name == b"fmt " and at + 24 <= len(data):
            channels, rate, byte_rate = struct.unpack("<HII", data[at + 10 : at + 20])
        elif name == b"data":
            if not rate:
                raise MediaError("the WAV has no format before its samples")
            if not byte_rate:
                return None
            held = min(size, len(data) - at - 8)
            return {"sample_rate": rate, "channels": channels, "duration": held / byte_rate, "format": "wav"}
        at += 8 + size + (size & 1)
    raise MediaError("the WAV has no samples")


def video_info(data: bytes) -> dict[str, Any]:
    """``width``, ``height``, ``fps``, ``duration`` in seconds, ``codec``."""
    with open_av(data, "video") as container:
        stream = container.streams.video[0]
        return {
            "width": int(stream.codec_context.width),
            "height": int(stream.codec_context.height),
            "fps": float(stream.average_rate or 0),
            "duration": _duration(container, stream),
            "codec": str(stream.codec_context.name),
        }


def _duration(container: Any, stream: Any) -> float:
    if stream.duration is not None and stream.time_base is not None:
        return float(stream.duration * stream.time_base)
    return float(container.duration or 0) / 1e6


INFO: dict[str, Callable[[bytes], dict[str, Any]]] = {
    "image": image_info,
    "audio": audio_info,
    "video": video_info,
}

INFO_COLUMNS: dict[str, dict[str, str]] = {
    # facts of each kind, and the encodings of their columns
    "image": {"width": "int32", "height": "int32", "format": "str", "mode": "str"},
    "audio": {"sample_rate": "int32", "channels": "int32", "duration": "float64", "format": "str"},
    "video": {"width": "int32", "height": "int32", "fps": "float64", "duration": "float64", "codec": "str"},
}
