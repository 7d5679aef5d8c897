"""Audio frames: sizes, pitch, resampling, real recordings."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

from train.audio import filters, frames, resample
from train.config import AudioConfig

C = AudioConfig()


def tone(hertz: float, rate: int = 8000, seconds: float = 1.0) -> np.ndarray:
    return np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate).astype(np.float32)


def test_a_second_is_so_many_positions_and_a_long_clip_is_cut() -> None:
    assert frames((tone(440), 8000), C).shape == (1000 // (C.hop_ms * C.frames), C.frames * C.mels)
    assert len(frames((tone(440, seconds=60), 8000), C)) == C.tokens


@pytest.mark.parametrize("hertz", [300.0, 1000.0, 2500.0])
def test_a_tone_lights_up_its_band(hertz: float) -> None:
    mel = frames((tone(hertz), 8000), C).reshape(-1, C.mels).mean(axis=0)
    window = 2 * C.rate * C.hop_ms // 1000
    bins = np.linspace(0, C.rate / 2, window // 2 + 1)
    assert abs(bins[filters(C.mels, window, C.rate)[int(mel.argmax())].argmax()] - hertz) < 130


def test_another_rate_gives_nearly_the_same_frames_and_does_not_alias() -> None:
    a, b = frames((tone(1000, 8000), 8000), C), frames((tone(1000, 16000), 16000), C)
    assert np.abs(a - b).mean() < 0.1
    assert np.abs(resample(tone(7000, 16000), 16000, 8000)).max() < 0.05


def test_silence_and_too_little_sound() -> None:
    assert np.isfinite(frames((np.zeros(8000, np.float32), 8000), C)).all()
    with pytest.raises(ValueError, match="less than one position"):
        frames((tone(440)[:100], 8000), C)


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG"])
def test_files_are_read_and_mixed_to_mono(kind: str) -> None:
    soundfile = pytest.importorskip("soundfile")
    out = io.BytesIO()
    soundfile.write(out, np.stack([tone(500, 16000)] * 2, axis=1), 16000, format=kind)
    assert frames(out.getvalue(), C).shape == (12, 160)


def test_real_speech_is_not_flat(corpora: Path) -> None:
    pytest.importorskip("soundfile")
    path = sorted((corpora / "audio" / "speech").rglob("*.wav"))[0]
    assert frames(path.read_bytes(), C).std() > 0.1
