"""Media columns to arrays: images, audio and video, a batch at a time, on threads that leave the GIL.

    decoder = Decoder({"photo": Image(), "sound": Audio(span=(0.0, 2.0))}, threads=2, transform=crop)
    samples = decoder(samples)                                   a list of samples, in their order
    decoder = Decoder({"photo": "tensor"}, stack=True)           a batch: one tensor a column
    loader = StreamingDataLoader(dataset, collate_fn=decoder)

A value is the bytes of a file, or the image that Pillow has opened and not yet decoded, as the `jpeg` and
`png` columns give it; from a `StreamingDataLoader` it is a view of the shard, so nothing is copied before it
is decoded. All the work is in libjpeg-turbo, libpng, libsndfile and FFmpeg, which run without the GIL, so
threads scale. A loader without workers decodes the next batches while the loop works on one (`batches`). A
decoder pickles and survives `fork`: threads belong to a process.

    Image   pil        an image of Pillow, loaded, in `mode`
            numpy      uint8 (height, width, channels), or (height, width) in mode L
            tensor     uint8 (channels, height, width), channels last in memory
    Audio, Video       a `Clip` of `datasync.streaming.clips`

With `stack`, images of one size are decoded straight into the memory of their batch. What cannot be decoded
is a `FormatError` that names the column and the place in the batch.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from datasync.errors import FormatError, UsageError
from datasync.streaming.buffers import Buffers, shared_array
from datasync.streaming.clips import Clip, check_span, decode_audio, decode_video
from datasync.streaming.images import (
    MODES,
    Pixels,
    as_tensor,
    decode_image,
    decode_pixels,
    file_bytes,
    pixels_shape,
)
from datasync.streaming.stats import Stats
from shards.media import MediaError

__all__ = ["Audio", "Decoder", "Image", "Video", "decode_image", "pin"]

Sample = dict[str, Any]
Span = tuple[float, float | None]

_AS = ("pil", "numpy", "tensor")
_AHEAD = 2  # batches that are decoded while another one is used


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
        if self.mode not in MODES:
            raise UsageError(f"no image mode {self.mode!r} here", mend=f"one of: {', '.join(MODES)}")

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
        start, stop = _range(self.span, sample)
        return _converted(decode_audio(file_bytes(value), start=start, stop=stop), self.to)


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
        if not isinstance(self.every, int) or self.every < 1:
            raise UsageError(f"every {self.every} frames cannot be kept", mend="give 1 or more")

    def decode(self, value: Any, sample: Sample) -> Clip:
        """The clip of one sample: uint8 (frames, height, width, 3); a tensor has its channels second."""
        start, stop = _range(self.span, sample)
        clip = decode_video(file_bytes(value), start=start, stop=stop, every=self.every)
        return _converted(clip, self.to, video=True)


Column = Image | Audio | Video


class Decoder:
    """Decodes columns of samples.

    Args:
        columns (Mapping[str, Image | Audio | Video | str]): Column -> how; a word is `Image(to=word)`.
        threads (int): Threads that decode. Default: ``2``.
        transform (Callable | None): Applied to each sample afterwards, on the same threads; None for one that
            is left out of its batch. A batch without any sample is an empty list.
        collate (Callable | None): Makes a batch of the list of samples. Default: it stays a list.
        stack (bool): Make a batch of columns, as a DataLoader does: tensors, and lists of what cannot be one.
            Instead of `collate`. Default: ``False``.
        stats (Stats | None): Where decoding is counted, such as the dataset's. Default: nowhere.

    Raises:
        UsageError: A column cannot be decoded that way, or `collate` and `stack` are both given.
    """

    def __init__(
        self,
        columns: Mapping[str, Column | str],
        *,
        threads: int = 2,
        transform: Callable[[Sample], Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        stack: bool = False,
        stats: Stats | None = None,
    ) -> None:
        if threads < 1:
            raise UsageError(f"{threads} threads cannot decode", mend="give 1 or more")
        if stack and collate is not None:
            raise UsageError("a decoder has both `stack` and `collate`", mend="give one of them")
        self.columns = {name: Image(to=how) if isinstance(how, str) else how for name, how in columns.items()}
        self.threads = threads
        self.transform = transform
        self.collate = collate
        self.stack = stack
        self.stats = stats
        self._buffers = Buffers()
        self._pool: tuple[int, ThreadPoolExecutor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None}

    def __call__(self, samples: Sequence[Sample]) -> Any:
        """Decode the samples of a batch; the given ones are left as they are. The calling thread takes part.

        Raises:
            FormatError: A value cannot be decoded.
        """
        job = self._job(samples)
        futures = [self._threads().submit(job.work) for _ in range(min(self.threads, len(samples)) - 1)]
        job.work()
        return self._finished(job, futures)

    def batches(self, batches: Iterable[Sequence[Sample]]) -> Iterator[Any]:
        """Decode batch after batch, the next ones while the caller has one.

        Raises:
            FormatError: A value of the batch that is due cannot be decoded.
        """
        begun: deque[tuple[_Job, list[Future[None]]]] = deque()
        ahead = 0  # the first batch comes without waiting for others
        try:
            for samples in batches:
                job = self._job(samples)
                begun.append((job, [self._threads().submit(job.work) for _ in range(self.threads)]))
                if len(begun) > ahead:
                    batch = self._finished(*begun[0])
                    begun.popleft()
                    yield batch
                    ahead = min(ahead + 1, _AHEAD)
            while begun:
                batch = self._finished(*begun[0])
                begun.popleft()
                yield batch
        finally:
            for job, _ in begun:
                job.stop()

    def close(self) -> None:
        """End the threads; they are started again when needed."""
        if self._pool is not None and self._pool[0] == os.getpid():
            self._pool[1].shutdown()
        self._pool = None

    def _job(self, samples: Sequence[Sample]) -> _Job:
        """A batch to decode, with room for its images where they are stacked."""
        rooms: dict[str, Pixels] = {}
        if self.stack and self.transform is None and samples:
            for name, how in self.columns.items():
                if isinstance(how, Image) and how.to != "pil" and name in samples[0]:
                    with _naming(name, 0):
                        shape = pixels_shape(samples[0][name], how.mode)
                    rooms[name] = self._room((len(samples), *shape), how.to)
        return _Job(decode=self._one, samples=samples, rooms=rooms, results=[None] * len(samples))

    def _room(self, shape: tuple[int, ...], to: str) -> Pixels:
        """Memory for a batch; in a DataLoader worker, memory that the rank gets without a copy."""
        module = sys.modules.get("torch.utils.data")
        if to == "tensor" and module is not None and module.get_worker_info() is not None:
            return shared_array(shape)
        return self._buffers.take(shape)

    def _finished(self, job: _Job, futures: Sequence[Future[None]]) -> Any:
        """The batch of a job, once all threads have left it."""
        for future in futures:
            future.result()
        if job.error is not None:
            raise job.error
        if self.stats is not None:
            self.stats.add(decoded=len(job.samples) * len(self.columns), decode_seconds=job.seconds)
        results = [sample for sample in job.results if sample is not None]
        if not results:
            return []
        if self.stack:
            return self._stacked(results, job.rooms)
        return results if self.collate is None else self.collate(results)

    def _stacked(self, results: list[Any], rooms: Mapping[str, Pixels]) -> Any:
        from torch.utils.data import default_collate

        from datasync.streaming.collate import collate_values

        if not isinstance(results[0], Mapping):
            return default_collate(results)  # what a transform made of the samples
        batch = {}
        for name in results[0]:
            if name in rooms:
                how, room = self.columns[name], rooms[name]
                batch[name] = room if how.to == "numpy" else as_tensor(room)
            else:
                batch[name] = collate_values([sample[name] for sample in results])
        return batch

    def _one(self, sample: Sample, place: int, rooms: Mapping[str, Pixels]) -> Any:
        decoded = dict(sample)
        for name, how in self.columns.items():
            if name not in sample:
                raise UsageError(
                    f"there is no column {name!r} to decode", mend=f"it has: {', '.join(map(str, sample))}"
                )
            with _naming(name, place):
                if name in rooms:
                    assert isinstance(how, Image)
                    decode_pixels(sample[name], how.mode, rooms[name][place])
                    decoded[name] = None  # it is in the batch
                else:
                    decoded[name] = how.decode(sample[name], sample)
        return decoded if self.transform is None else self.transform(decoded)

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None or self._pool[0] != os.getpid():
            pool = ThreadPoolExecutor(self.threads, thread_name_prefix="datasync-decode")
            self._pool = os.getpid(), pool
        return self._pool[1]


@dataclass(slots=True, kw_only=True)
class _Job:
    """A batch that is being decoded: threads take its samples one at a time, each the next one.

    Args:
        decode (Callable): Decode a sample, given its place and the rooms.
        samples (Sequence[Sample]): The batch.
        rooms (dict[str, Pixels]): Columns whose values are written into one array.
        results (list[Any]): The decoded samples.
    """

    decode: Callable[[Sample, int, Mapping[str, Pixels]], Any]
    samples: Sequence[Sample]
    rooms: dict[str, Pixels]
    results: list[Any]
    error: BaseException | None = None
    seconds: float = 0.0  # of all threads together
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stopped: bool = False

    def work(self) -> None:
        """Decode samples until none is left; what goes wrong is left in `error`."""
        started = time.perf_counter()
        try:
            while not self._stopped and (i := next(self._numbers)) < len(self.samples):
                self.results[i] = self.decode(self.samples[i], i, self.rooms)
        except BaseException as error:  # noqa: BLE001  raised by whoever wants the batch
            self.error = self.error or error
            self._stopped = True
        with self._lock:
            self.seconds += time.perf_counter() - started

    def stop(self) -> None:
        """Nobody wants the batch any more."""
        self._stopped = True


@contextmanager
def _naming(column: str, place: int) -> Iterator[None]:
    """Let an error say what could not be decoded."""
    try:
        yield
    except MediaError as error:
        raise FormatError(
            f"column {column!r} of sample {place} in this batch cannot be decoded: {error}",
            mend="look the sample up with `datasync sample`, and leave the row out",
        ) from error
    except UsageError as error:
        raise UsageError(
            f"column {column!r} of sample {place} in this batch: {error.message}", mend=error.mend
        ) from error


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
    if not callable(span):
        check_span(*_range(span, {}))


def _range(span: Span | Callable[[Sample], Span], sample: Sample) -> Span:
    """The seconds to decode of a sample."""
    found = span(sample) if callable(span) else span
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise UsageError(f"{found!r} is no range of seconds", mend="give two: from, and to or None")
    return found[0], found[1]
