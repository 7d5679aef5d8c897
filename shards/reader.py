"""ShardReader: a whole dataset, in a folder or on a store, by sample number.

    reader = ShardReader("s3://bucket/data")
    len(reader), reader[0], reader.batch([5, 3, 900]), list(reader), reader.verify()

For looking at, checking and converting datasets. Training reads through `datasync.StreamingDataset`, which
caches, prefetches and fails over; this reads what it is asked for, and checks each shard against the index on
the way (invariant 8). Raw shards in a local folder are mapped, others are held in memory, a few at a time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

from shards.digests import Buffer, check_bytes, check_size, compare, digest_file
from shards.digests import cheapest as cheapest_digest
from shards.errors import CorruptError, DatasyncError, FormatError, UsageError
from shards.index import BASENAME, Index, ShardInfo
from shards.mds import Ints, Shard, check_safe, unpack
from shards.place import Folder, open_place


@dataclass(frozen=True, slots=True)
class Problem:
    """A shard that is not what the index says.

    Args:
        shard (int): Its number.
        basename (str): Its stored file.
        error (DatasyncError): What is wrong with it.
    """

    shard: int
    basename: str
    error: DatasyncError


class ShardReader:
    """Random access to the samples of a dataset. Thread-safe.

    Args:
        source (str | Path): The dataset's folder, or a URL that fsspec knows.
        split (str | None): Subfolder to read. Default: ``None``.
        verify (bool): Check each shard's digest when it is opened; sizes always are. Default: ``True``.
        allow_unsafe_types (bool): Read columns that may run code (pickle). Default: ``False``.
        open_shards (int): How many shards are kept open. Default: ``4``.

    Raises:
        UsageError: There is no dataset there.
        FormatError: Its index is not sound.
    """

    def __init__(
        self,
        source: str | Path,
        *,
        split: str | None = None,
        verify: bool = True,
        allow_unsafe_types: bool = False,
        open_shards: int = 4,
    ) -> None:
        url = str(source).rstrip("/") + (f"/{split.strip('/')}" if split else "")
        self._place = open_place(url, retry=0)
        self.url = self._place.url
        text = self._place.read(BASENAME)
        if text is None:
            raise UsageError(
                f"no dataset at {self.url}: it has no {BASENAME}",
                mend="check the path; a dataset that is still being written has no index yet",
            )
        self.index = Index.parse(text, where=f"{self.url}/{BASENAME}")
        self._verify = verify
        self._unsafe = allow_unsafe_types
        self._keep = max(open_shards, 1)
        self._ends = np.cumsum(self.index.sizes)
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def columns(self) -> dict[str, str]:
        """Column -> encoding."""
        return self.index.columns

    def __len__(self) -> int:
        return self.index.samples

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        """One sample, decoded; a slice gives a list of them."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(f"{self.url} has {len(self)} samples, there is no sample {index}")
        shard, row = self.locate(number)
        return self.shard(shard)[row]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in range(len(self.index.shards)):
            yield from self.shard(number)

    def locate(self, number: int) -> tuple[int, int]:
        """Shard and row of a sample."""
        shard = int(np.searchsorted(self._ends, number, side="right"))
        return shard, number - int(self._ends[shard] - self.index.sizes[shard])

    def batch(
        self, numbers: Sequence[int] | Ints, columns: Iterable[str] | None = None
    ) -> dict[str, list[Any] | np.ndarray[Any, Any]]:
        """Several samples, in the order asked for: column -> array for values of fixed size, else list."""
        which = np.asarray(numbers, np.int64)
        if len(which) and not 0 <= int(which.min()) <= int(which.max()) < len(self):
            raise IndexError(f"{self.url} has {len(self)} samples, got numbers up to {int(which.max())}")
        wanted = list(self.columns) if columns is None else list(columns)
        shards = np.searchsorted(self._ends, which, side="right")
        parts, places = [], []
        for shard in np.unique(shards).tolist():
            at = np.flatnonzero(shards == shard)
            start = int(self._ends[shard] - self.index.sizes[shard])
            parts.append(self.shard(shard).batch(which[at] - start, wanted))
            places.append(at)
        back = np.argsort(np.concatenate(places), kind="stable") if places else np.empty(0, np.int64)
        return {name: _gathered([part[name] for part in parts], back) for name in wanted}

    def shard(self, number: int) -> Shard:
        """An open shard; the ones used longest ago are let go."""
        with self._lock:
            if number in self._open:
                self._open.move_to_end(number)
                return self._open[number]
        opened = self._read(number)
        with self._lock:
            shard = self._open.setdefault(number, opened)
            self._open.move_to_end(number)
            while len(self._open) > self._keep:
                self._open.popitem(last=False)
            return shard

    def verify(self, *, samples: bool = False) -> list[Problem]:
        """Check every shard against the index: sizes, all digests, layout. Empty where all is well.

        Args:
            samples (bool): Also decode every sample. Default: ``False``.
        """
        problems = []
        for number, info in enumerate(self.index.shards):
            try:
                self._verify_shard(info, samples=samples)
            except (CorruptError, FormatError) as error:
                problems.append(Problem(number, info.stored.basename, error))
        return problems

    def close(self) -> None:
        """Let go of all shards."""
        with self._lock:
            self._open.clear()

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, number: int) -> Shard:
        info = self.index.shards[number]
        where = f"{self.url}/{info.stored.basename}"
        check_safe(info, allow_unsafe_types=self._unsafe, where=where)
        source: Path | Buffer
        if info.zip is None and isinstance(self._place, Folder):
            source = self._map(info, where)
        else:
            source = unpack(self._fetch(info, where), info, where=where, verify=self._verify)
        return Shard(source, info, allow_unsafe_types=self._unsafe, where=where)

    def _map(self, info: ShardInfo, where: str) -> Path:
        """Path of a raw shard in a folder, checked."""
        path = Path(self.url) / info.raw.basename
        if not path.is_file():
            raise _missing(where)
        check_size(path.stat().st_size, size=info.raw.bytes, where=where)
        name = cheapest_digest(info.raw.hashes) if self._verify else None
        if name is not None:
            compare(info.raw.hashes, digest_file(path, [name]), where=where)
        return path

    def _fetch(self, info: ShardInfo, where: str) -> bytes:
        data = self._place.read(info.stored.basename)
        if data is None:
            raise _missing(where)
        return data

    def _verify_shard(self, info: ShardInfo, *, samples: bool) -> None:
        where = f"{self.url}/{info.stored.basename}"
        data = self._fetch(info, where)
        known = [name for name in info.stored.hashes if cheapest_digest({name: ""}) is not None]
        check_bytes(data, size=info.stored.bytes, hashes=info.stored.hashes, where=where, algorithms=known)
        raw = unpack(data, info, where=where)
        if samples:
            for _ in Shard(raw, info, allow_unsafe_types=self._unsafe, where=where):
                pass
        else:
            Shard(raw, info, allow_unsafe_types=True, where=where)


def _missing(where: str) -> CorruptError:
    return CorruptError(
        f"{where} is missing, the index names it", mend="get it from another replica (datasync repair)"
    )


def _gathered(parts: list[list[Any] | np.ndarray[Any, Any]], back: Ints) -> list[Any] | np.ndarray[Any, Any]:
    """Values by shard, put back in the order asked for."""
    if parts and all(isinstance(part, np.ndarray) for part in parts):
        joined: np.ndarray[Any, Any] = np.concatenate(parts)
        return joined[back]
    values = [value for part in parts for value in part]
    return [values[i] for i in back.tolist()]
