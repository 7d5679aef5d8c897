"""Errors of stores and runs, beside those of `shards.errors`, which are offered here again."""

from __future__ import annotations

from shards.errors import CorruptError, DatasyncError, FormatError, UsageError

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


class StoreError(DatasyncError):
    """A store refused or failed an operation; the message names the store and the key."""


class NotFoundError(StoreError):
    """No such object, bucket or folder."""


class DeniedError(StoreError):
    """Credentials are missing, wrong or not allowed to do this."""


class ConflictError(StoreError):
    """A conditional write found something else: the object exists, or its ETag has changed."""


class UnsupportedError(StoreError):
    """This store cannot do this; callers fall back."""


class TransientError(StoreError):
    """Worth trying again: a reset, a timeout, a 5xx."""


class ThrottledError(TransientError):
    """The store asks to slow down (503 SlowDown, 429)."""


class BusyError(DatasyncError):
    """Another run holds the lease; the message says who, since when and until when."""

    exit_code = 75
