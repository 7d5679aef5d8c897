"""Replication: every cluster has a dataset whole, or you know exactly what is missing.

`replicate` is here; `verify` and `repair` are in the modules of those names. The names are imported when they
are used: `ops` reads this package's layout, and this package writes the receipts of `ops`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasync.replicate.options import Options, Outcome, Stop
    from datasync.replicate.run import replicate

__all__ = ["Options", "Outcome", "Stop", "replicate"]

_HOMES = {"Options": "options", "Outcome": "options", "Stop": "options", "replicate": "run"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"datasync.replicate.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
