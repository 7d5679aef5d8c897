"""What `bench_stream.py` compares: the same samples written by each library, and read back by each.

Every contender gets the same arrays or the same JPEG files, stores them as its documentation advises for that
kind of data, shuffles, and gives batches of tensors. Photographs become uint8 (samples, 3, height, width).

A peer reads photographs twice over: in its own way (its column type, its decoder), and "by hand", the best
that its user can write: files as bytes, `torchvision.io.decode_jpeg`, and a view with the channels last, so
that collating copies each image once and transposes none.
"""

from __future__ import annotations

import contextlib
import glob
import io
import itertools
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

TOKENS = 1024
BATCH = 32
SHARD_BYTES = 1 << 24
SEED = 17


# What is stored


def token_rows(mib: int) -> Iterator[np.ndarray]:
    """Samples of 4 KiB: token ids that follow Zipf's law."""
    random = np.random.default_rng(SEED)
    for _ in range(mib):
        block = (random.zipf(1.2, (256, TOKENS)) % 50257).astype(np.int32)
        yield from block


def photographs(count: int, corpus: Path | None) -> list[bytes]:
    """JPEG files of 640 x 480: crops of real photographs where they are at hand, else of smooth noise."""
    from PIL import Image

    random = np.random.default_rng(SEED)
    sources = []
    for path in sorted(glob.glob(f"{corpus}/images/*/*.jpg")) if corpus is not None else []:
        with Image.open(path) as image:
            if min(image.size) >= 400:
                sources.append(image.convert("RGB").resize((1280, 960)))
    if not sources:
        small = random.integers(0, 255, (60, 80, 3), dtype=np.uint8)
        sources = [Image.fromarray(small).resize((1280, 960), Image.Resampling.BICUBIC)]
    files = []
    for i in range(count):
        x, y = int(random.integers(0, 640)), int(random.integers(0, 480))
        out = io.BytesIO()
        sources[i % len(sources)].crop((x, y, x + 640, y + 480)).save(out, "JPEG", quality=87)
        files.append(out.getvalue())
    return files


# How each writes it


def write_ours(rows: Iterable[Any], out: Path, *, jpeg: bool, compression: str | None = None) -> None:
    from shards import ShardWriter

    columns = {"image": "jpeg"} if jpeg else {"tokens": f"ndarray:int32:{TOKENS}"}
    name = next(iter(columns))
    with ShardWriter(
        columns=columns, out=str(out), compression=compression, size_limit=SHARD_BYTES
    ) as writer:
        for row in rows:
            writer.write({name: row})


def write_mosaicml(rows: Iterable[Any], out: Path, *, jpeg: bool, own: bool = False) -> None:
    from streaming import MDSWriter

    if own:
        rows = _opened(rows, out.with_name("files"))
    columns = {"image": "jpeg" if own else "bytes"} if jpeg else {"tokens": f"ndarray:int32:{TOKENS}"}
    name = next(iter(columns))
    with MDSWriter(columns=columns, out=str(out), size_limit=SHARD_BYTES) as writer:
        for row in rows:
            writer.write({name: row})


def write_webdataset(rows: Iterable[Any], out: Path, *, jpeg: bool) -> None:
    out.mkdir()
    kind = "jpg" if jpeg else "bin"
    samples = iter(enumerate(rows))
    row = next(samples, None)
    for number in itertools.count():
        if row is None:
            return
        with tarfile.open(out / f"{number:05d}.tar", "w") as tar:
            size = 0
            while row is not None and size < SHARD_BYTES:
                data = row[1] if jpeg else row[1].tobytes()
                info = tarfile.TarInfo(f"{row[0]:08d}.{kind}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
                size += len(data)
                row = next(samples, None)


def _opened(files: Iterable[bytes], folder: Path) -> Iterator[Any]:
    """JPEG files as Pillow opens them from a disk; libraries then store their bytes."""
    from PIL import Image

    folder.mkdir()
    for i, data in enumerate(files):
        (folder / f"{i:05d}.jpg").write_bytes(data)
        yield Image.open(folder / f"{i:05d}.jpg")


def _litdata_row(row: Any) -> Any:
    return row


def _litdata_image(path: str) -> Any:
    from PIL import Image

    return Image.open(path)


def _litdata_array(row: Any) -> Any:
    import torch

    return torch.from_numpy(row)


def write_litdata(
    rows: Iterable[Any], out: Path, *, jpeg: bool, tokens: bool = False, own: bool = False
) -> None:
    import litdata

    function = _litdata_row if jpeg else _litdata_array
    if own:
        rows, function = [image.filename for image in _opened(rows, out.with_name("files"))], _litdata_image
    options: dict[str, Any] = {"chunk_bytes": SHARD_BYTES}
    if tokens:
        options["item_loader"] = litdata.TokensLoader(block_size=TOKENS)
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
        litdata.optimize(
            fn=function,
            inputs=list(rows),
            output_dir=str(out),
            num_workers=1,
            reorder_files=False,
            verbose=False,
            **options,
        )


# How each reads it: a function that gives the batches of one epoch


def read_ours(folder: Path, cache: Path, *, jpeg: bool, workers: int) -> Callable[[], Iterable[Any]]:
    from datasync import StreamingDataLoader, StreamingDataset
    from datasync.streaming.decode import Decoder

    dataset = StreamingDataset(remote=str(folder), local=str(cache), shuffle=True, batch_size=BATCH)
    options: dict[str, Any] = {}
    if jpeg:
        # In workers there is a core for each; without them the decoder has both.
        options["collate_fn"] = Decoder({"image": "tensor"}, threads=1 if workers else 2, stack=True)
    loader = StreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers, **options)
    return lambda: loader


