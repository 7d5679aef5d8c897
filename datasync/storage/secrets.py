"""Secrets by reference: `env:NAME` is a variable of the environment, `file:PATH` the content of a file.

A reference is kept and pickled as it is and looked up when a client is made, so that configurations,
receipts, logs and pickles never hold the secret itself. Nothing here puts a secret into a message.
"""

from __future__ import annotations

import os

from datasync.errors import DeniedError, UsageError


def is_reference(value: str) -> bool:
    """Whether `value` says where a secret is, rather than being one."""
    return value.startswith(("env:", "file:"))


def check_reference(value: str, *, where: str) -> str:
    """`value` unchanged, if it is a reference.

    Raises:
        UsageError: It is something else, possibly a secret in clear; the message does not repeat it.
    """
    if not is_reference(value):
        raise UsageError(
            f"{where} must not hold a secret itself",
            mend='write "env:NAME" for an environment variable, or "file:PATH" for a file',
        )
    return value


def reveal(value: str, *, where: str) -> str:
    """The secret that a reference leads to; anything else is taken as the secret itself.

    Raises:
        DeniedError: The variable is not set, or the file cannot be read or is empty.
    """
    kind, _, name = value.partition(":")
    if kind == "env":
        found = os.environ.get(name, "")
        if not found:
            raise DeniedError(
                f"{where}: the variable {name} is not set", mend=f"export {name}, then run again"
            )
        return found
    if kind == "file":
        path = os.path.expanduser(name)
        try:
            with open(path) as file:
                found = file.read().strip()
        except OSError as error:
            raise DeniedError(
                f"{where}: cannot read {path}: {error.strerror}", mend="check the file"
            ) from error
        if not found:
            raise DeniedError(f"{where}: {path} is empty", mend="put the secret into the file")
        return found
    return value
