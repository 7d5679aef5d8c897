"""Decoding of media columns: real files, real damage, threads."""

from __future__ import annotations

import io
import multiprocessing
import pickle
import threading
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch

from datasync.errors import FormatError, UsageError
from datasync.streaming import images
from datasync.streaming.clips import decode_audio, decode_video
from datasync.streaming.decode import Audio, Decoder, Image, Video, decode_image, pin
from datasync.streaming.stats import Stats
from shards.media import MediaError


def jpeg(width: int = 40, height: int = 30, mode: str = "RGB") -> bytes:
    out = io.BytesIO()
    x = np.linspace(0, 255, width * height * 3).reshape(height, width, 3).astype(np.uint8)
    PIL.Image.fromarray(x).convert(mode).save(out, "JPEG")
    return out.getvalue()


@pytest.fixture
def photo(corpora: Path) -> bytes:
    return (corpora / "images/skimage/rocket.jpg").read_bytes()


def test_a_photograph_is_the_same_in_every_form(photo: bytes) -> None:
    image = decode_image(photo, to="pil")
    array = decode_image(photo, to="numpy")
    tensor = decode_image(photo, to="tensor")
    height, width = 427, 640
    assert image.size == (width, height)
    assert array.shape == (height, width, 3)
    assert tensor.shape == (3, height, width)
    assert tensor.dtype == torch.uint8
    assert (np.array(image) == array).all()
    # Two builds of libjpeg-turbo may round a value up or down.
    assert np.abs(tensor.permute(1, 2, 0).numpy().astype(int) - array).max() <= 2


def test_an_image_that_pillow_opened_and_did_not_decode_is_as_good_as_its_bytes(photo: bytes) -> None:
    lazy = PIL.Image.open(io.BytesIO(photo))
    assert (decode_image(lazy, to="tensor") == decode_image(photo, to="tensor")).all()
    drawn = PIL.Image.open(io.BytesIO(photo))
    drawn.load()
    drawn.paste((255, 0, 0), (0, 0, 10, 10))
    assert decode_image(drawn, to="tensor")[:, 0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize(
    "name", ["cmyk_pytorch.jpg", "gray_pytorch.jpg", "palette_pytorch.png", "rgb_pytorch16.png"]
)
@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1), ("RGBA", 4)])
def test_every_pixel_mode_becomes_the_one_that_was_asked_for(
    corpora: Path, name: str, mode: str, channels: int
) -> None:
    data = (corpora / "images/torchvision_modes" / name).read_bytes()
    assert decode_image(data, to="tensor", mode=mode).shape[0] == channels
    assert decode_image(data, to="pil", mode=mode).mode == mode


def test_a_batch_keeps_its_order_and_its_other_columns() -> None:
    samples = [{"image": jpeg(width=10 + i), "label": i} for i in range(40)]
    for threads in (1, 2, 5):
        decoded = Decoder({"image": "tensor"}, threads=threads)(samples)
        assert [(s["image"].shape[2], s["label"]) for s in decoded] == [(10 + i, i) for i in range(40)]
    assert isinstance(samples[0]["image"], bytes)
    assert Decoder({"image": "tensor"})([]) == []


def test_several_threads_take_part() -> None:
    seen = set()
    barrier = threading.Barrier(2, timeout=20)

    def transform(sample: dict) -> dict:
        seen.add(threading.get_ident())
        if len(seen) < 2 or sample["label"] < 2:
            barrier.wait()
        return sample

    Decoder({"image": "pil"}, threads=2, transform=transform)(
        [{"image": jpeg(), "label": i} for i in range(2)]
    )
    assert len(seen) == 2


def test_transform_and_collate_are_applied_in_turn() -> None:
    decoder = Decoder(
        {"image": Image(to="numpy", mode="L")},
        transform=lambda sample: sample["image"].mean(),
        collate=lambda values: np.array(values),
    )
    batch = decoder([{"image": jpeg()}] * 3)
    assert batch.shape == (3,)


