"""Media columns to arrays: images, audio and video, a batch at a time, on threads that leave the GIL.

    decoder = Decoder({"photo": Image(), "sound": Audio(span=(0.0, 2.0))}, threads=2, transform=crop)
    samples = decoder(samples)                                   a list of samples, in their order
    loader = StreamingDataLoader(dataset, collate_fn=decoder)    with `collate` for what makes a batch

A value is the bytes of a file, or the image that Pillow has opened and not yet decoded, as the `jpeg` and
`png` columns give it. All the work is in libjpeg-turbo, libpng, libsndfile and FFmpeg, which run without the
GIL, so threads scale; the calling thread takes part. A decoder pickles and survives `fork`: threads belong to
a process.

    Image   pil        an image of Pillow, loaded, in `mode`
            numpy      uint8 (height, width, channels), or (height, width) in mode L
            tensor     uint8 (channels, height, width); JPEG by torchvision where it is installed
    Audio, Video       a `Clip` of `datasync.streaming.clips`

Sizes are checked before anything is decoded (invariant 10). What cannot be decoded is a `FormatError` that
names the column and the place in the batch.
"""

from __future__ import annotations

import importlib.util
import io
import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from datasync.errors import FormatError, UsageError
from datasync.streaming.clips import Clip, decode_audio, decode_video
from datasync.streaming.stats import Stats
from shards.media import MediaError, check_pixels, image_size

if TYPE_CHECKING:
    import PIL.Image

Sample = dict[str, Any]
Span = tuple[float, float | None]

