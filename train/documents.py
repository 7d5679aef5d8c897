"""From samples to the tensors of one forward pass.

    sample {image, caption} ──► pieces: ids (≤ context), targets, media ──► rows (of one, or packed) ──► Batch

A document is `bos`, a place for each media position, the text, `eos`. Each position's target is the next
token of its own document; a position whose next is media, and padding, has none. A document longer than the
context becomes several pieces, and no token of it is lost. Everything is a pure function of the samples of
one microbatch, which is why a position in the data stays a count of samples: no buffer is carried from one
batch to the next.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shards.errors import CorruptError, UsageError
from train.config import Config, ImageConfig
from train.model.decoder import IGNORE
from train.tokens import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

ROUND = 16
"""Rows are as long as the longest piece, rounded up to this, so that few shapes occur; compiled, as the
context."""


@dataclass(frozen=True, slots=True)
class Media:
    """One image or clip in a piece: what its encoder takes, and where its positions begin."""

    kind: str
    values: NDArray[np.float32]
    start: int

    @property
    def tokens(self) -> int:
        return len(self.values)


@dataclass(frozen=True, slots=True)
class Piece:
    """A document, or one context's worth of a long one: inputs and targets of the same length."""

    ids: NDArray[np.int64]
    targets: NDArray[np.int64]
    media: tuple[Media, ...] = ()


@dataclass(slots=True)
class Batch:
    """The tensors of one forward pass; see `Decoder.forward` for shapes. `valid` counts the targets."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor | None
    documents: Tensor | None
    media: dict[str, tuple[Tensor, Tensor]]
    valid: int
    samples: int
    ids: list[str] = field(default_factory=list)

    def to(self, device: torch.device) -> Batch:
        """The same on a device, copied without waiting."""

        def move(tensor: Tensor | None) -> Tensor | None:
            return tensor if tensor is None else tensor.to(device, non_blocking=True)

        media = {name: (move(values), move(places)) for name, (values, places) in self.media.items()}
        return Batch(
            move(self.tokens), move(self.targets), move(self.positions), move(self.documents), media,  # type: ignore[arg-type]
            self.valid, self.samples, self.ids,
        )  # fmt: skip

    def pin_memory(self) -> Batch:
        """Called by the DataLoader, so that copies to a GPU need not wait."""

        def pin(tensor: Tensor | None) -> Tensor | None:
            return tensor if tensor is None else tensor.pin_memory()

        media = {name: (pin(values), pin(places)) for name, (values, places) in self.media.items()}
        return Batch(
            pin(self.tokens), pin(self.targets), pin(self.positions), pin(self.documents), media,  # type: ignore[arg-type]
            self.valid, self.samples, self.ids,
        )  # fmt: skip

    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of `Decoder.forward`, beside the tokens."""
        return {
            "targets": self.targets,
            "positions": self.positions,
            "documents": self.documents,
            "media": self.media,
        }