@pytest.mark.parametrize("missing", [(), ("simplejpeg",), ("simplejpeg", "torchvision")])
def test_a_stacked_batch_is_its_images_whoever_decodes_them(corpora: Path, monkeypatch, missing) -> None:
    names = ["rgb_pytorch.jpg", "gray_pytorch.jpg", "cmyk_pytorch.jpg", "palette_pytorch.png"]
    files = [(corpora / "images/torchvision_modes" / name).read_bytes() for name in names]
    monkeypatch.setattr(images, "_has", lambda module: module not in missing)
    for mode, channels in (("RGB", 3), ("L", 1), ("RGBA", 4)):
        expected = torch.stack(
            [decode_image(PIL.Image.open(io.BytesIO(data)).copy(), mode=mode) for data in files]
        )
        samples = [{"image": memoryview(data), "label": i} for i, data in enumerate(files)]
        decoder = Decoder({"image": Image(mode=mode)}, threads=3, stack=True)
        for batch in (decoder(samples), *decoder.batches([samples])):
            assert batch["image"].shape == (4, channels, *expected.shape[2:])
            difference = (batch["image"].float() - expected.float()).abs()
            # Grey is taken from the JPEG, or made of colours that had to be cut off.
            assert difference.mean() < 1 if mode == "L" else difference.max() <= 2
            assert batch["label"].tolist() == [0, 1, 2, 3]
        flat = Decoder({"image": Image(to="numpy", mode=mode)}, stack=True)(samples)["image"]
        assert (flat == decoder(samples)["image"].movedim(1, -1).squeeze(-1).numpy()).all()
        decoder.close()


def test_a_stacked_batch_keeps_its_memory_until_nobody_looks_at_it() -> None:
    files = [{"image": jpeg(mode="RGB")}, {"image": jpeg(mode="L")}]
    decoder = Decoder({"image": "tensor"}, stack=True)
    first = decoder(files[:1])["image"]
    view, values = first[0, :, 3], first[0, :, 3].clone()
    place = first.data_ptr()
    del first
    for _ in range(8):  # none of these may be written where the view looks
        decoder(files[1:])
    assert (view == values).all()
    del view
    assert place in [decoder(files[1:])["image"].data_ptr() for _ in range(8)]


def test_images_of_two_sizes_are_stacked_after_a_transform_only() -> None:
    samples = [{"image": jpeg(width=40)}, {"image": jpeg(width=50)}]
    with pytest.raises(UsageError, match=r"50 × 30 pixels cannot be stacked with one of 40 × 30"):
        Decoder({"image": "tensor"}, stack=True)(samples)

    def crop(sample: dict) -> dict:
        return {"image": sample["image"][:, :20, :20], "name": "x"}

    batch = Decoder({"image": "tensor"}, stack=True, transform=crop)(samples)
    assert batch["image"].shape == (2, 3, 20, 20)
    assert batch["name"] == ["x", "x"]
    with pytest.raises(UsageError, match="both `stack` and `collate`"):
        Decoder({"image": "tensor"}, stack=True, collate=list)


def test_batches_are_decoded_ahead_and_an_error_waits_for_its_turn() -> None:
    begun: list[int] = []

    def source():
        for i in range(6):
            begun.append(i)
            yield [{"image": b"no image" if i == 3 else jpeg(width=10 + i)}]

    decoded = Decoder({"image": "numpy"}, threads=2).batches(source())
    assert next(decoded)[0]["image"].shape == (30, 10, 3)
    assert begun == [0]  # the first one does not wait for others
    assert next(decoded)[0]["image"].shape == (30, 11, 3)
    assert next(decoded)[0]["image"].shape == (30, 12, 3)
    assert begun == [0, 1, 2, 3, 4]
    with pytest.raises(FormatError, match="'image' of sample 0"):
        next(decoded)


def test_a_damaged_image_names_its_column_and_place() -> None:
    good = jpeg()
    for bad in (b"", b"no image", good[:60], b"\xff\xd8" + b"\0" * 100):
        with pytest.raises(FormatError, match=r"'image' of sample 2 "):
            Decoder({"image": "tensor"})([{"image": good}, {"image": good}, {"image": bad}])


