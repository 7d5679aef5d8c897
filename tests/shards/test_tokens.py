"""Tokens: as the tokenizer's own library gives them, packed without losing one, boundaries kept."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shards.convert import convert
from shards.errors import UsageError
from shards.tokenizer import load_tokenizer
from shards.tokens import best_fit
from tests.shards.corpus import rows, tree


@pytest.fixture
def verses(tmp_path: Path) -> tuple[Path, list[str]]:
    texts = [f"verse {number}: " + "and it was good é世 " * (number % 9) for number in range(120)]
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": text, "n": n}) + "\n" for n, text in enumerate(texts))
    )
    return tmp_path / "a.jsonl", texts


def documents(dataset: Path) -> list[list[int]]:
    """The pieces of documents in a packed dataset, in order."""
    pieces = []
    for row in rows(dataset):
        at = 0
        for length in row["documents"].tolist():
            pieces.append(row["tokens"][at : at + length].tolist())
            at += length
        assert set(row["tokens"][at:].tolist()) <= {256}
    return pieces


def test_bytes_without_a_length_are_one_sample_a_document(verses, tmp_path: Path) -> None:
    path, texts = verses
    result = convert(path, tmp_path / "out", tokenizer="bytes")
    assert result.columns == {"n": "int", "tokens": "ndarray:uint16"}
    for row, text in zip(rows(tmp_path / "out"), texts, strict=True):
        assert row["tokens"].tolist() == [*text.encode(), 256]


def test_concatenation_loses_no_token_and_keeps_boundaries(verses, tmp_path: Path) -> None:
    path, texts = verses
    result = convert(path, tmp_path / "out", tokenizer="bytes", seq_len=100)
    assert result.columns == {"documents": "ndarray:int32", "tokens": "ndarray:uint16:100"}
    stream = [token for text in texts for token in (*text.encode(), 256)]
    found = rows(tmp_path / "out")
    assert len(found) == -(-len(stream) // 100)
    assert [token for row in found for token in row["tokens"].tolist()][: len(stream)] == stream
    assert [token for piece in documents(tmp_path / "out") for token in piece] == stream
    assert all(row["documents"].sum() == 100 for row in found[:-1])


def test_best_fit_cuts_no_document_that_fits(verses, tmp_path: Path) -> None:
    path, texts = verses
    convert(path, tmp_path / "out", tokenizer="bytes", seq_len=100, packing="best-fit")
    expected = []
    for text in texts:
        tokens = [*text.encode(), 256]
        expected += [tokens[at : at + 100] for at in range(0, len(tokens), 100)]
    assert sorted(documents(tmp_path / "out")) == sorted(expected)


def test_packing_does_not_depend_on_workers(verses, tmp_path: Path) -> None:
    path, _ = verses
    for packing in ("concat", "best-fit"):
        options = {"tokenizer": "bytes", "seq_len": 64, "packing": packing, "size_limit": 2048}
        convert(path, tmp_path / f"{packing}1", workers=1, **options)
        convert(path, tmp_path / f"{packing}2", workers=2, **options)
        assert tree(tmp_path / f"{packing}1") == tree(tmp_path / f"{packing}2")


def test_splits_are_packed_apart(verses, tmp_path: Path) -> None:
    path, _ = verses
    convert(path, tmp_path / "out", tokenizer="bytes", seq_len=64, split={"a": 0.5, "b": 0.5}, key="n")
    whole = sum(len(piece) for name in "ab" for piece in documents(tmp_path / "out" / name))
    convert(path, tmp_path / "all", tokenizer="bytes", seq_len=64)
    assert whole == sum(len(piece) for piece in documents(tmp_path / "all"))


def test_a_tokenizer_file_gives_what_its_library_gives(corpora: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    path = corpora / "tokenizers" / "gpt2" / "tokenizer.json"
    model = tokenizers.Tokenizer.from_file(str(path))
    lines = (corpora / "text" / "kjv.jsonl").read_text().splitlines()[:300]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    convert(tmp_path / "a.jsonl", tmp_path / "out", tokenizer=str(path), select=("text",))
    end = model.token_to_id("<|endoftext|>")
    for row, line in zip(rows(tmp_path / "out"), lines, strict=True):
        assert row["tokens"].dtype == np.uint16
        assert row["tokens"].tolist() == [*model.encode(json.loads(line)["text"]).ids, end]


def test_a_tiktoken_file_gives_the_same_ids_as_the_tokenizer_it_was_made_from(
    corpora: Path, tmp_path: Path
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    from shards.tokenizer import _byte_letters

    model = tokenizers.Tokenizer.from_file(str(corpora / "tokenizers" / "gpt2" / "tokenizer.json"))
    bytes_of = {letter: bytes([byte]) for byte, letter in enumerate(_byte_letters())}
    with open(tmp_path / "gpt2.tiktoken", "wb") as file:
        for token, rank in sorted(model.get_vocab(with_added_tokens=False).items(), key=lambda item: item[1]):
            if token != "<|endoftext|>":
                raw = b"".join(bytes_of[letter] for letter in token)
                file.write(base64.b64encode(raw) + f" {rank}\n".encode())
    ours = load_tokenizer(str(tmp_path / "gpt2.tiktoken"))
    texts = [
        json.loads(line)["text"] for line in (corpora / "text" / "kjv.jsonl").read_text().splitlines()[::400]
    ]
    texts += ["  spaces   and\n\nlines ", "1234567 it's 世界 é", "tabs\t\tx"]
    for text, ids in zip(texts, ours.encode(texts), strict=True):
        assert ids[:-1].tolist() == model.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": "nofile.json"}, "no file nofile.json"),
        ({"tokenizer": "bytes", "text": "body"}, "no column 'body'"),
        ({"tokenizer": "bytes", "eos": 300}, "--eos 300"),
        ({"seq_len": 10}, "--seq-len needs --tokenizer"),
        ({"tokenizer": "bytes", "seq_len": 1}, "--seq-len"),
    ],
)
def test_wrong_token_options_are_refused(verses, tmp_path: Path, options, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        convert(verses[0], tmp_path / "out", **options)


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 50), max_size=80), room=st.integers(50, 80))
def test_best_fit_packs_everything_once_and_never_too_much(lengths: list[int], room: int) -> None:
    bins = best_fit(lengths, room)
    assert sorted(number for chosen in bins for number in chosen) == list(range(len(lengths)))
    loads = [sum(lengths[number] for number in chosen) for chosen in bins]
    assert all(load <= room for load in loads)
    if len(loads) > 1:  # no two bins could have been one
        assert sum(sorted(loads)[:2]) > room
