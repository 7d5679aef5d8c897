"""From samples to tensors: targets, rows, packing, images."""

from __future__ import annotations

import io
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from shards.errors import CorruptError, UsageError
from train.config import Config, ImageConfig
from train.data import check_columns
from train.documents import Collate, Encoder, first_fit, patches, to_rgb
from train.model.decoder import IGNORE


def config(*sets: str) -> Config:
    tree = {"run": {"dir": "r", "steps": 1}, "data": {"remote": "x"}}
    return Config.from_tree(tree, ["model.context=48", *sets], where="test")[0]


def encoder(*sets: str) -> Encoder:
    return Encoder(config(*sets))


def png(color: str = "red", size: int = 32, mode: str = "RGB") -> bytes:
    out = io.BytesIO()
    Image.new(mode, (size, size), color).save(out, "PNG")
    return out.getvalue()


def test_each_position_predicts_the_next_token_of_its_document() -> None:
    e = encoder()
    (piece,) = e.pieces({"caption": "ab"})
    assert piece.ids.tolist() == [e.tokenizer.bos, 97, 98]
    assert piece.targets.tolist() == [97, 98, e.tokenizer.eos]


def test_media_positions_are_no_targets_but_the_last_predicts_the_text() -> None:
    e = encoder()
    (piece,) = e.pieces({"caption": "ab", "image": png()})
    n = ImageConfig().tokens
    assert piece.media[0].start == 1
    assert piece.targets.tolist() == [IGNORE] * n + [97, 98, e.tokenizer.eos]


@given(st.text(max_size=400))
@settings(max_examples=30, deadline=None)
def test_no_token_of_a_long_text_is_lost(text: str) -> None:
    e = encoder()
    pieces = e.pieces({"caption": text})
    assert all(len(piece.ids) <= 48 for piece in pieces)
    targets = [int(t) for piece in pieces for t in piece.targets]
    assert targets == [*text.encode(), e.tokenizer.eos]
    assert e.tokenizer.decode(targets) == text


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(50, 80))
@settings(max_examples=60, deadline=None)
def test_first_fit_places_everything_once_and_never_overfills(lengths: list[int], capacity: int) -> None:
    rows = first_fit(lengths, capacity)
    assert sorted(item for row in rows for item in row) == list(range(len(lengths)))
    assert all(sum(lengths[item] for item in row) <= capacity for row in rows)
    fullness = [sum(lengths[item] for item in row) for row in rows]
    assert all(a + b > capacity for a, b in itertools.pairwise(fullness))


def test_packed_rows_hold_the_same_targets_as_separate_ones() -> None:
    e = encoder()
    samples = [{"caption": "x" * n, "sample_id": str(n)} for n in (3, 30, 7, 12, 60, 1)]
    packed, apart = Collate(e, 1, True).batch(samples), Collate(e, 1, False).batch(samples)
    assert packed.valid == apart.valid == sum(n + 1 for n in (3, 30, 7, 12, 60, 1))
    assert len(packed.tokens) < len(apart.tokens)
    assert packed.positions is not None
    assert packed.documents is not None
    assert int((packed.documents >= 0).sum()) == packed.valid
    for row, owner in zip(packed.positions.tolist(), packed.documents.tolist(), strict=True):
        for at in range(1, len(row)):
            assert owner[at] < 0 or row[at] == (0 if owner[at] != owner[at - 1] else row[at - 1] + 1)


def test_places_of_images_point_at_their_placeholders() -> None:
    e = encoder("data.pack=true", "model.context=64")
    samples = [{"caption": "abc", "image": png()}, {"caption": "de"}, {"caption": "f", "image": png("blue")}]
    batch = Collate(e, 1, True).batch(samples)
    values, places = batch.media["image"]
    assert values.shape == (2, 16, 192)
    tokens = batch.tokens.flatten()
    assert (tokens[places] == e.tokenizer.pad).all()
    assert all(tokens[start - 1] == e.tokenizer.bos for start in (places[0], places[16]))


def test_a_step_is_cut_into_microbatches() -> None:
    made = Collate(encoder(), 3, False)([{"caption": str(i), "sample_id": str(i)} for i in range(5)])
    assert made["ids"] == list("01234")
    assert [batch.samples for batch in made["batches"]] == [1, 2, 2]


def test_ready_tokens_take_the_place_of_text() -> None:
    e = encoder("data.tokens=ids")
    (piece,) = e.pieces({"ids": np.array([5, 6, 7], np.uint16)})
    assert piece.targets.tolist() == [5, 6, 7, e.tokenizer.eos]


def test_patches_run_in_reading_order() -> None:
    pixels = np.zeros((32, 32, 3), np.uint8)
    pixels[8:16, 16:24] = 255
    found = patches(pixels, ImageConfig())
    assert found.shape == (16, 192)
    assert np.flatnonzero(found.min(axis=1) > 0).tolist() == [1 * 4 + 2]
    assert found.min() == -1.0
    assert found.max() == 1.0


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I;16", "F"])
def test_an_image_of_any_mode_becomes_rgb(mode: str) -> None:
    assert to_rgb(Image.new(mode, (20, 10)), 32).size == (32, 32)
    assert to_rgb(Image.new(mode, (20, 10)), 32).mode == "RGB"


def test_what_is_transparent_shows_white() -> None:
    image = to_rgb(Image.new("RGBA", (8, 8), (255, 0, 0, 0)), 8)
    assert image.getpixel((3, 3)) == (255, 255, 255)


def test_a_broken_image_names_sample_and_column() -> None:
    with pytest.raises(CorruptError, match=r"sample 17: column 'image'"):
        encoder().pieces({"caption": "a", "image": b"no image"}, "17")


def test_a_missing_text_column_is_named_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="no column 'caption'; it has image, title"):
        encoder().pieces({"title": "a", "image": png()}, "3")


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["data.text=title"], "data.text: the dataset has no column 'title'; it has caption, picture"),
        (["data.image=foto"], "data.image: the dataset has no column 'foto'; it has caption, picture"),
        (["data.audio=sound"], "no column 'sound'"),
    ],
)
def test_a_column_that_the_dataset_lacks_is_refused_before_the_first_step(
    sets: list[str], message: str
) -> None:
    streams = [{"caption": "str", "picture": "png"}, {"caption": "str"}]
    with pytest.raises(UsageError, match=message):
        check_columns(config(*sets).data, streams)
    check_columns(config("data.image=picture").data, streams)
    check_columns(config().data, streams)  # the usual image column may be absent: text alone


def test_media_that_cannot_fit_are_refused_at_once() -> None:
    with pytest.raises(UsageError, match=r"model\.context is 12"):
        encoder("model.context=12")


def test_a_batch_goes_to_a_device_whole() -> None:
    batch = Collate(encoder(), 1, True).batch([{"caption": "a", "image": png(), "sample_id": "0"}])
    moved = batch.to(torch.device("cpu"))
    assert torch.equal(moved.tokens, batch.tokens)
    assert moved.valid == batch.valid
    assert moved.ids == ["0"]
