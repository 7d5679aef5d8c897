"""From a checkpoint to text: captions of images, continuations of prompts, and a picture of both.

Generation keeps keys and values of what it has seen (`KVCache`): after the prompt each token costs one
position. Prompts of one length run together; a row that has ended is carried on and cut off afterwards.
"""

from __future__ import annotations

import base64
import html
import io
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from shards.errors import UsageError
from train.checkpoint import Checkpoints
from train.config import Config
from train.distributed import Team
from train.documents import Encoder, Media, to_rgb
from train.folder import RunFolder
from train.model import Decoder
from train.plan import build_model

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(slots=True)
class Trained:
    """A model ready for use, with what belongs to it."""

    config: Config
    encoder: Encoder
    model: Decoder
    step: int


def load(run: Path, *, step: int | None = None, device: str = "auto") -> Trained:
    """The model of a run folder, from its newest good checkpoint or that of `step`.

    Raises:
        UsageError: Not a run folder, or nothing was saved yet.
        CorruptError: No checkpoint (or not that one) verifies.
    """
    from train.loop import open_store

    known = RunFolder(run).read("config.json")
    if known is None:
        raise UsageError(
            f"{run} is no run folder", mend="name the folder that run.dir names in the run's config"
        )
    sets = [f"parallel.device={device}", "checkpoint.asynchronous=false", f"run.dir={run}"]
    config, _ = Config.from_tree(known, sets, where=str(run))
    encoder = Encoder(config)
    team = Team(config.parallel)
    model = build_model(config, encoder.tokenizer.vocab).to_empty(device=team.device)
    with tempfile.TemporaryDirectory() as scratch:
        checkpoints = Checkpoints(open_store(config), team, config.checkpoint, Path(scratch))
        state = checkpoints.load(model.state_dict(), step=step)
    if state is None:
        raise UsageError(
            f"{run} has no checkpoint yet", mend="train first; checkpoint.every says how often it saves"
        )
    return Trained(config, encoder, model.eval(), state["step"])


@torch.no_grad()
def generate(
    model: Decoder,
    prompts: Sequence[tuple[Sequence[int], Sequence[Media]]],
    *,
    eos: int,
    max_new: int,
    temperature: float = 0.0,
    top_k: int = 0,
    seed: int = 0,
) -> list[list[int]]:
    """New tokens for each prompt (ids, media), without `eos`; greedy at temperature 0.

    Args:
        max_new (int): Most tokens for a prompt; it also ends at the model's context.
        top_k (int): Draw from so many likeliest tokens. 0: from all.
        seed (int): Of the draws.
    """
    out: list[list[int]] = [[] for _ in prompts]
    for length in sorted({len(ids) for ids, _ in prompts}):
        rows = [i for i, (ids, _) in enumerate(prompts) if len(ids) == length]
        new = _generate_rows(model, [prompts[i] for i in rows], eos, max_new, temperature, top_k, seed)
        for i, tokens in zip(rows, new, strict=True):
            out[i] = tokens[: tokens.index(eos)] if eos in tokens else tokens
    return out


def _generate_rows(
    model: Decoder,
    prompts: Sequence[tuple[Sequence[int], Sequence[Media]]],
    eos: int,
    max_new: int,
    temperature: float,
    top_k: int,
    seed: int,
) -> list[list[int]]:
    device = model.embedding.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    tokens = torch.tensor([list(ids) for ids, _ in prompts], device=device)  # (B, T)
    B, T = tokens.shape
    steps = min(max_new, model.config.context - T)
    if steps < 1:
        raise UsageError(
            f"the prompt has {T} positions, the context {model.config.context}", mend="shorten the prompt"
        )
    cache = model.new_cache(B, T + steps)
    logits = model(tokens, media=stack_media([media for _, media in prompts], T, device), cache=cache)[:, -1]
    new: list[Tensor] = []
    ended = torch.zeros(B, dtype=torch.bool, device=device)
    while True:
        token = _draw(logits, temperature, top_k, generator)  # (B,)
        new.append(token)
        ended |= token == eos
        if len(new) == steps or bool(ended.all()):
            return [list(map(int, row)) for row in torch.stack(new, dim=1)]
        logits = model(token[:, None], cache=cache)[:, -1]


