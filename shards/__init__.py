"""Shards: the MDS format and the sharding tool.

    from shards import ShardWriter, ShardReader, convert

Names are imported when they are used, so that `import shards` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shards.convert import convert
    from shards.reader import ShardReader
    from shards.writer import ShardBuilder, ShardWriter

__all__ = ["ShardBuilder", "ShardReader", "ShardWriter", "convert"]

_HOME = {
    "ShardBuilder": "shards.builder",
    "ShardReader": "shards.reader",
    "ShardWriter": "shards.writer",
    "convert": "shards.convert",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'shards' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