def test_a_missing_column_and_a_wrong_form_are_refused() -> None:
    with pytest.raises(UsageError, match="no column 'picture'"):
        Decoder({"picture": "tensor"})([{"image": jpeg()}])
    for make in (lambda: Image(to="array"), lambda: Image(mode="XYZ"), lambda: Audio(to="pil")):
        with pytest.raises(UsageError):
            make()
    for make in (lambda: Audio(span=(2.0, 1.0)), lambda: Video(every=0), lambda: Decoder({}, threads=0)):
        with pytest.raises(UsageError):
            make()


def test_an_image_bomb_is_refused_before_it_is_decoded() -> None:
    out = io.BytesIO()
    PIL.Image.new("1", (20_000, 20_000)).save(out, "PNG")
    with pytest.raises(MediaError, match="pixels"):
        decode_image(out.getvalue(), to="numpy")
    huge = bytearray(jpeg())
    at = huge.index(b"\xff\xc0")
    huge[at + 5 : at + 9] = b"\xff\xff\xff\xff"
    with pytest.raises(MediaError, match="pixels"):
        decode_image(bytes(huge), to="tensor")


def test_decoding_is_counted() -> None:
    stats = Stats()
    Decoder({"image": "tensor"}, stats=stats)([{"image": jpeg()}] * 10)
    assert stats.total()["decoded"] == 10
    assert stats.total()["decode_seconds"] > 0


def _decode_in_child(decoder: Decoder, out) -> None:
    out.put([tuple(sample["image"].shape) for sample in decoder([{"image": jpeg()}] * 4)])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_decoder_with_running_threads_works_in_a_child(method: str) -> None:
    context = multiprocessing.get_context(method)
    decoder = Decoder({"image": Image(to="numpy")}, threads=3)
    decoder([{"image": jpeg()}] * 4)
    out = context.Queue()
    child = context.Process(target=_decode_in_child, args=(decoder, out))
    child.start()
    assert out.get(timeout=60) == [(30, 40, 3)] * 4
    child.join()
    decoder.close()
    assert len(pickle.loads(pickle.dumps(decoder))([{"image": jpeg()}])) == 1


