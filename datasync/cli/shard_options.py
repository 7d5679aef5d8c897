"""Options of `datasync shard` as the library takes them: from the command line and from a recipe.

A recipe has the same names with underscores, and may write tables and lists in place of text:

    [datasets.emoji]
    source = "corpora/emoji"
    shard.columns = { text = "str", image = "png" }
    shard.split = "train=0.9,val=0.1"
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from shards.errors import UsageError
from shards.schema import parse_columns, parse_names, parse_rename
from shards.sizes import parse_bytes
from shards.split import read_split

Reader = Callable[[Any], Any]


def _mapping(parse: Callable[[str], Mapping[str, Any]]) -> Reader:
    return lambda value: dict(value) if isinstance(value, Mapping) else parse(_text(value))


def _names(value: Any) -> tuple[str, ...]:
    return tuple(map(_text, value)) if isinstance(value, list | tuple) else tuple(parse_names(_text(value)))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise UsageError(f"text is expected, not {value!r}", mend="put it in quotes")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"true or false is expected, not {value!r}", mend="write true or false")
    return value


def _number(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"a whole number is expected, not {value!r}", mend="write a number")
    return value


def _compression(value: Any) -> str | None:
    return None if value in ("none", "", None) else _text(value)


READERS: dict[str, Reader] = {
    "format": _text,
    "columns": _mapping(parse_columns),
    "select": _names,
    "drop": _names,
    "rename": _mapping(parse_rename),
    "compression": _compression,
    "size_limit": parse_bytes,
    "hashes": _names,
    "caption": _text,
    "media": _mapping(parse_columns),
    "media_check": _text,
    "media_info": _flag,
    "max_image_size": _number,
    "image_format": _text,
    "resample": _number,
    "transform": _text,
    "split": _mapping(read_split),
    "key": _text,
    "shuffle_seed": _number,
    "tokenizer": _text,
    "seq_len": _number,
    "packing": _text,
    "text": _text,
    "eos": _number,
    "delimiter": _text,
    "encoding": _text,
    "lines": _flag,
    "max_line_bytes": parse_bytes,
    "append": _flag,
    "overwrite": _flag,
    "on_error": _text,
    "workers": _number,
    "engine": _text,
    "address": _text,
}


def read_options(values: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Options as `convert` takes them; what is None is left out.

    Raises:
        UsageError: A name is not known, or a value is wrong; the message names `where`.
    """
    options = {}
    for name, value in values.items():
        if value is None:
            continue
        reader = READERS.get(name)
        if reader is None:
            near = difflib.get_close_matches(name, READERS, 1)
            raise UsageError(
                f"{where} has no option {name!r}",
                mend=f"did you mean {near[0]!r}?" if near else f"use one of: {', '.join(READERS)}",
            )
        try:
            options[name] = reader(value)
        except UsageError as error:
            raise UsageError(
                f"{where}, {name.replace('_', '-')}: {error.message}", mend=error.mend
            ) from error
    return options


def read_share(text: str | None) -> tuple[int, int] | None:
    """Read ``--task i/n``."""
    if text is None:
        return None
    i, slash, n = text.partition("/")
    if not slash or not i.isdecimal() or not n.isdecimal():
        raise UsageError(f"--task {text!r} is not I/N", mend="write 0/8, 1/8 … 7/8, one for each machine")
    return int(i), int(n)
