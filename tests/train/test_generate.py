"""Generation: neither the cache nor other prompts change anything; grids are safe to open."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from shards.errors import UsageError
from train.config import Config
from train.documents import Encoder, Media
from train.generate import Example, generate, stack_media, write_grid
from train.model import Decoder
from train.model.decoder import init_weights
from train.plan import build_model

TREE = {"run": {"dir": "r", "steps": 1}, "data": {"remote": "x"}, "model": {"size": "0.2m", "context": 64}}


@pytest.fixture(scope="module")
def model() -> Decoder:
    made = build_model(Config.from_tree(TREE, where="test")[0], 259).to_empty(device="cpu")
    init_weights(made, 1)
    with torch.no_grad():
        for p in made.parameters():
            p.mul_(8.0 if p.dim() > 1 else 1.0)
    return made.eval()


def slow(model: Decoder, ids: list[int], media: list[Media], new: int) -> list[int]:
    """Greedy generation without a cache."""
    tokens = list(ids)
    with torch.no_grad():
        for _ in range(new):
            given = stack_media([media], len(tokens), torch.device("cpu"))
            tokens.append(int(model(torch.tensor([tokens]), media=given)[0, -1].argmax()))
    return tokens[len(ids) :]


def prompts() -> list[tuple[list[int], list[Media]]]:
    encoder = Encoder(Config.from_tree(TREE, where="test")[0])
    red = np.full((32, 32, 3), (255, 0, 0), np.uint8)
    out = [encoder.prompt({"image": red}), encoder.prompt({"image": 255 - red})]
    return [*out, ([256, 72, 105], []), ([256, 65], []), ([256, 66], [])]


def test_the_cache_and_the_company_of_others_change_nothing(model: Decoder) -> None:
    together = generate(model, prompts(), eos=-1, max_new=20)
    assert together == [slow(model, ids, media, 20) for ids, media in prompts()]
    assert len({tuple(row) for row in together}) > 1


def test_it_ends_at_eos_and_at_the_context(model: Decoder) -> None:
    (row,) = generate(model, [([256, 65], [])], eos=-1, max_new=10)
    (cut,) = generate(model, [([256, 65], [])], eos=row[3], max_new=10)
    assert cut == row[: row.index(row[3])]
    (whole,) = generate(model, [([256, 65], [])], eos=-1, max_new=1000)
    assert len(whole) == 62
    with pytest.raises(UsageError, match="the context 64"):
        generate(model, [([256] * 64, [])], eos=-1, max_new=1)


def test_draws_depend_on_the_seed_and_top_k_limits_them(model: Decoder) -> None:
    with torch.no_grad():
        ids = [256, 65]
        draws = [
            generate(model, [(ids, [])], eos=-1, max_new=12, temperature=3.0, seed=s)[0] for s in (1, 1, 2)
        ]
        assert draws[0] == draws[1] != draws[2]
        greedy = generate(model, [(ids, [])], eos=-1, max_new=12)
        assert generate(model, [(ids, [])], eos=-1, max_new=12, temperature=3.0, top_k=1, seed=5) == greedy


def test_a_page_escapes_what_captions_say(tmp_path: Path) -> None:
    picture = Image.new("RGB", (96, 96), "red")
    page = write_grid(
        [Example(picture, "<script>alert(1)</script>", "a & b"), Example(None, "same", "same")],
        tmp_path / "grid.html", title="<run>",
    ).read_text()  # fmt: skip
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "a &amp; b" in page
    assert 'class="same"' in page
    assert "data:image/png;base64," in page


def test_a_picture_shows_every_example(tmp_path: Path) -> None:
    out = write_grid(
        [Example(Image.new("RGB", (96, 96), "red"), "a", "b")] * 3, tmp_path / "grid.png", title="run"
    )
    image = Image.open(out)
    assert [image.getpixel((50, 40 + 104 * i + 50)) for i in range(3)] == [(255, 0, 0)] * 3
    with pytest.raises(UsageError, match=r"\.html or \.png"):
        write_grid([], tmp_path / "grid.gif", title="run")
