"""What a job may be told. Everything here but the last group decides the bytes of the dataset."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shards import compression as _compression
from shards.digests import check_algorithm
from shards.errors import UsageError
from shards.media import CHECKS, KINDS, WHOLE
from shards.sizes import parse_bytes
from shards.sources.base import SourceOptions
from shards.split import parse_split

Transform = Callable[[dict[str, Any]], "dict[str, Any] | Iterable[dict[str, Any]] | None"]

ENGINES = ("local", "ray")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """Options of `convert`, each the option of `datasync shard` of that name.

    Args:
        format (str | None): Kind of source; None finds out.
        columns (Mapping[str, str]): Column -> encoding, in place of what would be inferred.
        select (tuple[str, ...]): Take only these columns.
        drop (tuple[str, ...]): Leave these columns out.
        rename (Mapping[str, str]): Name in the source -> name in the dataset.
        compression (str | None): As in the index. Default: ``zstd:3``.
        size_limit (int | str): Bytes that a raw shard does not exceed. Default: 64 MiB.
        hashes (tuple[str, ...]): Digests to keep beside sha256 and xxh3_64.
        caption (str): Name of the column made from text beside media. Default: ``caption``.
        media (Mapping[str, str]): Column -> ``path`` or ``url``: what names files that are to be read.
        media_check (str | None): ``none``, ``kind``, ``whole`` or ``full``; None is ``whole`` for folders of
        media
            and ``kind`` for media inside other files, whose own lengths vouch for it.
        media_info (bool): Add `image.width` and the like. Default: ``False``.
        max_image_size (int | None): Shrink images whose longer side is longer.
        image_format (str | None): Store images as ``jpeg``, ``png`` or ``webp``.
        resample (int | None): Store audio as 16-bit WAV of this rate.
        transform (str | Transform | None): ``module:function`` from a row to a row, to none or to several.
        split (Mapping[str, float]): Name -> share; rows are divided by a hash of their key.
        key (str | None): Column that identifies a row for `split`; None is what the source says.
        shuffle_seed (int | None): Shuffle all rows.
        tokenizer (str | None): ``bytes``, or the path of a ``tokenizer.json`` or tiktoken file.
        seq_len (int | None): Tokens a sample; None is one sample a document.
        packing (str): ``concat`` or ``best-fit``. Default: ``concat``.
        text (str): Column that is tokenised. Default: ``text``.
        eos (int | None): Token put after each document; None is what the tokenizer file calls its end.
        delimiter (str | None): Separator in delimited text.
        encoding (str | None): Character set of text files.
        lines (bool): Text: one row a line, rather than one a file.
        max_line_bytes (int): Longest line taken as a row. Default: 128 MiB.
        append (bool): Add to the dataset that is there.
        overwrite (bool): Publish in place of a dataset made from something else.
        on_error (str): ``fail`` or ``skip``. Default: ``fail``.
        workers (int | None): Processes. Default: one a CPU.
        engine (str): ``local`` or ``ray``. Default: ``local``.
        address (str | None): The Ray cluster; None starts one here.
        task (tuple[int, int] | None): (i, n): run only the tasks whose number is i modulo n; commit nothing.
            A shuffle has two rounds: run every share once, and then again.
        quiet (bool): Show no progress.
    """

    format: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    select: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    compression: str | None = "zstd:3"
    size_limit: int | str = 1 << 26
    hashes: tuple[str, ...] = ()
    caption: str = "caption"
    media: Mapping[str, str] = field(default_factory=dict)
    media_check: str | None = None
    media_info: bool = False
    max_image_size: int | None = None
    image_format: str | None = None
    resample: int | None = None
    transform: str | Transform | None = None
    split: Mapping[str, float] = field(default_factory=dict)
    key: str | None = None
    shuffle_seed: int | None = None
    tokenizer: str | None = None
    seq_len: int | None = None
    packing: str = "concat"
    text: str = "text"
    eos: int | None = None
    delimiter: str | None = None
    encoding: str | None = None
    lines: bool = False
    max_line_bytes: int = 1 << 27
    append: bool = False

    overwrite: bool = False
    on_error: str = "fail"
    workers: int | None = None
    engine: str = "local"
    address: str | None = None
    task: tuple[int, int] | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        _one_of("on_error", self.on_error, ("fail", "skip"))
        _one_of("engine", self.engine, ENGINES)
        if self.media_check is not None:
            _one_of("media_check", self.media_check, CHECKS)
        _one_of("packing", self.packing, ("concat", "best-fit"))
        if self.image_format is not None:
            _one_of("image_format", self.image_format, ("jpeg", "png", "webp"))
        for value in self.media.values():
            _one_of("media", value, ("path", "url", *KINDS))
        if self.compression:
            _compression.parse(self.compression)
        for name in self.hashes:
            check_algorithm(name)
        for name, least in (("workers", 1), ("seq_len", 2), ("max_image_size", 1), ("resample", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"--{name.replace('_', '-')} is {value}", mend=f"give at least {least}")
        if self.task is not None and not 0 <= self.task[0] < self.task[1]:
            raise UsageError(f"--task {self.task[0]}/{self.task[1]}", mend="give i/n with i from 0 to n-1")
        if self.seq_len is not None and self.tokenizer is None:
            raise UsageError("--seq-len needs --tokenizer", mend="name one: --tokenizer bytes")
        if self.packing != "concat" and self.seq_len is None:
            raise UsageError("--packing needs --seq-len", mend="write --tokenizer bytes --seq-len 2048")
        if self.text != "text" and self.tokenizer is None:
            raise UsageError("--text needs --tokenizer", mend="name one: --tokenizer bytes")
        if self.encoding is not None:
            try:
                codecs.lookup(self.encoding)
            except LookupError as error:
                raise UsageError(
                    f"--encoding: there is no character set {self.encoding!r}",
                    mend="write utf-8, latin-1, cp1252, …",
                ) from error
        if self.delimiter is not None and (len(self.delimiter) != 1 or self.delimiter in '"\r\n'):
            raise UsageError(
                f"--delimiter is {self.delimiter!r}", mend="give one character; a tab is $'\\t' in a shell"
            )
        if self.eos is not None and self.tokenizer is None:
            raise UsageError("--eos needs --tokenizer", mend="name one: --tokenizer bytes")
        if self.key is not None and not self.split:
            raise UsageError("--key needs --split", mend="write --split train=0.98,val=0.02")
        if self.append and self.overwrite:
            raise UsageError("--append and --overwrite exclude each other", mend="choose one")
        parse_split(self.split)
        if self.limit_bytes < 1024:
            raise UsageError(f"--size-limit is {self.size_limit}", mend="64mb is a good size")

    @property
    def limit_bytes(self) -> int:
        """`size_limit` as a number."""
        return parse_bytes(self.size_limit)

    def source_options(self) -> SourceOptions:
        """What of this a source is told."""
        return SourceOptions(
            target_bytes=self.limit_bytes,
            columns=self._read_columns(),
            media=dict(self.media),
            caption=self.caption,
            max_line_bytes=self.max_line_bytes,
            check=self.media_check or WHOLE,
            delimiter=self.delimiter,
            encoding=self.encoding,
            whole_files=not self.lines,
        )

    def _read_columns(self) -> tuple[str, ...] | None:
        """The columns that have to be read, where that is less than all: a transform may want any of them."""
        if self.transform is not None or not self.select:
            return None
        more = [self.key] if self.key else []
        more += [self.text] if self.tokenizer else []
        return tuple(dict.fromkeys([*self.select, *self.columns, *more]))

    def identity(self) -> dict[str, Any]:
        """What of this decides the bytes, as JSON; the tokenizer and the transform by their content."""
        from shards.plan import code_identity, file_identity

        values = {name: value for name, value in asdict(self).items() if name not in _HOW}
        values["size_limit"] = self.limit_bytes
        values["transform"] = code_identity(self.transform)
        values["tokenizer"] = file_identity(self.tokenizer) if self.tokenizer else None
        return values


_HOW = frozenset({"overwrite", "on_error", "workers", "engine", "address", "task", "quiet"})


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"--{name.replace('_', '-')} is {value!r}", mend=f"use one of: {', '.join(allowed)}")