def _draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> Tensor:
    if temperature <= 0:
        return logits.argmax(dim=-1)
    if top_k:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    chances = torch.softmax(logits.float() / temperature, dim=-1)
    return torch.multinomial(chances, 1, generator=generator)[:, 0]


def stack_media(
    rows: Sequence[Sequence[Media]], length: int, device: torch.device
) -> dict[str, tuple[Tensor, Tensor]]:
    """The media of prompts of one length, as `Decoder.forward` takes them."""
    out: dict[str, tuple[Tensor, Tensor]] = {}
    for kind in {item.kind for row in rows for item in row}:
        items = [(r, item) for r, row in enumerate(rows) for item in row if item.kind == kind]
        join = np.stack if kind == "image" else np.concatenate
        places = np.concatenate([r * length + item.start + np.arange(item.tokens) for r, item in items])
        values = torch.from_numpy(join([item.values for _, item in items])).to(device)
        out[kind] = values, torch.from_numpy(places).to(device)
    return out


@dataclass(slots=True)
class Example:
    """One sample with what the model says of it."""

    image: Image | None
    truth: str
    generated: str


def caption(trained: Trained, samples: Sequence[Mapping[str, Any]], **options: Any) -> list[Example]:
    """What the model says of each sample's image or audio, beside the sample's own text."""
    encoder = trained.encoder
    prompts = [encoder.prompt(sample, str(i)) for i, sample in enumerate(samples)]
    new = generate(trained.model, prompts, eos=encoder.tokenizer.eos, **options)
    column = trained.config.data.image
    return [
        Example(
            to_rgb(sample[column], 96) if sample.get(column) is not None else None,
            encoder.text(sample),
            encoder.tokenizer.decode(tokens),
        )
        for sample, tokens in zip(samples, new, strict=True)
    ]


def write_grid(examples: Sequence[Example], out: Path, *, title: str) -> Path:
    """A table of image, truth and generated text: HTML or PNG by the name of `out`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix.lower() in (".html", ".htm"):
        out.write_text(_html(examples, title), encoding="utf-8")
    elif out.suffix.lower() == ".png":
        _png(examples, title).save(out)
    else:
        raise UsageError(f"{out}: a grid is .html or .png", mend="name it grid.html")
    return out


def _html(examples: Sequence[Example], title: str) -> str:
    rows = []
    for example in examples:
        picture = ""
        if example.image is not None:
            buffer = io.BytesIO()
            example.image.save(buffer, "PNG")
            picture = (
                f'<img src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}" alt="">'
            )
        same = "same" if example.truth.strip() == example.generated.strip() else "other"
        rows.append(
            f'<tr class="{same}"><td>{picture}</td><td>{html.escape(example.truth)}</td>'
            f"<td>{html.escape(example.generated)}</td></tr>"
        )
    name = html.escape(title)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title>'
        "<style>body{font:15px system-ui;margin:2em}td,th{padding:.4em 1em;text-align:left}"
        "tr.same td:last-child{color:#176639}tr.other td:last-child{color:#9a2b1f}</style>"
        f"<h1>{name}</h1><table><tr><th>image<th>truth<th>generated</tr>{''.join(rows)}</table></html>\n"
    )


def _png(examples: Sequence[Example], title: str) -> Image:
    from PIL import Image, ImageDraw, ImageFont

    row, left, width = 104, 112, 900
    canvas = Image.new("RGB", (width, 40 + row * len(examples)), "white")
    draw = ImageDraw.Draw(canvas)
    large, font = ImageFont.load_default(18), ImageFont.load_default(15)
    draw.text((8, 8), title, fill="black", font=large)
    for i, example in enumerate(examples):
        top = 40 + i * row
        if example.image is not None:
            canvas.paste(example.image, (8, top + 4))
        same = example.truth.strip() == example.generated.strip()
        draw.text((left, top + 24), example.truth[:100], fill="black", font=font)
        draw.text((left, top + 50), example.generated[:100], fill="#176639" if same else "#9a2b1f", font=font)
    return canvas
