"""Clips: a time range of an audio or video file, decoded without decoding the rest.

Audio goes through libsndfile where that reads the format and through FFmpeg (PyAV) otherwise; video through
FFmpeg, from the last key frame before the range. Frame t belongs to a range if start <= t < stop, in seconds
from the beginning of the stream. A range may end behind the end of the file and then ends there; one without
any frame is an error. Both libraries come with the extra `media`.

What a file may expand to is bounded by `MOST_BYTES` for each clip (invariant 10): a few kilobytes of video
can say that they are a year long.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from datasync.errors import UsageError
from shards.media import MediaError, check_pixels

MOST_BYTES = 2 << 30


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
            file.seek(first)
            values = file.read(last - first, dtype="float32", always_2d=True)
        except soundfile.LibsndfileError as error:
            raise MediaError(f"the audio is damaged: {error}") from error
    return Clip(
        values=np.ascontiguousarray(values.T), rate=float(rate), times=np.array([first / rate], np.float64)
    )


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
    frames: list[np.ndarray[Any, np.dtype[np.uint8]]] = []
    times: list[float] = []
    with _opened(data, "video") as (container, stream):
        check_pixels(stream.codec_context.width, stream.codec_context.height)
        rate = float(stream.average_rate or 0)
        seconds = _seconds(container)
        seen = size = 0
        for time, frame in _frames(container, stream, start):
            if stop is not None and time >= stop:
                break
            if time < start - 1e-6:
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
    first: float | None = None
    with _opened(data, "audio") as (container, stream):
        rate = int(stream.codec_context.sample_rate)
        seconds = _seconds(container)
        resampler = av.AudioResampler(format="fltp", rate=rate)
        size = 0
        for time, frame in _frames(container, stream, start):
            if stop is not None and time >= stop:
                break
            for part in resampler.resample(frame):
                values = part.to_ndarray()
                skip = max(round((start - time) * rate), 0)
                end = values.shape[1] if stop is None else min(round((stop - time) * rate), values.shape[1])
                if skip >= end:
                    continue
                if first is None:
                    first = time + skip / rate
                size += values.nbytes
                _check_bytes(size)
                pieces.append(values[:, skip:end])
    if first is None:
        raise _no_frame("audio", start, stop, seconds)
    return Clip(
        values=np.ascontiguousarray(np.concatenate(pieces, axis=1)),
        rate=float(rate),
        times=np.array([first], np.float64),
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
            yield container, streams[0]
    except (MediaError, MemoryError, UsageError):
        raise
    except (av.FFmpegError, ValueError, OSError, EOFError) as error:
        raise MediaError(f"the {kind} cannot be decoded: {error}") from error


def _frames(container: Any, stream: Any, start: float) -> Iterator[tuple[float, Any]]:
    """Frames with their time in seconds from the beginning of the stream, from before `start` on."""
    origin = stream.start_time or 0
    if start > 0:
        # A stream that cannot seek is read from its start.
        with contextlib.suppress(_module("av").FFmpegError):
            container.seek(origin + int(start / stream.time_base), stream=stream)
    for frame in container.decode(stream):
        if frame.pts is None:
            raise MediaError("the file has frames without a time")
        yield float((frame.pts - origin) * stream.time_base), frame


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