_MODES = ("L", "RGB", "RGBA")
_AS = ("pil", "numpy", "tensor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """How to decode an image column.

    Args:
        to (str): ``pil``, ``numpy`` or ``tensor``. Default: ``tensor``.
        mode (str): ``L``, ``RGB`` or ``RGBA``. Default: ``RGB``.
    """

    to: str = "tensor"
    mode: str = "RGB"

    def __post_init__(self) -> None:
        if self.to not in _AS:
            raise UsageError(f"an image cannot be decoded to {self.to!r}", mend=f"one of: {', '.join(_AS)}")
        if self.mode not in _MODES:
            raise UsageError(f"no image mode {self.mode!r} here", mend=f"one of: {', '.join(_MODES)}")

    def decode(self, value: Any, sample: Sample) -> Any:
        """The image of one sample."""
        return decode_image(value, to=self.to, mode=self.mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Audio:
    """How to decode an audio column.

    Args:
        to (str): ``numpy`` or ``tensor``. Default: ``tensor``.
        span (tuple | Callable): Seconds from and to (None: the end), or a function of the sample that gives
            them. Default: all of it.
    """

    to: str = "tensor"
    span: Span | Callable[[Sample], Span] = (0.0, None)

    def __post_init__(self) -> None:
        _check_clip(self.to, self.span)

    def decode(self, value: Any, sample: Sample) -> Clip:
        """The clip of one sample: float32 (channels, frames)."""
        start, stop = self.span(sample) if callable(self.span) else self.span
        return _converted(decode_audio(_file_bytes(value), start=start, stop=stop), self.to)


@dataclass(frozen=True, slots=True, kw_only=True)
class Video:
    """How to decode a video column.

    Args:
        to (str): ``numpy`` or ``tensor``. Default: ``tensor``.
        span (tuple | Callable): As for audio.
        every (int): Keep one frame of so many. Default: ``1``.
    """

    to: str = "tensor"
    span: Span | Callable[[Sample], Span] = (0.0, None)
    every: int = 1

    def __post_init__(self) -> None:
        _check_clip(self.to, self.span)
        if self.every < 1:
            raise UsageError(f"every {self.every} frames cannot be kept", mend="give 1 or more")

    def decode(self, value: Any, sample: Sample) -> Clip:
        """The clip of one sample: uint8 (frames, height, width, 3); a tensor has its channels second."""
        start, stop = self.span(sample) if callable(self.span) else self.span
        clip = decode_video(_file_bytes(value), start=start, stop=stop, every=self.every)
        return _converted(clip, self.to, video=True)


Column = Image | Audio | Video


class Decoder:
    """Decodes columns of samples.

    Args:
        columns (Mapping[str, Image | Audio | Video | str]): Column -> how; a word is `Image(to=word)`.
        threads (int): Threads that decode, with the calling one. Default: ``2``.
        transform (Callable | None): Applied to each sample afterwards, on the same threads.
        collate (Callable | None): Makes a batch of the list of samples. Default: it stays a list.
        stats (Stats | None): Where decoding is counted, such as the dataset's. Default: nowhere.

    Raises:
        UsageError: A column cannot be decoded that way.
    """

    def __init__(
        self,
        columns: Mapping[str, Column | str],
        *,
        threads: int = 2,
        transform: Callable[[Sample], Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        stats: Stats | None = None,
    ) -> None:
        if threads < 1:
            raise UsageError(f"{threads} threads cannot decode", mend="give 1 or more")
        self.columns = {name: Image(to=how) if isinstance(how, str) else how for name, how in columns.items()}
        self.threads = threads
        self.transform = transform
        self.collate = collate
        self.stats = stats
        self._pool: tuple[int, ThreadPoolExecutor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None}

    def __call__(self, samples: Sequence[Sample]) -> Any:
        """Decode the samples of a batch; the given ones are left as they are.

        Raises:
            FormatError: A value cannot be decoded.
        """
        results: list[Any] = [None] * len(samples)
        numbers = itertools.count()
        failed = threading.Event()

        def work() -> float:
            started = time.perf_counter()
            while (i := next(numbers)) < len(samples) and not failed.is_set():
                try:
                    results[i] = self._one(samples[i], i)
                except BaseException:
                    failed.set()
                    raise
            return time.perf_counter() - started

        helpers = min(self.threads, len(samples)) - 1
        futures = [self._threads().submit(work) for _ in range(helpers)]
        try:
            seconds = work()
        finally:
            waited = [future.exception() for future in futures]
        for error in waited:
            if error is not None:
                raise error
        if self.stats is not None:
            seconds += sum(future.result() for future in futures)
            self.stats.add(decoded=len(samples) * len(self.columns), decode_seconds=seconds)
        return results if self.collate is None else self.collate(results)

    def close(self) -> None:
        """End the threads; they are started again when needed."""
        if self._pool is not None and self._pool[0] == os.getpid():
            self._pool[1].shutdown()
        self._pool = None

    def _one(self, sample: Sample, place: int) -> Any:
        decoded = dict(sample)
        for name, how in self.columns.items():
            if name not in sample:
                raise UsageError(
                    f"there is no column {name!r} to decode", mend=f"it has: {', '.join(map(str, sample))}"
                )
            try:
                decoded[name] = how.decode(sample[name], sample)
            except MediaError as error:
                raise FormatError(
                    f"column {name!r} of sample {place} in this batch cannot be decoded: {error}",
                    mend="look the sample up with `datasync sample`, and leave the row out",
                ) from error
        return decoded if self.transform is None else self.transform(decoded)

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None or self._pool[0] != os.getpid():
            pool = ThreadPoolExecutor(max(self.threads - 1, 1), thread_name_prefix="datasync-decode")
            self._pool = os.getpid(), pool
        return self._pool[1]


def decode_image(value: Any, *, to: str = "tensor", mode: str = "RGB") -> Any:
    """Decode one image.

    Args:
        value (bytes | memoryview | PIL.Image.Image): A file, or an opened image.
        to (str): ``pil``, ``numpy`` or ``tensor``. Default: ``tensor``.
        mode (str): ``L``, ``RGB`` or ``RGBA``. Default: ``RGB``.

    Raises:
        MediaError: It is no image, is damaged, or has too many pixels.
    """
    if to == "tensor" and mode in ("L", "RGB") and _has_torchvision():
        data = _unread_bytes(value)
        if data is not None and data[:2] == b"\xff\xd8":
            tensor = _torchvision_jpeg(data, mode)
            if tensor is not None:
                return tensor
    image = _loaded(value, mode)
    if to == "pil":
        return image
    array = np.array(image)
    if to == "numpy":
        return array
    import torch

    tensor = torch.from_numpy(array)
    return tensor.unsqueeze(0) if array.ndim == 2 else tensor.permute(2, 0, 1).contiguous()


def pin(batch: Any) -> Any:
    """The same batch with its tensors in pinned memory, from which copies to a GPU do not wait.

    For loops without a DataLoader; one with ``pin_memory=True`` does the same. Without a GPU nothing changes.
    """
    import torch

    if not torch.cuda.is_available():
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.pin_memory()
    if isinstance(batch, Mapping):
        return {name: pin(value) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(pin(value) for value in batch)
    if isinstance(batch, Clip):
        return Clip(values=pin(batch.values), rate=batch.rate, times=batch.times)
    return batch


def _loaded(value: Any, mode: str) -> PIL.Image.Image:
    """An image of Pillow with its pixels decoded, in a mode."""
    import PIL.Image

    try:
        if not isinstance(value, PIL.Image.Image):
            value = PIL.Image.open(io.BytesIO(value))
        check_pixels(*value.size)
        image: PIL.Image.Image = value
        image.load()
        if image.mode == "P" and "transparency" in image.info:
            image = image.convert("RGBA")
        return image if image.mode == mode else image.convert(mode)
    except (MediaError, MemoryError):
        raise
    except Exception as error:
        raise MediaError(f"{type(error).__name__}: {error}") from error


def _unread_bytes(value: Any) -> bytes | None:
    """The bytes of a file, also of one that Pillow has opened in memory and not decoded yet."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    file = getattr(value, "fp", None)
    if isinstance(file, io.BytesIO) and getattr(value, "tile", None):
        return file.getvalue()
    return None


def _file_bytes(value: Any) -> bytes:
    data = _unread_bytes(value)
    if data is None:
        raise MediaError(f"expected the bytes of a file, got {type(value).__name__}")
    return data


def _torchvision_jpeg(data: bytes, mode: str) -> Any:
    """Decode by libjpeg-turbo without Pillow's copies; None for a JPEG that it does not read."""
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg

    check_pixels(*image_size(data))
    wanted = ImageReadMode.RGB if mode == "RGB" else ImageReadMode.GRAY
    try:
        return decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=wanted)
    except RuntimeError:
        return None


@cache
def _has_torchvision() -> bool:
    return importlib.util.find_spec("torchvision") is not None


def _converted(clip: Clip, to: str, *, video: bool = False) -> Clip:
    if to == "numpy":
        return clip
    import torch

    values = torch.from_numpy(clip.values)
    if video:
        values = values.permute(0, 3, 1, 2).contiguous()
    return Clip(values=values, rate=clip.rate, times=clip.times)


def _check_clip(to: str, span: Span | Callable[[Sample], Span]) -> None:
    if to not in ("numpy", "tensor"):
        raise UsageError(f"a clip cannot be decoded to {to!r}", mend="one of: numpy, tensor")
    if not callable(span) and (span[0] < 0 or (span[1] is not None and span[1] <= span[0])):
        raise UsageError(f"no clip from {span[0]} to {span[1]} seconds", mend="from 0 on, and forwards")
