"""Small datasets whose samples say which they are, and loops over them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shards.writer import ShardWriter

COLUMNS = {"id": "int", "tokens": "ndarray:uint16:8", "text": "str"}


def write_dataset(
    folder: Path, samples: int, *, first: int = 0, size_limit: int = 1500, compression: str | None = "zstd:1"
) -> Path:
    """A dataset of samples numbered from `first`, in shards of about 20."""
    with ShardWriter(out=folder, columns=COLUMNS, size_limit=size_limit, compression=compression) as writer:
        for i in range(first, first + samples):
            writer.write({"id": i, "tokens": np.full(8, i % 65536, np.uint16), "text": f"sample {i}"})
    return folder


def ids(batch: Any) -> list[int]:
    """Numbers of the samples of a batch."""
    return [int(i) for i in batch["id"]]


def flat(batches: Iterable[Sequence[int]]) -> list[int]:
    """The numbers of all batches."""
    return [number for batch in batches for number in batch]


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int, *, per_node: int | None = None) -> None:
    """Let this process be a rank."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(per_node or ranks))
    monkeypatch.setenv("LOCAL_RANK", str(rank % (per_node or ranks)))
