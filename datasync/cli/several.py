"""Commands that take several datasets: what fails for one is told, and the others go on."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import typer

from shards.errors import DatasyncError, UsageError


class Several:
    """The failures of a command, in the order of its datasets."""

    def __init__(self) -> None:
        self.errors: dict[str, DatasyncError] = {}

    @contextlib.contextmanager
    def each(self, name: str) -> Iterator[None]:
        """The work for one dataset. A wrong call is wrong for all, and is raised."""
        try:
            yield
        except UsageError:
            raise
        except DatasyncError as error:
            self.errors[name] = error
            print(f"error: {error}", file=sys.stderr)

    def as_json(self) -> dict[str, dict[str, str]]:
        """Dataset -> what failed."""
        return {name: {"message": error.message, "mend": error.mend} for name, error in self.errors.items()}

    def end(self) -> None:
        """Leave with the code of the first failure; that a place is busy counts least."""
        codes = sorted((error.exit_code for error in self.errors.values()), key=lambda code: code == 75)
        if codes:
            raise typer.Exit(codes[0])
