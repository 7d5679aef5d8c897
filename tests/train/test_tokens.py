"""Tokenizers: text comes back, special ids do not collide with text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shards.errors import UsageError
from train.tokens import load_tokenizer


@given(st.text())
@settings(max_examples=50, deadline=None)
def test_bytes_come_back(text: str) -> None:
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert tokenizer.decode([tokenizer.bos, *ids, tokenizer.eos]) == text
    assert max(ids, default=0) < min(tokenizer.bos, tokenizer.eos, tokenizer.pad)


def test_a_tokenizer_file_gets_the_special_ids_it_lacks(corpora: Path) -> None:
    pytest.importorskip("tokenizers")
    files = sorted((corpora / "tokenizers").rglob("tokenizer*.json"))
    assert files
    for path in files:
        tokenizer = load_tokenizer(str(path))
        ids = tokenizer.encode("a small red circle")
        # CLIP's file has no decoder: its marks of a word's end stay
        assert tokenizer.decode(ids).replace("</w>", " ").strip() == "a small red circle"
        assert not {tokenizer.bos, tokenizer.eos, tokenizer.pad} & set(ids)
        assert max(tokenizer.bos, tokenizer.eos, tokenizer.pad) < tokenizer.vocab


def test_a_missing_file_is_named() -> None:
    with pytest.raises(UsageError, match=r"no tokenizer at nowhere\.json"):
        load_tokenizer("nowhere.json")
