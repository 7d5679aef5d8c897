"""Text to tokens, and documents to samples of one length.

    a document's text ──► tokens, `eos` behind them ──► without --seq-len: one sample a document
                                                    ──► with it: samples of exactly that many tokens

A sample of `seq_len` tokens has two columns: `tokens`, and `documents`, the lengths of the pieces of
documents that it is made of, in order, so that a trainer can keep attention inside them. What is left behind
the last piece is padding (`eos`) that no length counts. No token is dropped.

    concat      documents end to end, cut every seq_len tokens; only the last sample of a task is padded
    best-fit    documents are cut only where they are longer than a sample; the pieces go, longest first, into
                the sample with the least room that still holds them, a few thousand at a time

Packing never crosses a task, so it is the same for any number of workers (invariant 3). Token ids are stored
as uint16 where the vocabulary allows, else as uint32.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from shards.errors import UsageError
from shards.options import ConvertOptions
from shards.schema import Column, Schema
from shards.sources.base import Bad, Row
from shards.tokenizer import Tokenizer, load_tokenizer

TOKENS, DOCUMENTS = "tokens", "documents"
_TEXTS_AT_ONCE = 256
_PIECES_AT_ONCE = 4096

Ids = np.ndarray[Any, np.dtype[Any]]


def token_schema(schema: Schema, options: ConvertOptions) -> Schema:
    """The columns of a tokenised dataset: the text is read and not stored, tokens are stored and not read.

    Raises:
        UsageError: There is no such text column.
    """
    text = _text_column(schema, options)
    dtype = load_tokenizer(options.tokenizer or "", options.eos).dtype
    others = [column for column in schema.columns if column is not text]
    if options.seq_len is None:
        made = [Column(name=TOKENS, encoding=f"ndarray:{dtype}", source="", made=True)]
        clash = [column.name for column in others if column.name == TOKENS]
        if clash:
            raise UsageError(f"the source has a column {TOKENS!r} too", mend=f"--rename {TOKENS}=…")
    else:
        made = [
            Column(name=TOKENS, encoding=f"ndarray:{dtype}:{options.seq_len}", source="", made=True),
            Column(name=DOCUMENTS, encoding="ndarray:int32", source="", made=True),
        ]
        others = [replace(column, encoding="") for column in others if column.source == options.key]
    read = replace(text, encoding="", nullable=False)
    return Schema(tuple(sorted((*others, *made, read), key=lambda column: column.name)))


def _text_column(schema: Schema, options: ConvertOptions) -> Column:
    for column in schema.columns:
        if options.text in (column.source, column.name):
            return column
    raise UsageError(
        f"--tokenizer: there is no column {options.text!r} to tokenise",
        mend=f"name it with --text: {', '.join(column.name for column in schema.columns)}",
    )


class Packer:
    """Rows with text in, rows with tokens out. One for each task and split.

    Args:
        options (ConvertOptions): Tokenizer, length, packing.
        schema (Schema): What `token_schema` made.
    """

    def __init__(self, options: ConvertOptions, schema: Schema) -> None:
        self._text = _text_column(schema, options).name
        self._hidden = frozenset(column.name for column in schema.columns if not column.encoding)
        self._tokenizer: Tokenizer = load_tokenizer(options.tokenizer or "", options.eos)
        self._waiting: list[Row] = []
        self._length = options.seq_len
        self._pack: _Concat | _BestFit | None = None
        if options.seq_len is not None:
            kind = _Concat if options.packing == "concat" else _BestFit
            self._pack = kind(options.seq_len, self._tokenizer)

    def feed(self, row: Row) -> Iterator[Row | Bad]:
        """Take a row; the rows that are now finished."""
        if not isinstance(row.values[self._text], str):
            kind = type(row.values[self._text]).__name__
            yield Bad(f"the column {self._text!r} is no text but {kind}", row.file, row.at)
            return
        self._waiting.append(row)
        if len(self._waiting) >= _TEXTS_AT_ONCE:
            yield from self._encode()

    def finish(self) -> Iterator[Row | Bad]:
        """The rows that are left."""
        last = self._waiting[-1] if self._waiting else None
        yield from self._encode()
        if self._pack is not None:
            yield from (_sample(part, last) for part in self._pack.finish())

    def _encode(self) -> Iterator[Row | Bad]:
        rows, self._waiting = self._waiting, []
        for row, ids in zip(
            rows, self._tokenizer.encode([row.values[self._text] for row in rows]), strict=True
        ):
            if self._pack is None:
                values = {name: value for name, value in row.values.items() if name not in self._hidden}
                yield row._replace(values={**values, TOKENS: ids})
            else:
                yield from (_sample(part, row) for part in self._pack.feed(ids))


def _sample(part: tuple[Ids, list[int]], row: Row | None) -> Row:
    tokens, lengths = part
    values = {TOKENS: tokens, DOCUMENTS: np.array(lengths, np.int32)}
    return Row(values, row.file if row is not None else "", row.at if row is not None else "")


class _Concat:
    """Documents end to end."""

    def __init__(self, length: int, tokenizer: Tokenizer) -> None:
        self._length = length
        self._tokenizer = tokenizer
        self._tokens = np.full(length, tokenizer.eos, tokenizer.dtype)
        self._filled = 0
        self._documents: list[int] = []

    def feed(self, ids: Ids) -> Iterator[tuple[Ids, list[int]]]:
        while len(ids):
            take = min(self._length - self._filled, len(ids))
            self._tokens[self._filled : self._filled + take] = ids[:take]
            self._documents.append(take)
            self._filled += take
            ids = ids[take:]
            if self._filled == self._length:
                yield from self.finish()

    def finish(self) -> Iterator[tuple[Ids, list[int]]]:
        if self._filled:
            yield self._tokens, self._documents
            self._tokens = np.full(self._length, self._tokenizer.eos, self._tokenizer.dtype)
            self._documents, self._filled = [], 0


class _BestFit:
    """Pieces into the sample with the least room that holds them."""

    def __init__(self, length: int, tokenizer: Tokenizer) -> None:
        self._length = length
        self._tokenizer = tokenizer
        self._pieces: list[Ids] = []

    def feed(self, ids: Ids) -> Iterator[tuple[Ids, list[int]]]:
        self._pieces += [ids[at : at + self._length] for at in range(0, len(ids), self._length)]
        if len(self._pieces) >= _PIECES_AT_ONCE:
            yield from self.finish()

    def finish(self) -> Iterator[tuple[Ids, list[int]]]:
        pieces, self._pieces = self._pieces, []
        for chosen in best_fit([len(piece) for piece in pieces], self._length):
            tokens = np.full(self._length, self._tokenizer.eos, self._tokenizer.dtype)
            filled = 0
            for number in chosen:
                tokens[filled : filled + len(pieces[number])] = pieces[number]
                filled += len(pieces[number])
            yield tokens, [len(pieces[number]) for number in chosen]


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Bins of numbers of items, no bin above `room`: best fit decreasing, ties by number.

    Args:
        lengths (Sequence[int]): Length of each item, from 1 to `room`.
        room (int): What a bin holds.
    """
    bins: list[list[int]] = []
    left: list[tuple[int, int]] = []  # (room left, bin), sorted
    for item in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        length = lengths[item]
        at = bisect.bisect_left(left, (length, -1))
        if at == len(left):
            bins.append([item])
            rest, number = room - length, len(bins) - 1
        else:
            rest, number = left.pop(at)
            bins[number].append(item)
            rest -= length
        if rest:
            bisect.insort(left, (rest, number))
    return [sorted(chosen) for chosen in bins]
