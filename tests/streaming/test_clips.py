"""A clip of any span is the same part of the whole, whatever container and codec; half a file is an error."""

from __future__ import annotations

import functools
import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datasync.errors import UsageError
from datasync.streaming.clips import Clip, decode_audio, decode_video
from datasync.streaming.decode import Audio, Video
from shards.media import MediaError

av = pytest.importorskip("av")
soundfile = pytest.importorskip("soundfile")

SECONDS, FPS, FRAMES = 4, 10, 40

# As FFmpeg writes them; what a build lacks is skipped. `wav` and the like show codes that libsndfile lacks.
SOUND = [
    *((box, "aac", 44_100) for box in ("mp4", "matroska", "adts", "mpegts", "avi", "flv", "nut")),
    *((box, "libopus", 48_000) for box in ("mp4", "matroska", "webm", "mpegts", "ogg", "nut")),
    *((box, "libmp3lame", 44_100) for box in ("mp4", "matroska", "mpegts", "avi", "asf")),
    *((box, "ac3", 48_000) for box in ("mp4", "matroska", "mpegts", "ac3", "wav")),
    *((box, "flac", 44_100) for box in ("mp4", "matroska", "flac", "ogg")),
    *((box, "pcm_s16le", 16_000) for box in ("mov", "matroska", "avi", "wav", "asf")),
    *((box, "mp2", 44_100) for box in ("mpegts", "mpeg", "mov")),
    ("mov", "adpcm_ima_qt", 44_100),
    ("wav", "adpcm_yamaha", 44_100),
    ("wav", "adpcm_ms", 44_100),
    ("matroska", "alac", 44_100),
    ("tta", "tta", 44_100),
    ("wv", "wavpack", 44_100),
    ("au", "g722", 16_000),
]
FILES = [
    ("WAV", "PCM_16"),
    ("WAV", "FLOAT"),
    ("WAV", "IMA_ADPCM"),
    ("WAV", "GSM610"),
    ("FLAC", "PCM_24"),
    ("OGG", "VORBIS"),
    ("OGG", "OPUS"),
    ("MP3", "MPEG_LAYER_III"),
    ("AIFF", "PCM_16"),
    ("AU", "G721_32"),
    ("CAF", "ALAC_16"),
    ("W64", "PCM_16"),
    ("RF64", "PCM_16"),
]
PICTURES = [
    *((box, "libx264") for box in ("mp4", "mov", "matroska", "mpegts", "avi", "asf", "flv", "nut", "h264")),
    *((box, "libx265") for box in ("mp4", "matroska", "mpegts")),
    *((box, "mpeg4") for box in ("mp4", "avi", "mpegts", "mpeg")),
    *((box, "mpeg2video") for box in ("mpegts", "mpeg", "vob", "avi", "asf", "matroska", "mpeg2video")),
    ("webm", "libvpx-vp9"),
    ("matroska", "ffv1"),
    ("flv", "flv"),
    ("swf", "flv"),
    ("gif", "gif"),
    ("apng", "apng"),
]

spans = st.tuples(
    st.floats(0, SECONDS * 0.95), st.one_of(st.none(), st.floats(0.001, SECONDS), st.just(5 / FPS))
).map(lambda pair: (pair[0], None if pair[1] is None else pair[0] + pair[1]))


def noise(rate: int) -> np.ndarray:
    """A tone that rises, and noise, which some codecs keep only by its loudness and make up anew."""
    seconds = np.arange(rate * SECONDS) / rate
    tone = 0.3 * np.sin(2 * np.pi * 440 * seconds * (1 + seconds / 20))
    return (tone + 0.05 * np.random.default_rng(1).standard_normal(len(seconds))).astype(np.float32)


@functools.cache
def sound(box: str, codec: str, rate: int) -> bytes:
    if codec not in av.codecs_available:
        pytest.skip(f"this FFmpeg has no {codec}")
    file = io.BytesIO()
    with av.open(file, "w", format=box) as out:
        stream = out.add_stream(codec, rate=rate)
        context = stream.codec_context
        names = [form.name for form in context.codec.audio_formats or ()]
        context.format = "fltp" if "fltp" in names or not names else names[0]
        stream.layout = "mono"
        context.open(strict=False)
        fitting = av.AudioResampler(
            format=context.format, layout="mono", rate=rate, frame_size=context.frame_size or 1024
        )
        frame = av.AudioFrame.from_ndarray(noise(rate)[None], format="fltp", layout="mono")
        frame.sample_rate, frame.pts = rate, 0
        for part in fitting.resample(frame) + fitting.resample(None):
            out.mux(stream.encode(part))
        out.mux(stream.encode())
    return file.getvalue()


@functools.cache
def sound_file(kind: str, subtype: str | None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, noise(48_000), 48_000, format=kind, subtype=subtype)
    return file.getvalue()


