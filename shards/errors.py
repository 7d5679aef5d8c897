"""Errors shared by `shards`, `datasync` and `train`.

Every error that a person may see says what is wrong and where in its message, and how to mend it in `mend`.
The command line prints both and exits with `exit_code`:

    0   done
    1   failed: a store, a file or the data did not allow it
    2   usage: an argument or the configuration is wrong; nothing was tried
    3   done, but something is missing or bad: rows were skipped, objects do not verify
    4   stopped cleanly before the end (deadline); run again to continue
    75  busy: another run holds the lease (EX_TEMPFAIL)
    130, 143  stopped by SIGINT, SIGTERM; run again to continue
"""

from __future__ import annotations


class DatasyncError(Exception):
    """Base of every error that names its mend.

    Args:
        message (str): What is wrong, and where.
        mend (str): What the user can do about it. Default: ``""``.
    """

    exit_code = 1

    def __init__(self, message: str, *, mend: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.mend = mend

    def __str__(self) -> str:
        return f"{self.message}\n  mend: {self.mend}" if self.mend else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.mend)


def _rebuild(kind: type[DatasyncError], message: str, mend: str) -> DatasyncError:
    """Unpickle an error: keyword-only arguments do not survive the default protocol."""
    return kind(message, mend=mend)


class UsageError(DatasyncError, ValueError):
    """An argument or a configuration key is wrong; found before any work started."""

    exit_code = 2


class FormatError(DatasyncError, ValueError):
    """Bytes that are not what they claim to be: an index, a shard, a source file."""


class CorruptError(DatasyncError, ValueError):
    """Bytes that do not have the digest or the length they should have."""


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
