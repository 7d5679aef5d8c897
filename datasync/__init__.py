"""datasync: shard corpora once, replicate them to every cluster, stream them into training.

    from datasync import LocalDataset, Stream, StreamingDataLoader, StreamingDataset

The classes are imported when they are first used: they need PyTorch, the command line does not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shards.version import __version__

if TYPE_CHECKING:
    from datasync.streaming.dataset import StreamingDataset
    from datasync.streaming.loader import StreamingDataLoader
    from datasync.streaming.local import LocalDataset
    from datasync.streaming.stream import Stream

__all__ = ["LocalDataset", "Stream", "StreamingDataLoader", "StreamingDataset", "__version__"]

_HOMES = {
    "LocalDataset": "datasync.streaming.local",
    "Stream": "datasync.streaming.stream",
    "StreamingDataLoader": "datasync.streaming.loader",
    "StreamingDataset": "datasync.streaming.dataset",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'datasync' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"datasync.{name} needs PyTorch\n  mend: pip install 'datasync[train]'", name="torch"
        ) from error


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