def test_a_clip_of_speech_is_the_same_part_of_the_whole(corpora: Path) -> None:
    data = next((corpora / "audio/speech").rglob("*.wav")).read_bytes()
    whole = decode_audio(data)
    part = decode_audio(data, start=0.25, stop=0.5)
    rate = int(whole.rate)
    assert whole.values.dtype == np.float32
    assert (part.values == whole.values[:, rate // 4 : rate // 2]).all()
    assert part.times.tolist() == [0.25]


def test_every_audio_format_gives_the_same_second(corpora: Path) -> None:
    files = sorted(path for path in (corpora / "audio/formats").iterdir() if path.suffix != ".jsonl")
    clips = {
        path.name: decode_audio(path.read_bytes(), start=1.0, stop=2.0)
        for path in files
        if path.suffix in (".wav", ".mp3", ".ogg", ".opus", ".aac", ".flac", ".m4a")
        and not path.name.startswith("short")
    }
    assert len(clips) >= 4
    for name, clip in clips.items():
        seconds = clip.values.shape[1] / clip.rate
        assert 0.9 < seconds <= 1.001, name
        assert abs(clip.times[0] - 1.0) < 0.05, name
        assert float(np.abs(clip.values).max()) > 0.01, name


def test_a_clip_of_video_is_the_same_part_of_the_whole(corpora: Path) -> None:
    for path in sorted((corpora / "video/formats").iterdir()):
        if path.suffix not in (".mp4", ".webm", ".mkv", ".ogv"):
            continue
        data = path.read_bytes()
        whole = decode_video(data)
        middle = float(whole.times[len(whole.times) // 2])
        part = decode_video(data, start=middle, stop=middle + 0.5)
        inside = (whole.times >= middle - 1e-6) & (whole.times < middle + 0.5)
        assert part.times.tolist() == whole.times[inside].tolist(), path.name
        assert (part.values == whole.values[inside]).all(), path.name
        assert len(decode_video(data, every=3).times) == -(-len(whole.times) // 3)
        break
    else:
        pytest.fail("no video in the corpora")


def test_clips_become_tensors_with_channels_first(corpora: Path) -> None:
    video = sorted((corpora / "video/formats").glob("*.mp4"))[0].read_bytes()
    sound = next((corpora / "audio/speech").rglob("*.wav")).read_bytes()
    decoder = Decoder(
        {"video": Video(span=(0.0, 0.2)), "sound": Audio(span=lambda sample: (0.0, sample["stop"]))}
    )
    (sample,) = decoder([{"video": video, "sound": sound, "stop": 0.1}])
    assert sample["video"].values.shape[1] == 3
    assert sample["sound"].values.shape[1] == round(0.1 * sample["sound"].rate)


@pytest.mark.parametrize("kind", [Audio, Video])
@pytest.mark.parametrize(
    "span", [(-1.0, 1.0), (2.0, 1.0), (1.0, 1.0), (float("nan"), None), (0.0, float("inf")), (1.0,), 3, "ab"]
)
def test_a_range_that_cannot_be_is_refused(kind, span) -> None:
    with pytest.raises(UsageError, match=r"no clip from|no range"):
        kind(span=span)
    decoder = Decoder({"clip": kind(span=lambda sample: span)})
    with pytest.raises(UsageError, match="column 'clip' of sample 0"):
        decoder([{"clip": b""}])


def test_a_range_behind_the_end_is_an_error_and_one_across_it_ends_there(corpora: Path) -> None:
    sound = next((corpora / "audio/speech").rglob("*.wav")).read_bytes()
    coded = next((corpora / "audio/formats").glob("*.aac")).read_bytes()  # by FFmpeg
    video = sorted((corpora / "video/formats").glob("*.mp4"))[0].read_bytes()
    for kind, data in ((Audio, sound), (Audio, coded), (Video, video)):
        (whole,) = Decoder({"clip": kind()})([{"clip": data}])
        last = float(whole["clip"].times[0]) + whole["clip"].values.shape[1] / whole["clip"].rate
        start = last - 0.1 if kind is Audio else float(whole["clip"].times[-1])
        (across,) = Decoder({"clip": kind(span=(start, 1e6))})([{"clip": data}])
        assert across["clip"].values.shape[1 if kind is Audio else 0] >= 1
        with pytest.raises(FormatError, match=r"column 'clip' of sample 0 .* no frame from 100 s.* s long"):
            Decoder({"clip": kind(span=(100.0, 101.0))})([{"clip": data}])
        with pytest.raises(FormatError, match="no frame from 100 s on"):
            Decoder({"clip": kind(span=(100.0, None))})([{"clip": data}])


def test_what_is_no_media_is_refused(corpora: Path) -> None:
    for decode in (decode_audio, decode_video):
        for data in (b"", b"nothing of the kind", b"RIFF\xff\xff\xff\xffWAVE"):
            with pytest.raises(MediaError):
                decode(data)
    sound = next((corpora / "audio/speech").rglob("*.wav")).read_bytes()
    with pytest.raises(MediaError, match="no video"):
        decode_video(sound)


def test_a_clip_that_would_be_too_large_is_refused(corpora: Path, monkeypatch) -> None:
    from datasync.streaming import clips

    monkeypatch.setattr(clips, "MOST_BYTES", 1000)
    with pytest.raises(MediaError, match="shorter range"):
        decode_audio(next((corpora / "audio/speech").rglob("*.wav")).read_bytes())
    with pytest.raises(MediaError, match="shorter range"):
        decode_video(sorted((corpora / "video/formats").glob("*.mp4"))[0].read_bytes())


def test_pinning_without_a_gpu_changes_nothing() -> None:
    batch = {"a": torch.zeros(2), "b": [torch.ones(1), "text"]}
    pinned = pin(batch)
    assert pinned["a"].tolist() == [0, 0]
    assert pinned["b"][1] == "text"
