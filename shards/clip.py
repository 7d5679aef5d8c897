"""A piece of a video, as a file of its own, without decoding or encoding a frame.

The compressed frames go over as they are, so the piece must begin at one that needs no other (a key frame):
where recordings were joined end to end, each still does.
"""

from __future__ import annotations

import io
from typing import Any, BinaryIO

from shards.media import MediaError


def cut(source: BinaryIO, begin: float, end: float) -> tuple[bytes, int]:
    """The frames shown from `begin` to `end`, in seconds, as an MP4 that begins at 0, and how many they are.

    Raises:
        MediaError: There are none, the first is no key frame, or the video cannot be read.
    """
    import av

    sink = io.BytesIO()
    try:
        with (
            av.open(source, mode="r", metadata_errors="replace") as container,
            av.open(sink, "w", format="mp4", options={"fflags": "+bitexact"}) as made,
        ):
            if not container.streams.video:
                raise MediaError("the file has no video stream")
            frames = _copy(container, made, begin, end)
    except MediaError:
        raise
    except Exception as error:  # PyAV has a class for each error of FFmpeg
        raise MediaError(f"the video cannot be cut: {getattr(error, 'strerror', None) or error}") from error
    return sink.getvalue(), frames


def _copy(container: Any, made: Any, begin: float, end: float) -> int:
    stream = container.streams.video[0]
    base = float(stream.time_base)
    half = 0.5 / float(stream.average_rate or 30)  # times are rounded, by less than half a frame
    copy = made.add_stream_from_template(stream)
    container.seek(max(round((begin - half) / base), 0) + 1, stream=stream)
    frames, first = 0, None
    for packet in container.demux(stream):
        if packet.pts is None:
            continue  # the mark of the end
        at = packet.pts * base
        if at < begin - half:
            continue
        if at >= end - half:
            if packet.is_keyframe:
                break
            continue
        if first is None:
            if not packet.is_keyframe:
                raise MediaError(f"there is no key frame at {begin:.3f} s, where the piece begins")
            first = packet.pts
        packet.pts -= first
        packet.dts = packet.dts - first if packet.dts is not None else None
        packet.stream = copy
        made.mux(packet)
        frames += 1
    if not frames:
        raise MediaError(f"the video has no frame from {begin:.3f} to {end:.3f} s")
    return frames