class Encoder:
    """Samples to pieces, by a config; pickles, so that DataLoader workers can use it."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.tokenizer: Tokenizer = load_tokenizer(config.data.tokenizer)
        if 0 < config.model.vocab < self.tokenizer.vocab:
            raise UsageError(
                f"model.vocab = {config.model.vocab} is less than the {self.tokenizer.vocab} tokens of "
                f"data.tokenizer = {config.data.tokenizer!r}",
                mend="raise it, or leave it out: then it is as many as the tokenizer has",
            )
        self.context = config.model.context
        self.round = self.context if config.parallel.compile else ROUND
        media = (config.model.image.tokens if config.data.image else 0) + (
            config.model.audio.tokens if config.data.audio else 0
        )
        if media + 2 > self.context:
            raise UsageError(
                f"the media of one sample take up to {media} positions, model.context is {self.context}",
                mend="raise model.context or model.image.patch, or lower model.image.size, model.audio.max_s",
            )

    def pieces(self, sample: Mapping[str, Any], name: str = "") -> list[Piece]:
        """The pieces of one sample; `name` is what errors call it."""
        ids, media = self.prompt(sample, name)
        ids += self._text(sample, name)
        ids.append(self.tokenizer.eos)
        whole = np.asarray(ids, dtype=np.int64)
        targets = whole[1:].copy()
        for item in media:
            targets[item.start - 1 : item.start + item.tokens - 1] = IGNORE
        inputs = whole[:-1]
        return [
            Piece(inputs[a : a + self.context], targets[a : a + self.context], tuple(media) if a == 0 else ())
            for a in range(0, len(inputs), self.context)
        ]

    def prompt(self, sample: Mapping[str, Any], name: str = "") -> tuple[list[int], list[Media]]:
        """What comes before the text: `bos` and the places of media."""
        data, ids, media = self.config.data, [self.tokenizer.bos], []
        makers: tuple[tuple[str, str, Callable[[Any], NDArray[np.float32]]], ...] = (
            ("image", data.image, lambda value: patches(value, self.config.model.image)),
            ("audio", data.audio, self._frames),
        )
        for kind, column, make in makers:
            value = sample.get(column) if column else None
            if value is None or (isinstance(value, bytes | str) and not value):
                continue
            try:
                item = Media(kind, make(value), len(ids))
            except (ValueError, OSError, TypeError, SyntaxError, NotImplementedError, RuntimeError) as error:
                raise CorruptError(
                    f"sample {name}: column {column!r} is not {'an image' if kind == 'image' else 'audio'} "
                    f"that can be read: {error}",
                    mend="look at it with `datasync inspect`; or name another column",
                ) from error
            ids += [self.tokenizer.pad] * item.tokens
            media.append(item)
        return ids, media

    def text(self, sample: Mapping[str, Any]) -> str:
        """The sample's text, as it stands in its column."""
        value = sample.get(self.config.data.text, "")
        if isinstance(value, bytes):
            return value.decode("utf-8", errors="replace")
        if not isinstance(value, str | int | float | np.number):
            raise UsageError(
                f"data.text: column {self.config.data.text!r} holds a {type(value).__name__}, no text",
                mend="name the column that holds the text",
            )
        return str(value)

    def _text(self, sample: Mapping[str, Any], name: str) -> list[int]:
        data = self.config.data
        if data.tokens and sample.get(data.tokens) is not None:
            ids = np.asarray(sample[data.tokens]).reshape(-1)
            vocab = self.config.model.vocab or self.tokenizer.vocab
            if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
                wrong = int(ids.min()) if ids.min() < 0 else int(ids.max())
                raise UsageError(
                    f"sample {name}: column {data.tokens!r} has the token {wrong}, "
                    f"the model knows 0 to {vocab - 1}",
                    mend="set model.vocab to the size of the vocabulary that made the tokens",
                )
            return [int(i) for i in ids]
        if data.text not in sample:
            raise UsageError(
                f"sample {name} has no column {data.text!r}; it has {', '.join(sorted(sample))}",
                mend="set data.text (or data.tokens) to the column that holds the text",
            )
        return self.tokenizer.encode(self.text(sample))

    def _frames(self, value: Any) -> NDArray[np.float32]:
        from train.audio import frames

        return frames(value, self.config.model.audio)


