"""Shards: the MDS format and the sharding tool.

    from shards import ShardWriter, ShardReader, convert

Names are imported when they are used, so that `import shards` costs nothing.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shards.builder import ShardBuilder
    from shards.convert import convert
    from shards.reader import ShardReader
    from shards.writer import ShardWriter

__all__ = ["ShardBuilder", "ShardReader", "ShardWriter", "convert"]

_HOME = {
    "ShardBuilder": "shards.builder",
    "ShardReader": "shards.reader",
    "ShardWriter": "shards.writer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'shards' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps `shards.convert` the function, also after the module of the same name was imported."""

    @property
    def convert(self) -> Any:
        return import_module("shards.convert").convert

    @convert.setter
    def convert(self, module: ModuleType) -> None:
        """The import system would put the module here."""


sys.modules[__name__].__class__ = _Package
