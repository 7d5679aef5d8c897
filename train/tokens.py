"""Text to token ids and back: bytes, or any `tokenizer.json`.

A tokenizer here has three ids beyond its text: `bos` opens a document, `eos` closes it, `pad` fills rows and
stands where media go. Ids that a tokenizer file lacks are added above its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Protocol

from shards.errors import UsageError


class Tokenizer(Protocol):
    """What the trainer needs of a tokenizer."""

    bos: int
    eos: int
    pad: int
    vocab: int

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without `bos` and `eos`."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids; special ones are left out."""


class ByteTokenizer:
    """One token a byte of UTF-8: no file, no unknown characters."""

    bos, eos, pad, vocab = 256, 257, 258, 259

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class FileTokenizer:
    """A Hugging Face `tokenizer.json`; its padding and truncation are switched off."""

    _NAMES: ClassVar[dict[str, tuple[str, ...]]] = {
        "bos": ("<s>", "<|begin_of_text|>", "<|startoftext|>", "<|endoftext|>", "[CLS]"),
        "eos": ("</s>", "<|end_of_text|>", "<|endoftext|>", "[SEP]"),
        "pad": ("<pad>", "<|pad|>", "[PAD]"),
    }

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Reader

        if not path.is_file():
            raise UsageError(
                f"no tokenizer at {path}", mend='data.tokenizer is "bytes" or the path of a tokenizer.json'
            )
        try:
            self._reader = Reader.from_file(str(path))
        except Exception as error:  # noqa: BLE001  it raises nothing narrower
            raise UsageError(
                f"{path} is no tokenizer: {error}",
                mend='data.tokenizer is "bytes" or the path of a tokenizer.json',
            ) from None
        self._reader.no_padding()
        self._reader.no_truncation()
        self.vocab = self._own = self._reader.get_vocab_size(with_added_tokens=True)
        self.bos, self.eos, self.pad = (self._special(names) for names in self._NAMES.values())

    def _special(self, names: Sequence[str]) -> int:
        known = (self._reader.token_to_id(name) for name in names)
        found = next((i for i in known if i is not None), None)
        if found is None:
            found, self.vocab = self.vocab, self.vocab + 1
        return found

    def encode(self, text: str) -> list[int]:
        return list(self._reader.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._reader.decode([i for i in ids if i < self._own], skip_special_tokens=True))


def load_tokenizer(name: str) -> Tokenizer:
    """``bytes``, or the tokenizer of a file."""
    return ByteTokenizer() if name == "bytes" else FileTokenizer(Path(name))
