"""Errors of stores and runs, beside those of `shards.errors`, which are offered here again."""

from __future__ import annotations

from shards.errors import (
    ConflictError,
    CorruptError,
    DatasyncError,
    DeniedError,
    FormatError,
    NotFoundError,
    StoreError,
    ThrottledError,
    TransientError,
    UnsupportedError,
    UsageError,
)

__all__ = [
    "BusyError",
    "ConflictError",
    "CorruptError",
    "DatasyncError",
    "DeniedError",
    "FormatError",
    "NotFoundError",
    "StoreError",
    "ThrottledError",
    "TransientError",
    "UnsupportedError",
    "UsageError",
]


class BusyError(DatasyncError):
    """Another run holds the lease; the message says who, since when and until when."""

    exit_code = 75
