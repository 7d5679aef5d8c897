"""From a TOML file and `--set KEY=VALUE` to nested frozen dataclasses, checked key by key.

Knows nothing of training: `config.py` says which keys there are. A field's type decides what a value may be
(a number, a text, true or false, one of some words, a list of sections); the string below a field is its
meaning.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from shards.errors import UsageError


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as nested dicts."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"no such file: {path}", mend="name a training config, a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}", mend="mend the line it names") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", mend="name a TOML file") from None


def merge(tree: Mapping[str, Any], sets: Sequence[str], where: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The tree with `--set` values on top, and where each key's value came from."""
    merged, sources = _copy(tree), {key: where for key, _ in leaves(tree)}
    for text in sets:
        key, value = _parse_set(text)
        _put(merged, key, value)
        sources[key] = f"--set {text}"
    return merged, sources


def build(kind: type, tree: Mapping[str, Any], where: str, sources: Mapping[str, str]) -> Any:
    """A dataclass of type `kind` from nested dicts.

    Raises:
        UsageError: Names the key, where it was set, and what would be right.
    """
    return _Builder(kind, where, sources).build(kind, tree, "")


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with its dotted key."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def docs(kind: type, prefix: str = "") -> Iterator[tuple[str, str]]:
    """The string below each field of a dataclass, by dotted key."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    texts: dict[str, str] = {}
    for field, after in itertools.pairwise(body.body):
        named = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if named and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            texts[field.target.id] = " ".join(str(after.value.value).split())
    for name, hint in get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            yield from docs(hint, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", texts.get(name, "")


class _Builder:
    """Builds one config; keeps what every error message needs."""

    def __init__(self, root: type, where: str, sources: Mapping[str, str]) -> None:
        self.root, self.where, self.sources = root, where, sources

    def build(self, kind: type, tree: Mapping[str, Any], prefix: str) -> Any:
        hints = get_type_hints(kind)
        for name in tree:
            if name not in hints:
                raise self.unknown(f"{prefix}{name}", name, prefix, hints)
        values = {
            name: self.convert(tree[name], hint, f"{prefix}{name}")
            for name, hint in hints.items()
            if name in tree
        }
        for field in dataclasses.fields(kind):
            if field.name in values or not (
                field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            ):
                continue
            key, hint = f"{prefix}{field.name}", hints[field.name]
            if dataclasses.is_dataclass(hint):
                values[field.name] = self.build(hint, {}, f"{key}.")
                continue
            meaning = dict(docs(kind, prefix))[key]
            raise UsageError(f"{self.where}: {key} is not set", mend=f"--set {key}=…   ({meaning})")
        return kind(**values)

    def unknown(self, key: str, name: str, prefix: str, siblings: Mapping[str, Any]) -> UsageError:
        """Which key was meant: a sibling that looks alike, else a key of that name elsewhere, else the
        nearest."""
        place = next(
            (source for at, source in self.sources.items() if f"{at}.".startswith(f"{key}.")), self.where
        )
        near = [f"{prefix}{match}" for match in difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)]
        everywhere = [known for known, _ in docs(self.root)]
        same = [known for known in everywhere if known.rpartition(".")[2] == name]
        meant = near or same or difflib.get_close_matches(key, everywhere, n=1, cutoff=0.6)
        section = prefix.rstrip(".") or "the config"
        mend = f"did you mean {meant[0]}?" if meant else f"{section} has {', '.join(siblings)}"
        return UsageError(f"{place}: unknown key {key}", mend=mend)

    def convert(self, value: Any, hint: Any, key: str) -> Any:
        place = self.sources.get(key, self.where)
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, Mapping):
                raise UsageError(f"{place}: {key} is a section, not a value", mend=f"write [{key}]")
            return self.build(hint, value, f"{key}.")  # type: ignore[arg-type]
        if get_origin(hint) is Literal:
            if value not in get_args(hint):
                choices = ", ".join(str(choice) for choice in get_args(hint))
                raise UsageError(f"{place}: {key} = {value!r} is not a choice", mend=f"one of {choices}")
            return value
        if get_origin(hint) is tuple:
            if not isinstance(value, list | tuple):
                raise UsageError(f"{place}: {key} is a list, got {value!r}", mend=f"write [[{key}]]")
            return tuple(self.convert(item, get_args(hint)[0], f"{key}[{i}]") for i, item in enumerate(value))
        if hint is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
            word = _WORDS[hint]
            raise UsageError(f"{place}: {key} = {value!r} is not {word}", mend=f"give {word}")
        return value


_WORDS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}


def _copy(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _copy(value) if isinstance(value, Mapping) else value for name, value in tree.items()}


def _parse_set(text: str) -> tuple[str, Any]:
    """``a.b=c`` -> key and value; the value is TOML where it parses, else a string."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UsageError(f"--set {text}: expected KEY=VALUE", mend="for example --set optim.lr=3e-4")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        child = tree.setdefault(section, {})
        if not isinstance(child, dict):
            raise UsageError(
                f"--set {key}: {section} is a value, not a section", mend="datasync train --explain"
            )
        tree = child
    tree[name] = value
