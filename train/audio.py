"""Audio to positions of the sequence: log-mel frames, several frames to a position.

bytes ─► mono samples at `rate` ─► windows ─► |FFT|² ─► mel bands ─► log ─► (m, frames·mels), about -1 … 1
"""

from __future__ import annotations

import io
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from train.config import AudioConfig


def frames(value: Any, c: AudioConfig) -> NDArray[np.float32]:
    """(m, frames·mels) for the bytes of an audio file, or for (samples, rate).

    Raises:
        ValueError: There is no sound in it.
    """
    samples, rate = value if isinstance(value, tuple) else _read(value)
    samples = resample(np.asarray(samples, np.float32), rate, c.rate)[: int(c.max_s * c.rate)]
    hop = c.rate * c.hop_ms // 1000
    window = 2 * hop
    span = hop * c.frames
    count = len(samples) // span
    if count == 0:
        raise ValueError(f"{len(samples)} samples at {c.rate} Hz are less than one position ({span})")
    padded = np.pad(samples[: count * span], (0, hop))
    views = np.lib.stride_tricks.sliding_window_view(padded, window)[::hop]  # (count·frames, window)
    power = np.abs(np.fft.rfft(views * np.hanning(window), axis=-1)) ** 2
    mel = np.log10(np.maximum(power @ filters(c.mels, window, c.rate).T, 1e-10))
    mel = (np.maximum(mel, mel.max() - 8.0) + 4.0) / 4.0
    return np.ascontiguousarray(mel.reshape(count, -1), dtype=np.float32)


def _read(data: bytes) -> tuple[NDArray[np.float32], int]:
    import soundfile

    samples, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    return samples.mean(axis=1), int(rate)


def resample(samples: NDArray[np.float32], rate: int, wanted: int) -> NDArray[np.float32]:
    """To another rate by cutting or padding the spectrum: band-limited, no aliasing."""
    if rate == wanted or not len(samples):
        return samples
    length = round(len(samples) * wanted / rate)
    spectrum = np.fft.rfft(samples)
    return (np.fft.irfft(spectrum[: length // 2 + 1], n=length) * (length / len(samples))).astype(np.float32)


@lru_cache(maxsize=8)
def filters(mels: int, window: int, rate: int) -> NDArray[np.float64]:
    """(mels, window/2 + 1): triangles, evenly spaced on the mel scale of O'Shaughnessy (1987)."""
    top = 2595.0 * np.log10(1.0 + rate / 2 / 700.0)
    edges = 700.0 * (10.0 ** (np.linspace(0.0, top, mels + 2) / 2595.0) - 1.0)
    bins = np.linspace(0.0, rate / 2, window // 2 + 1)
    rising = (bins - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - bins) / (edges[2:] - edges[1:-1])[:, None]
    return np.maximum(0.0, np.minimum(rising, falling))
