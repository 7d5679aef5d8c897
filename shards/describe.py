"""What is in a dataset: its columns, its sizes, some of its samples. For `datasync inspect`.

Counts, bytes and the schema come from the index alone. Bytes by column need the shards themselves, and are
measured on some of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from shards.errors import NotFoundError
from shards.index import BASENAME, Index, ShardInfo
from shards.mds import Shard, unpack
from shards.stored import Stored


class Readable(Protocol):
    """A store, as far as it is read here."""

    @property
    def url(self) -> str: ...

    def read(
        self, key: str, *, start: int = 0, length: int | None = None, etag: str | None = None
    ) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSize:
    """One column.

    Args:
        name (str): Its name.
        encoding (str): Its encoding.
        bytes (int): Uncompressed bytes of its values in the shards that were measured.
        smallest (int): Bytes of the smallest value there.
        largest (int): Bytes of the largest value there.
    """

    name: str
    encoding: str
    bytes: int = 0
    smallest: int = 0
    largest: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """See the module's docstring.

    Args:
        url (str): The dataset.
        version (str | None): Its version, where this tool wrote it.
        created_by (str | None): Who wrote it.
        samples (int): Samples.
        shards (int): Shards.
        raw_bytes (int): Bytes of the shards uncompressed.
        stored_bytes (int): Bytes of the shards as stored.
        compressions (list[str]): Those in use.
        hashes (list[str]): Digests that the index has for the stored files.
        columns (list[ColumnSize]): By name.
        measured (int): Shards that were read for the columns' sizes.
        measured_samples (int): Samples in them.
        rows (list[tuple[int, dict[str, Any]]]): Some samples, each with its number.
    """

    url: str
    version: str | None
    created_by: str | None
    samples: int
    shards: int
    raw_bytes: int
    stored_bytes: int
    compressions: list[str]
    hashes: list[str]
    columns: list[ColumnSize]
    measured: int
    measured_samples: int
    rows: list[tuple[int, dict[str, Any]]] = field(default_factory=list)


def describe(
    store: Readable, *, samples: int = 3, everything: bool = False, unsafe: bool = False
) -> Description:
    """Look at a dataset.

    Args:
        store (Readable): Where it lies.
        samples (int): How many samples to show, spread evenly. Default: ``3``.
        everything (bool): Measure columns on all shards, rather than on those of the samples.
        unsafe (bool): Decode columns whose reading may run code. Default: ``False``.

    Raises:
        NotFoundError: There is no dataset.
        FormatError: Its index is damaged or newer than this tool.
    """
    try:
        index = Index.parse(store.read(BASENAME), where=f"{store.url}/{BASENAME}")
    except NotFoundError as error:
        raise NotFoundError(
            f"there is no dataset at {store.url}: it has no {BASENAME}",
            mend="check the name; list with datasync status",
        ) from error
    numbers = _spread(index.samples, samples)
    ends = np.cumsum(index.sizes)
    where = {number: int(np.searchsorted(ends, number, side="right")) for number in numbers}
    chosen = sorted(set(range(len(index.shards))) if everything else set(where.values()))
    sizes: dict[str, list[int]] = {}
    rows: list[tuple[int, dict[str, Any]]] = []
    measured = 0
    for shard in chosen:
        info = index.shards[shard]
        with _open(store, info, unsafe) as opened:
            _measure(opened, sizes)
            measured += len(opened)
            first = int(ends[shard]) - info.samples
            rows += [(number, opened[number - first]) for number in numbers if where[number] == shard]
    stored = [info.stored for info in index.shards]
    return Description(
        url=store.url,
        version=index.extra.get("version"),
        created_by=index.extra.get("created_by"),
        samples=index.samples,
        shards=len(index.shards),
        raw_bytes=sum(info.raw.bytes for info in index.shards),
        stored_bytes=sum(file.bytes for file in stored),
        compressions=sorted({info.compression or "none" for info in index.shards}),
        hashes=sorted(set.intersection(*(set(file.hashes) for file in stored))) if stored else [],
        columns=_columns(index, sizes),
        measured=len(chosen),
        measured_samples=measured,
        rows=rows,
    )


def _spread(count: int, wanted: int) -> list[int]:
    """Numbers of `wanted` samples, evenly spread, the first one among them."""
    wanted = min(wanted, count)
    return [count * part // wanted for part in range(wanted)]


def _open(store: Readable, info: ShardInfo, unsafe: bool) -> Shard:
    where = f"{store.url}/{info.stored.basename}"
    return Shard(unpack(store.read(info.stored.basename), info, where=where), info, allow_unsafe_types=unsafe)


def _measure(shard: Shard, sizes: dict[str, list[int]]) -> None:
    """Add to `sizes`, column -> [bytes, smallest, largest], the values of a shard."""
    stored = Stored(shard)
    for row in range(len(shard)):
        for name, value in stored[row].items():
            size = len(value)
            total = sizes.setdefault(name, [0, size, size])
            total[0] += size
            total[1] = min(total[1], size)
            total[2] = max(total[2], size)


def _columns(index: Index, sizes: dict[str, list[int]]) -> list[ColumnSize]:
    columns = []
    for name, encoding in index.columns.items():
        total, smallest, largest = sizes.get(name, (0, 0, 0))
        columns.append(
            ColumnSize(name=name, encoding=encoding, bytes=total, smallest=smallest, largest=largest)
        )
    return columns


def summarize(value: Any, *, width: int = 72) -> str:
    """A value in one printable line."""
    if isinstance(value, bytes):
        text = f"{len(value):,} bytes {value[:12]!r}{'…' if len(value) > 12 else ''}"
    elif isinstance(value, np.ndarray):
        head = ", ".join(map(str, value.reshape(-1)[:8].tolist()))
        text = f"{value.dtype.name}{list(value.shape)} [{head}{', …' if value.size > 8 else ''}]"
    elif type(value).__module__.startswith("PIL."):
        text = f"{value.format or 'image'} {value.size[0]}x{value.size[1]} {value.mode}"
    else:
        text = value if isinstance(value, str) else str(value)
    text = "".join(char if char.isprintable() else " " for char in text[: 4 * width])
    return text if len(text) <= width else text[: width - 1] + "…"
