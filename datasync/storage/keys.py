"""Keys: what may name an object, and how a key is put below a root.

A key is relative, '/'-separated and opaque: it is passed on unchanged, with its odd characters and doubled
slashes, or refused by name; it is never repaired and never skipped. A key that could leave its root is
refused here, before any store sees it (invariant 10): keys come from indexes and listings of others.
"""

from __future__ import annotations

from datasync.errors import StoreError, UsageError

MAX_KEY_BYTES = 1024


def check_key(key: str, *, where: str) -> str:
    """`key` unchanged, if it names an object that stays below the root of the store at `where`.

    Raises:
        StoreError: Empty, too long, with a NUL, or with a ``.`` or ``..`` segment.
    """
    if not key:
        raise StoreError(f"an empty key cannot name an object at {where}", mend="give the object a name")
    if "\0" in key:
        raise StoreError(f"{key!r} has a NUL byte and cannot be stored at {where}", mend="rename the object")
    if any(segment in (".", "..") for segment in key.split("/")):
        raise StoreError(
            f"{key!r} would leave its place below {where}: '.' and '..' are no names",
            mend="refuse the index or the tree that names it, or rename the object",
        )
    if len(utf8(key)) > MAX_KEY_BYTES:
        raise StoreError(
            f"the key {key[:60]!r}... at {where} is longer than {MAX_KEY_BYTES} bytes",
            mend="shorten the name",
        )
    return key


def utf8(key: str) -> bytes:
    """The bytes of a key; a file name that is not UTF-8 keeps the bytes it has on disk."""
    return key.encode("utf-8", "surrogateescape")


def check_prefix(prefix: str, *, where: str) -> str:
    """`prefix` as the root of a child store: no slashes at its ends, and below `where`."""
    trimmed = prefix.strip("/")
    if not trimmed:
        return ""
    try:
        return check_key(trimmed, where=where)
    except StoreError as error:
        raise UsageError(error.message, mend="name a folder below the root") from error


def join(prefix: str, key: str) -> str:
    """`key` below `prefix`, where the prefix may be empty."""
    return f"{prefix}/{key}" if prefix else key