@functools.cache
def pictures(box: str, codec: str, fps: int = FPS) -> bytes:
    """Forty frames that differ, in groups of twelve."""
    if codec not in av.codecs_available:
        pytest.skip(f"this FFmpeg has no {codec}")
    file = io.BytesIO()
    scene = np.random.default_rng(1).integers(0, 255, (48, 264, 3), np.uint8)
    with av.open(file, "w", format=box) as out:
        stream = out.add_stream(codec, rate=fps)
        stream.width, stream.height = 64, 48
        formats = [form.name for form in stream.codec_context.codec.video_formats or ()]
        stream.pix_fmt = "yuv420p" if "yuv420p" in formats or not formats else formats[0]
        stream.codec_context.gop_size = 12
        if codec == "libx265":
            stream.codec_context.options = {"x265-params": "log-level=none"}
        for i in range(FRAMES):
            picture = np.ascontiguousarray(scene[:, i * 3 : i * 3 + 64])
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format=stream.pix_fmt)
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return file.getvalue()


@functools.cache
def whole(decode, data: bytes) -> Clip:
    return decode(data)


def same_sound(data: bytes, span: tuple[float, float | None], *, within: float = 0.0) -> None:
    full = whole(decode_audio, data)
    first = round(span[0] * full.rate)
    last = full.values.shape[1] if span[1] is None else round(span[1] * full.rate)
    expected = full.values[:, first:last]
    if not expected.shape[1]:
        with pytest.raises(MediaError, match="has no frame"):
            decode_audio(data, start=span[0], stop=span[1])
        return
    clip = decode_audio(data, start=span[0], stop=span[1])
    assert clip.values.shape == expected.shape
    assert np.abs(clip.values - expected).max() <= within
    assert clip.times.tolist() == [first / full.rate]


@pytest.mark.parametrize(("box", "codec", "rate"), SOUND)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(span=spans)
def test_a_clip_of_sound_is_the_same_part_of_the_whole(box: str, codec: str, rate: int, span) -> None:
    same_sound(sound(box, codec, rate), span)


@pytest.mark.parametrize(("kind", "subtype"), FILES)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(span=spans)
def test_a_clip_of_a_sound_file_is_the_same_part_of_the_whole(kind: str, subtype: str, span) -> None:
    # After a seek libmpg123 and libopus round the last bit otherwise.
    same_sound(sound_file(kind, subtype), span, within=2e-7 if subtype in ("MPEG_LAYER_III", "OPUS") else 0.0)


@pytest.mark.parametrize(("box", "codec"), PICTURES)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(span=spans)
def test_a_clip_of_video_has_the_frames_of_the_whole(box: str, codec: str, span) -> None:
    data = pictures(box, codec)
    full = whole(decode_video, data)
    assert len(full.times) == FRAMES
    assert (np.diff(full.times) > 0).all()
    here = full.times >= span[0] - 1e-6
    if span[1] is not None:
        here &= full.times < span[1] - 1e-6
    if not here.any():
        with pytest.raises(MediaError, match="has no frame"):
            decode_video(data, start=span[0], stop=span[1])
        return
    clip = decode_video(data, start=span[0], stop=span[1])
    assert np.array_equal(clip.times, full.times[here])
    assert np.array_equal(clip.values, full.values[here])


@pytest.mark.parametrize(("box", "codec"), [("matroska", "libx264"), ("webm", "libvpx-vp9"), ("flv", "flv")])
def test_clips_of_one_length_have_equally_many_frames_where_times_are_rounded(box: str, codec: str) -> None:
    data = pictures(box, codec, 30)
    for first in range(0, 35):
        clip = decode_video(data, start=first / 30, stop=(first + 5) / 30)
        assert clip.times.tolist() == [frame / 30 for frame in range(first, first + 5)]


@pytest.mark.parametrize("part", [0.5, 0.9])
@pytest.mark.parametrize(
    ("kind", "subtype"),
    [
        ("WAV", "PCM_16"),
        ("OGG", "OPUS"),
        ("OGG", "VORBIS"),
        ("FLAC", "PCM_24"),
        ("MP3", None),
        ("AIFF", "PCM_16"),
    ],
)
def test_a_sound_file_that_was_cut_off_is_an_error(kind: str, subtype: str | None, part: float) -> None:
    data = sound_file(kind, subtype)
    with pytest.raises(MediaError):
        decode_audio(data[: int(len(data) * part)])


@pytest.mark.parametrize("part", [0.5, 0.9])
@pytest.mark.parametrize(("box", "codec"), [("mp4", "libx264"), ("matroska", "libx264"), ("avi", "mpeg4")])
def test_a_video_that_was_cut_off_is_an_error(box: str, codec: str, part: float) -> None:
    data = pictures(box, codec)
    with pytest.raises(MediaError, match="truncated"):
        decode_video(data[: int(len(data) * part)])


def test_a_video_in_a_code_that_is_unknown_is_an_error() -> None:
    with pytest.raises(MediaError, match="does not know"):
        decode_video(pictures("mpeg", "gif"))


@pytest.mark.parametrize(
    "span",
    [(float("nan"), 1), (0, float("inf")), (None, 1), (1, 1), (2, 1), (-1, 1), (0,), None, 1.0, ("a", "b")],
)
@pytest.mark.parametrize("kind", [Audio, Video])
def test_a_span_that_cannot_be_is_refused(kind, span) -> None:
    with pytest.raises(UsageError, match=r"no clip|no range"):
        kind(span=span)