class Collate:
    """The samples of one rank in one step to `pieces` microbatches, equal to within one sample."""

    def __init__(self, encoder: Encoder, pieces: int, pack: bool) -> None:
        self.encoder, self.number, self.pack = encoder, pieces, pack

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
        """``ids`` of the samples first, since the loader counts samples by a batch's first value;
        ``batches``."""
        ends = [len(samples) * (i + 1) // self.number for i in range(self.number)]
        batches = [self.batch(samples[a:b]) for a, b in itertools.pairwise([0, *ends])]
        return {"ids": [name for batch in batches for name in batch.ids], "batches": batches}

    def batch(self, samples: Sequence[Mapping[str, Any]]) -> Batch:
        """One forward pass over these samples."""
        names = [str(sample.get("sample_id", "")) for sample in samples]
        pieces = [
            piece
            for sample, name in zip(samples, names, strict=True)
            for piece in self.encoder.pieces(sample, name)
        ]
        lengths = [len(piece.ids) for piece in pieces]
        if self.pack:
            rows, width = first_fit(lengths, self.encoder.context), self.encoder.context
        else:
            rows, width = (
                [[i] for i in range(len(pieces))],
                min(-(-max(lengths) // self.encoder.round) * self.encoder.round, self.encoder.context),
            )
        return lay_out(
            pieces,
            rows,
            width,
            self.encoder.tokenizer.pad,
            documents=self.pack,
            samples=len(samples),
            ids=names,
        )


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows of at most `capacity`, each a list of item numbers: an item goes into the first row with room."""
    rows: list[list[int]] = []
    room: list[int] = []
    for item, length in enumerate(lengths):
        row = next((r for r, left in enumerate(room) if left >= length), None)
        if row is None:
            rows.append([])
            room.append(capacity)
            row = len(rows) - 1
        rows[row].append(item)
        room[row] -= length
    return rows


def lay_out(
    pieces: Sequence[Piece],
    rows: Sequence[Sequence[int]],
    width: int,
    pad: int,
    *,
    documents: bool,
    samples: int,
    ids: list[str],
) -> Batch:
    """Pieces into rows of `width`; padding is a document of its own, without targets."""
    shape = (len(rows), width)
    tokens, targets = np.full(shape, pad, np.int64), np.full(shape, IGNORE, np.int64)
    positions, owner = np.zeros(shape, np.int64), np.full(shape, -1, np.int32)
    values: dict[str, list[NDArray[np.float32]]] = {}
    places: dict[str, list[NDArray[np.int64]]] = {}
    for r, row in enumerate(rows):
        at = 0
        for number, item in enumerate(row):
            piece = pieces[item]
            span = slice(at, at + len(piece.ids))
            tokens[r, span], targets[r, span] = piece.ids, piece.targets
            positions[r, span], owner[r, span] = np.arange(len(piece.ids)), number
            for media in piece.media:
                values.setdefault(media.kind, []).append(media.values)
                places.setdefault(media.kind, []).append(
                    r * width + at + media.start + np.arange(media.tokens)
                )
            at += len(piece.ids)
    stack = {"image": np.stack, "audio": np.concatenate}
    return Batch(
        tokens=torch.from_numpy(tokens),
        targets=torch.from_numpy(targets),
        positions=torch.from_numpy(positions) if documents else None,
        documents=torch.from_numpy(owner) if documents else None,
        media={
            kind: (
                torch.from_numpy(stack[kind](values[kind])),
                torch.from_numpy(np.concatenate(places[kind])),
            )
            for kind in values
        },
        valid=int((targets != IGNORE).sum()),
        samples=samples,
        ids=ids,
    )


def patches(value: Any, c: ImageConfig) -> NDArray[np.float32]:
    """(n, 3·P·P) in [-1, 1], in reading order, of an image in any mode; transparency is laid on white."""
    pixels = np.asarray(to_rgb(value, c.size), dtype=np.float32) / 127.5 - 1.0  # (S, S, 3)
    n, P = c.size // c.patch, c.patch
    return np.ascontiguousarray(pixels.reshape(n, P, n, P, 3).transpose(0, 2, 1, 3, 4).reshape(n * n, -1))


def to_rgb(value: Any, size: int) -> Image:
    """An image (decoded, an array, or the bytes of a file) as RGB, `size` pixels square."""
    from PIL import Image

    if isinstance(value, bytes | bytearray | memoryview):
        image = Image.open(io.BytesIO(value))
    else:
        image = value if isinstance(value, Image.Image) else Image.fromarray(np.asarray(value))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert("RGB")
    return image if image.size == (size, size) else image.resize((size, size), Image.Resampling.BILINEAR)
