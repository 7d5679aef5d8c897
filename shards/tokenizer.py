"""Tokenizers by name: bytes, a `tokenizer.json` of Hugging Face, a BPE file of tiktoken.

    bytes                    the bytes of the UTF-8 text; 256 ends a document
    PATH/tokenizer.json      as the file says, but without its padding, truncation and special tokens
    PATH/x.tiktoken          lines of a token in base64 and its rank

A tiktoken file does not say how text is cut into words; that follows from the size of its vocabulary, as in
the models that such files are known from.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from shards.errors import UsageError

_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "<|im_end|>", "[SEP]", "<end>")

# How GPT-2, GPT-4 and their kin cut text into words before merging.
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT4 = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Tokenizer:
    """From texts to ids.

    Args:
        vocabulary (int): Ids are below this.
        eos (int): The id behind each document.
        model (Any): The tokenizer of the `tokenizers` package, or None for bytes.
    """

    def __init__(self, vocabulary: int, eos: int, model: Any = None) -> None:
        self.vocabulary = vocabulary
        self.eos = eos
        self.dtype = "uint16" if vocabulary <= 1 << 16 else "uint32"
        self._model = model

    def encode(self, texts: Sequence[str]) -> list[np.ndarray[Any, np.dtype[Any]]]:
        """The ids of each text, `eos` behind them."""
        if self._model is None:
            return [self._ended(np.frombuffer(text.encode(errors="replace"), np.uint8)) for text in texts]
        encoded = self._model.encode_batch(list(texts), add_special_tokens=False)
        return [self._ended(one.ids) for one in encoded]

    def _ended(self, ids: Any) -> np.ndarray[Any, np.dtype[Any]]:
        tokens = np.empty(len(ids) + 1, self.dtype)
        tokens[:-1] = ids
        tokens[-1] = self.eos
        return tokens


@lru_cache(4)
def load_tokenizer(name: str, eos: int | None = None) -> Tokenizer:
    """The tokenizer that `name` says; `eos` in place of what it calls its end.

    Raises:
        UsageError: There is no such file, it is damaged, or it does not say what ends a document.
    """
    if name == "bytes":
        return Tokenizer(257, 256 if eos is None else _known(eos, 257, name))
    if not os.path.isfile(name):
        raise UsageError(
            f"--tokenizer: there is no file {name}", mend="give bytes, or the path of a tokenizer.json"
        )
    try:
        import tokenizers
    except ImportError as error:
        raise UsageError(
            "--tokenizer needs the package tokenizers", mend="pip install 'datasync[train]'"
        ) from error
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the workers are the parallelism
    try:
        model = tokenizers.Tokenizer.from_file(name) if name.endswith(".json") else _from_tiktoken(Path(name))
    except Exception as error:
        raise UsageError(
            f"--tokenizer {name} cannot be read: {error}",
            mend="give a tokenizer.json, or a tiktoken file of BPE ranks",
        ) from error
    model.no_padding()
    model.no_truncation()
    size = model.get_vocab_size(with_added_tokens=True)
    vocabulary = max(size, max(model.get_vocab(with_added_tokens=True).values(), default=0) + 1)
    if eos is not None:
        return Tokenizer(vocabulary, _known(eos, vocabulary, name), model)
    found = next((number for end in _ENDS if (number := model.token_to_id(end)) is not None), None)
    if found is None:
        raise UsageError(
            f"--tokenizer {name} does not say which token ends a document", mend="give it: --eos ID"
        )
    return Tokenizer(vocabulary, found, model)


def _known(eos: int, vocabulary: int, name: str) -> int:
    if not 0 <= eos < vocabulary:
        raise UsageError(f"--eos {eos} is no token of {name}", mend=f"give one from 0 to {vocabulary - 1}")
    return eos


def _from_tiktoken(path: Path) -> Any:
    """A byte-level BPE tokenizer with the ranks of a tiktoken file."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except ValueError as error:
                raise ValueError(f"line {number} is not a token in base64 and its rank") from error
    letters = _byte_letters()

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    vocabulary = {spelled(token): rank for token, rank in ranks.items()}
    merges = [(spelled(left), spelled(right)) for left, right in _merges(ranks)]
    model = Tokenizer(models.BPE(vocabulary, merges, fuse_unk=False))
    pattern = _GPT2 if len(ranks) < 60_000 else _GPT4
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    model.decoder = decoders.ByteLevel()
    if "<|endoftext|>" not in vocabulary:
        model.add_special_tokens([AddedToken("<|endoftext|>", special=True, normalized=False)])
    return model


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The pair that each token is merged from: what merging its bytes with lower ranks alone comes to."""
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) < 2:
            continue
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            pairs = [ranks.get(left + right, rank) for left, right in pairwise(parts)]
            best = min(range(len(pairs)), key=pairs.__getitem__)
            if pairs[best] >= rank:
                break
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        if len(parts) == 2:
            merges.append((parts[0], parts[1]))
    return merges


def _byte_letters() -> list[str]:
    """The letter for each byte in byte-level BPE files: itself where it prints, else one from 256 on."""
    letters, spare = [], 256
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255:
            letters.append(chr(byte))
        else:
            letters.append(chr(spare))
            spare += 1
    return letters
