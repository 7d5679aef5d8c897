"""What a job is, and the name that follows from it.

A job's name is a digest of everything that decides its bytes: the input files as they were listed, the
options, the columns, the code of a transform. Nothing of the machine, the engine or the workers is in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shards.errors import UsageError
from shards.options import ConvertOptions
from shards.schema import Schema
from shards.sink import Sink
from shards.sources import FileList

# Raise it when the same input and options would no longer give the bytes that they gave before.
GENERATION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that a task needs besides its payload; pickled to every worker.

    Args:
        name (str): See the module's docstring.
        source (str): Kind of source.
        schema (Schema): Columns of the dataset.
        known (frozenset[str]): Columns of the source, also those that are left out on purpose.
        strict (bool): A row with a column that is not known is bad.
        options (ConvertOptions): What the user asked for.
        sink (Sink): The destination.
        root (str): The corpus.
        storage_options (Mapping[str, Any]): What fsspec needs to reach it.
        buckets (int): Buckets of the shuffle; 0 where rows stay in order.
        first (int): Number of the first task in names of shards: where an appended part begins.
    """

    name: str
    source: str
    schema: Schema
    known: frozenset[str]
    strict: bool
    options: ConvertOptions
    sink: Sink
    root: str = ""
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    buckets: int = 0
    first: int = 0


def job_name(files: FileList, options: ConvertOptions, source: str, schema: Schema) -> str:
    """The name of a job."""
    digest = hashlib.sha256()
    facts = [GENERATION, source, options.identity(), schema.identity()]
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    for start in range(0, len(files), 65_536):
        names = "\0".join(files.names[start : start + 65_536])
        digest.update(b"\0" + names.encode(errors="surrogateescape"))
    digest.update(files.sizes.astype("<i8").tobytes())
    digest.update(files.versions.astype("<u8").tobytes())
    return digest.hexdigest()[:24]


def load_transform(transform: str | Callable[..., Any] | None) -> Callable[..., Any] | None:
    """The function that ``module:function`` names; a module is also looked for in the current folder."""
    if transform is None or callable(transform):
        return transform
    module_name, colon, name = transform.partition(":")
    if not colon or not module_name or not name:
        raise UsageError(
            f"--transform {transform!r} is not MODULE:FUNCTION", mend="write mymodule:myfunction"
        )
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            found = getattr(importlib.import_module(module_name.removesuffix(".py").replace("/", ".")), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"--transform {transform}: {error}", mend="run from the folder of the module"
        ) from error
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"--transform {transform}: importing {module_name} raised {type(error).__name__}: {error}",
            mend="mend the module; what a script does belongs below `if __name__ == '__main__':`",
        ) from error
    if not callable(found):
        raise UsageError(f"--transform {transform}: it is no function", mend="name a function of one row")
    result: Callable[..., Any] = found
    return result


def code_identity(transform: str | Callable[..., Any] | None) -> str | None:
    """A digest of the code of a transform: of its whole module, since it may call what is beside it."""
    function = load_transform(transform)
    if function is None:
        return None
    name = f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', '')}"
    try:
        code = Path(inspect.getfile(function)).read_bytes()
    except (TypeError, OSError):
        code = repr(function).encode()
    return f"{name} {hashlib.sha256(code).hexdigest()}"


def file_identity(path: str) -> str:
    """A digest of a file that is part of the options; the name itself where it names no file."""
    if not os.path.isfile(path):
        return path
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
