"""Clips: a time range of an audio or video file, the same as that part of the whole.

Audio goes through libsndfile where that reads the format and through FFmpeg (PyAV) otherwise; video through
FFmpeg. Frame t belongs to a range if start <= t < stop, in seconds from the beginning of the stream. A range
may end behind the end of the file and then ends there; one without any frame is an error. Both libraries come
with the extra `media`.

FFmpeg is asked for a place before the range and may find one behind it, as in an MPEG transport stream,
which has no index. So decoding begins at a key frame that is seen to lie before the range; if there is none,
the place is asked for further ahead, and at last the file is read from its beginning. Sound that FFmpeg
decodes is always read from there, and counted: what comes out of a packet depends on those before, with AAC
and AC-3 on all of them, and times are too coarse in many containers.

What a file may expand to is bounded by `MOST_BYTES` for each clip (invariant 10): a few kilobytes of video
can say that they are a year long.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from importlib import import_module
from typing import Any

import numpy as np

from datasync.errors import UsageError
from shards.media import MediaError, check_pixels, check_whole

MOST_BYTES = 2 << 30
_INSTANT = 1e-6  # seconds that times may differ in by their arithmetic
_STEPS_BACK = (0.0, 1.0, 4.0, 16.0, 64.0)  # seconds before a range, until a key frame is found there
_TIMES_OF_DECODING = ("avi", "asf")  # containers that do not say when a frame is shown, only their sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """A decoded time range.

    Args:
        values (np.ndarray | torch.Tensor): Audio: float32 (channels, frames), from -1 to 1. Video: uint8
            (frames, height, width, 3), as a tensor (frames, 3, height, width).
        rate (float): Frames a second; of a video, on average.
        times (np.ndarray): float64, seconds from the beginning of the stream. Audio: of the first frame,
            (1,). Video: of each frame, (frames,).
    """

    values: Any
    rate: float
    times: np.ndarray[Any, np.dtype[np.float64]]


def decode_audio(data: bytes, *, start: float = 0.0, stop: float | None = None) -> Clip:
    """A time range of an audio file, or of the sound of a video file.

    Args:
        data (bytes): The file.
        start (float): Seconds. Default: ``0``.
        stop (float | None): Seconds; None for the end. Default: ``None``.

    Raises:
        MediaError: It is no audio, or damaged, or the clip would be too large, or without any frame.
        UsageError: The range cannot be.
    """
    check_span(start, stop)
    check_whole(data)
    soundfile = _module("soundfile")
    try:
        file = soundfile.SoundFile(io.BytesIO(data))
    except soundfile.LibsndfileError:
        return _audio_by_av(data, start, stop)
    with file:
        rate = file.samplerate
        first = min(round(start * rate), file.frames)
        last = file.frames if stop is None else min(round(stop * rate), file.frames)
        if first >= last:
            raise _no_frame("audio", start, stop, file.frames / rate)
        _check_bytes((last - first) * file.channels * 4)
        try:
            _skip(file, first)
            values = file.read(last - first, dtype="float32", always_2d=True)
        except soundfile.LibsndfileError as error:
            raise MediaError(f"the audio is damaged: {error}") from error
    if len(values) < last - first and not file.subtype.startswith("MPEG"):  # which only estimates its length
        raise MediaError(f"the audio is truncated: it ends {last - first - len(values):,} samples early")
    return Clip(
        values=np.ascontiguousarray(values.T), rate=float(rate), times=np.array([first / rate], np.float64)
    )


def _skip(file: Any, frames: int) -> None:
    """Go on to a frame of a file that was just opened; codes like GSM can only be read from the beginning."""
    if file.seekable():
        file.seek(frames)
    else:
        while frames and (found := len(file.read(min(frames, 1 << 16), dtype="float32"))):
            frames -= found


def decode_video(data: bytes, *, start: float = 0.0, stop: float | None = None, every: int = 1) -> Clip:
    """A time range of a video file.

    Args:
        data (bytes): The file.
        start (float): Seconds. Default: ``0``.
        stop (float | None): Seconds; None for the end. Default: ``None``.
        every (int): Keep one frame of so many. Default: ``1``.

    Raises:
        MediaError: It is no video, or damaged, or the clip would be too large, or without any frame.
        UsageError: The range cannot be.
    """
    check_span(start, stop)
    check_whole(data)
    frames: list[np.ndarray[Any, np.dtype[np.uint8]]] = []
    times: list[float] = []
    with _opened(data, "video") as (container, stream):
        check_pixels(stream.codec_context.width, stream.codec_context.height)
        rate = float(stream.average_rate or 0)
        seconds = _seconds(container)
        seen = size = 0
        for time, frame in _frames(data, container, stream, start):
            if stop is not None and time >= stop - _INSTANT:
                break
            if time < start - _INSTANT:
                continue
            if seen % every == 0:
                array = frame.to_ndarray(format="rgb24")
                size += array.nbytes
                _check_bytes(size)
                frames.append(array)
                times.append(time)
            seen += 1
    if not frames:
        raise _no_frame("video", start, stop, seconds)
    return Clip(values=np.stack(frames), rate=rate, times=np.array(times, np.float64))


def _audio_by_av(data: bytes, start: float, stop: float | None) -> Clip:
    av = _module("av")
    pieces: list[np.ndarray[Any, np.dtype[np.float32]]] = []
    with _opened(data, "audio") as (container, stream):
        rate = int(stream.codec_context.sample_rate)
        seconds = _seconds(container)
        first, last = round(start * rate), None if stop is None else round(stop * rate)
        resampler = av.AudioResampler(format="fltp", rate=rate)
        place = size = 0  # place: samples from the beginning
        for frame in container.decode(stream):
            begin, place = place, place + frame.samples
            if place <= first:
                continue
            for part in resampler.resample(frame):
                values = part.to_ndarray()[:, max(first - begin, 0) : None if last is None else last - begin]
                size += values.nbytes
                _check_bytes(size)
                pieces.append(values)
            if last is not None and place >= last:
                break
    if not pieces:
        raise _no_frame("audio", start, stop, seconds)
    return Clip(
        values=np.ascontiguousarray(np.concatenate(pieces, axis=1)),
        rate=float(rate),
        times=np.array([first / rate], np.float64),
    )


def check_span(start: float, stop: float | None) -> None:
    """Refuse a range of seconds that cannot be.

    Raises:
        UsageError: It begins before 0, does not go forwards, or is not made of finite numbers.
    """
    numbers = (start,) if stop is None else (start, stop)
    good = all(isinstance(n, int | float | np.number) and math.isfinite(n) for n in numbers)
    if not good or start < 0 or (stop is not None and stop <= start):
        raise UsageError(
            f"no clip from {start} to {stop} seconds", mend="from 0 on, and forwards; None is the end"
        )


@contextlib.contextmanager
def _opened(data: bytes, kind: str) -> Iterator[tuple[Any, Any]]:
    """The container and its first stream of a kind; every failure of FFmpeg in the block is a MediaError."""
    av = _module("av")
    try:
        with av.open(io.BytesIO(data), metadata_errors="ignore") as container:
            streams = getattr(container.streams, kind)
            if not streams:
                raise MediaError(f"the file has no {kind}")
            if streams[0].codec_context is None:
                raise MediaError(f"the {kind} is in a code that FFmpeg does not know")
            yield container, streams[0]
    except (MediaError, MemoryError, UsageError):
        raise
    except (av.FFmpegError, ValueError, OSError, EOFError) as error:
        raise MediaError(f"the {kind} cannot be decoded: {error}") from error


def _frames(data: bytes, container: Any, stream: Any, start: float) -> Iterator[tuple[float, Any]]:
    """Frames with their time in seconds from the beginning of the stream, from before `start` on."""
    origin = stream.start_time or 0
    format_ = container.format
    untimed = format_.name in _TIMES_OF_DECODING
    untimed = untimed or format_.flags & _module("av").format.Flags.no_timestamps.value != 0
    if untimed and stream.codec_context.has_b_frames and stream.average_rate:
        for number, frame in enumerate(container.decode(stream)):
            yield float(number / stream.average_rate), frame
        return
    for packet in _packets(data, container, stream, start):
        for frame in packet.decode():
            if frame.pts is None:
                raise MediaError("the file has frames without a time")
            yield _exact((frame.pts - origin) * stream.time_base, stream), frame


def _exact(time: Fraction, stream: Any) -> float:
    """A time that a container has rounded, as Matroska to milliseconds, is that of the frame rate again."""
    if stream.average_rate:
        told = round(time * stream.average_rate) / stream.average_rate
        if abs(told - time) <= stream.time_base / 2:
            time = told
    return float(time)


def _packets(data: bytes, container: Any, stream: Any, start: float) -> Iterator[Any]:
    """Packets from a key frame on that is shown before `start`, or from the beginning."""
    origin = stream.start_time or 0
    for back in _STEPS_BACK:
        wanted = start - back
        if wanted <= 0 or container.format.name == "mpeg":  # which tells few times; others are counted on
            break
        try:
            container.seek(origin + int(wanted / stream.time_base), stream=stream)
        except _module("av").FFmpegError:
            break
        packets = container.demux(stream)
        key = next((packet for packet in packets if packet.is_keyframe), None)
        if key is not None and key.pts is not None and (key.pts - origin) * stream.time_base <= start:
            yield key
            yield from packets
            return
    with _opened(data, "video") as (container, stream):
        yield from container.demux(stream)


def _seconds(container: Any) -> float | None:
    """How long a file says that it is."""
    return None if container.duration is None else container.duration / 1e6


def _no_frame(kind: str, start: float, stop: float | None, seconds: float | None) -> MediaError:
    range_ = f"from {start:g} s on" if stop is None else f"from {start:g} s to {stop:g} s"
    length = "" if seconds is None else f": it is {seconds:g} s long"
    return MediaError(f"the {kind} has no frame {range_}{length}")


def _check_bytes(size: int) -> None:
    if size > MOST_BYTES:
        raise MediaError(f"the clip is larger than {MOST_BYTES:,} bytes; ask for a shorter range")


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise UsageError(
            f"decoding audio and video needs {name}", mend="pip install 'datasync[media]'"
        ) from error