def read_mosaicml(
    folder: Path, cache: Path, *, jpeg: bool, workers: int, own: bool = False
) -> Callable[[], Iterable[Any]]:
    from streaming import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(remote=str(folder), local=str(cache), shuffle=True, batch_size=BATCH)
    options: dict[str, Any] = {"collate_fn": _from_pillow if own else _from_files} if jpeg else {}
    loader = StreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers, **options)
    return lambda: loader


def read_litdata(
    folder: Path, cache: Path, *, jpeg: bool, workers: int, tokens: bool = False, own: bool = False
) -> Any:
    import litdata

    options: dict[str, Any] = {"item_loader": litdata.TokensLoader(block_size=TOKENS)} if tokens else {}
    dataset = litdata.StreamingDataset(str(folder), shuffle=True, drop_last=True, **options)
    if jpeg and not own:
        dataset.transform = [decode_by_hand]
    loader = litdata.StreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers)
    return (lambda: map(channels_first, loader)) if jpeg and not own else (lambda: loader)


def read_webdataset(
    folder: Path, cache: Path, *, jpeg: bool, workers: int, own: bool = False
) -> Callable[[], Iterable[Any]]:
    import webdataset as wds

    tars = sorted(str(path) for path in folder.glob("*.tar"))
    data = wds.WebDataset(tars, shardshuffle=len(tars), empty_check=False).shuffle(1000)
    if own:
        data = data.decode("torchrgb8")
    data = data.to_tuple("jpg" if jpeg else "bin")
    if not own:
        data = data.map(_from_tar_jpeg if jpeg else _from_tar)
    loader = wds.WebLoader(data.batched(BATCH), batch_size=None, num_workers=workers)
    return (lambda: map(channels_first, loader)) if jpeg and not own else (lambda: loader)


def decode_by_hand(data: Any) -> Any:
    """A JPEG file to a uint8 tensor (height, width, 3), as libjpeg-turbo left it."""
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg

    image = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=ImageReadMode.RGB)
    return image.permute(1, 2, 0)


def channels_first(batch: Any) -> Any:
    """A batch of such images as (samples, 3, height, width), without a copy."""
    return (batch[0] if isinstance(batch, list | tuple) else batch).permute(0, 3, 1, 2)


def _from_files(samples: list[Any]) -> Any:
    import torch

    return {"image": channels_first(torch.stack([decode_by_hand(sample["image"]) for sample in samples]))}


def _from_pillow(samples: list[Any]) -> Any:
    import torch
    from torchvision.transforms.functional import pil_to_tensor

    return {"image": torch.stack([pil_to_tensor(sample["image"]) for sample in samples])}


def _from_tar(sample: Any) -> Any:
    return (np.frombuffer(sample[0], np.int32),)


def _from_tar_jpeg(sample: Any) -> Any:
    return (decode_by_hand(sample[0]),)


Contender = tuple[Callable[..., None], Callable[..., Callable[[], Iterable[Any]]]]

TOKENS_BY: dict[str, Contender] = {
    "ours": (write_ours, read_ours),
    "mosaicml": (write_mosaicml, read_mosaicml),
    "litdata": (write_litdata, read_litdata),
    "litdata tokens": (partial(write_litdata, tokens=True), partial(read_litdata, tokens=True)),
    "webdataset": (write_webdataset, read_webdataset),
}
PHOTOGRAPHS_BY: dict[str, Contender] = {
    "ours": (write_ours, read_ours),
    "mosaicml": (partial(write_mosaicml, own=True), partial(read_mosaicml, own=True)),
    "litdata": (partial(write_litdata, own=True), partial(read_litdata, own=True)),
    "webdataset": (write_webdataset, partial(read_webdataset, own=True)),
    "mosaicml by hand": (write_mosaicml, read_mosaicml),
    "litdata by hand": (write_litdata, read_litdata),
    "webdataset by hand": (write_webdataset, read_webdataset),
}


def length(batch: Any) -> int:
    """Samples of a batch, whatever its form."""
    if isinstance(batch, dict):
        return length(next(iter(batch.values())))
    if isinstance(batch, list | tuple) and len(batch) == 1:
        return length(batch[0])
    return len(batch)
