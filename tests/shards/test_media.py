"""Media: what files are by their bytes, facts beside them, and changes on request."""

from __future__ import annotations

import io
import wave
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shards import media
from shards.convert import convert
from tests.shards.corpus import image_bytes, raw_rows, rows


def test_facts_stand_beside_images_on_request(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(image_bytes(1, size=(30, 20)))
    (tmp_path / "in" / "b.jpg").write_bytes(image_bytes(2, format="JPEG", size=(7, 9)))
    result = convert(tmp_path / "in", tmp_path / "out", media_info=True)
    assert result.columns == {
        "file_name": "str",
        "image": "jpeg",
        "image.format": "str",
        "image.height": "int32",
        "image.mode": "str",
        "image.width": "int32",
    }
    facts = [
        (row["image.width"], row["image.height"], row["image.format"], row["image.mode"])
        for row in rows(tmp_path / "out")
    ]
    assert facts == [(30, 20, "PNG", "RGB"), (7, 9, "JPEG", "RGB")]


def test_large_images_are_shrunk_and_small_ones_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(image_bytes(1, size=(300, 200)))
    (tmp_path / "in" / "b.png").write_bytes(image_bytes(2, size=(40, 50)))
    convert(tmp_path / "in", tmp_path / "out", max_image_size=60)
    first, second = raw_rows(tmp_path / "out")
    assert Image.open(io.BytesIO(first["image"])).size == (60, 40)
    assert second["image"] == image_bytes(2, size=(40, 50))


def test_images_are_stored_in_the_format_asked_for(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    buffer = io.BytesIO()
    Image.new("RGBA", (8, 8), (255, 0, 0, 0)).save(buffer, "PNG")
    (tmp_path / "in" / "a.png").write_bytes(buffer.getvalue())
    (tmp_path / "in" / "b.jpg").write_bytes(image_bytes(2, format="JPEG"))
    result = convert(tmp_path / "in", tmp_path / "out", image_format="jpeg")
    assert result.columns["image"] == "jpeg"
    first, second = raw_rows(tmp_path / "out")
    opened = Image.open(io.BytesIO(first["image"]))
    assert opened.format == "JPEG"
    assert min(opened.getpixel((4, 4))) > 250  # what was transparent is white
    assert second["image"] == image_bytes(2, format="JPEG")


def test_an_orientation_flag_is_applied_when_an_image_is_changed(tmp_path: Path) -> None:
    image = Image.new("RGB", (40, 20), "blue")
    exif = image.getexif()
    exif[0x0112] = 6  # turned by a quarter
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", exif=exif)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jpg").write_bytes(buffer.getvalue())
    convert(tmp_path / "in", tmp_path / "out", max_image_size=10)
    (row,) = raw_rows(tmp_path / "out")
    opened = Image.open(io.BytesIO(row["image"]))
    assert opened.size == (5, 10)
    assert not opened.getexif().get(0x0112)


def test_audio_is_resampled_to_wav(corpora: Path, tmp_path: Path) -> None:
    pytest.importorskip("av")
    result = convert(corpora / "audio" / "formats", tmp_path / "out", resample=8000, media_info=True)
    assert result.skipped == 0
    for row in rows(tmp_path / "out"):
        with wave.open(io.BytesIO(row["audio"])) as sound:
            assert sound.getframerate() == 8000 == row["audio.sample_rate"]
            assert sound.getsampwidth() == 2
            seconds = sound.getnframes() / 8000
        assert seconds == pytest.approx(row["audio.duration"], abs=0.01)
        assert seconds > 1


def test_every_real_photograph_passes_and_any_cut_of_it_does_not(corpora: Path) -> None:
    for path in sorted((corpora / "images" / "torchvision_modes").iterdir()):
        data = path.read_bytes()
        media.check(data, "image", level="full")
        for share in (0.1, 0.5, 0.9, 0.99):
            with pytest.raises(media.MediaError):
                media.check(data[: int(len(data) * share)], "image")


def test_what_stands_between_the_segments_of_a_jpeg_is_passed_over_as_decoders_do() -> None:
    data = image_bytes(1, format="JPEG")
    media.check(data[:20] + b"junk\xff\0" + data[20:], "image")  # behind the first
    with pytest.raises(media.MediaError, match="truncated before its first scan"):
        media.check(data[:20] + b"junk and no more", "image")


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"\xff\xd8\xff\xe0", "image/jpeg"),
        (b"GIF89a", "image/gif"),
        (b"RIFF\0\0\0\0WEBP", "image/webp"),
        (b"RIFF\0\0\0\0WAVE", "audio/wav"),
        (b"\0\0\0\x18ftypavif", "image/avif"),
        (b"\0\0\0\x18ftypM4A ", "audio/mp4"),
        (b"\0\0\0\x18ftypisom", "video/mp4"),
        (b"OggS" + b"\0" * 24 + b"OpusHead", "audio/ogg"),
        (b"OggS" + b"\0" * 24 + b"\x80theora", "video/ogg"),
        (b"ID3\x04", "audio/mpeg"),
        (b"\xff\xf1", "audio/aac"),
        (b"plain text", ""),
        (b"", ""),
    ],
)
def test_first_bytes_say_what_a_file_is(head: bytes, kind: str) -> None:
    assert media.sniff(head) == kind


def test_arrays_made_by_a_transform_become_array_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(image_bytes(1))
    (tmp_path / "pixels.py").write_text(
        "import io\nimport numpy as np\nfrom PIL import Image\n"
        "def change(row):\n    return {'pixels': np.array(Image.open(io.BytesIO(row['image'])))}\n"
    )
    monkeypatch.chdir(tmp_path)
    result = convert(tmp_path / "in", tmp_path / "out", transform="pixels:change")
    assert result.columns == {"pixels": "ndarray:uint8"}
    (row,) = rows(tmp_path / "out")
    np.testing.assert_array_equal(row["pixels"], np.array(Image.open(io.BytesIO(image_bytes(1)))))
