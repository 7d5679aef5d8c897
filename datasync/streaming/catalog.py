"""What a dataset consists of: its streams' shards, laid end to end and numbered.

Sample numbers count the samples of all streams, each once, in the order in which they are stored. Everything
here comes from the streams' indexes; arrays have an entry a shard or a stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from datasync.errors import UsageError
from datasync.streaming.fetch import ShardSource
from datasync.streaming.permute import Ints
from datasync.streaming.plan import split_ids
from datasync.streaming.stats import Stats
from datasync.streaming.stream import Stream
from shards.mds import Shard

# Columns whose decoding costs more than moving them, by the beginning of their encoding's name.
_COSTLY = ("jpeg", "png", "pil", "list[")


class Catalog:
    """The shards and samples of several streams.

    Args:
        streams (Sequence[Stream]): The streams.
        cache_limit (int | None): Most bytes of all their cache folders together.
        allow_unsafe_types (bool): Open shards whose columns may run code.
        stats (Stats): What the sources count in.

    Raises:
        UsageError: A stream has no sample.
        StoreError: An index cannot be read.
    """

    def __init__(
        self, streams: Sequence[Stream], *, cache_limit: int | None, allow_unsafe_types: bool, stats: Stats
    ) -> None:
        folders = [Path(stream.local) for stream in streams]
        self.streams = streams
        self.sources: list[ShardSource] = [
            stream.source(
                cache_limit=cache_limit,
                limit_folders=folders,
                allow_unsafe_types=allow_unsafe_types,
                stats=stats,
            )
            for stream in streams
        ]
        indexes = [source.index for source in self.sources]
        for stream, index in zip(streams, indexes, strict=True):
            if not index.samples:
                raise UsageError(
                    f"the stream {stream.name} contains no samples",
                    mend="leave it out, or write the dataset again",
                )
        self.samples_per_stream: Ints = np.array([index.samples for index in indexes], np.int64)
        self.shards_per_stream: Ints = np.array([len(index.shards) for index in indexes], np.int64)
        self.first_shard: Ints = np.cumsum(self.shards_per_stream) - self.shards_per_stream
        self.first_sample: Ints = np.cumsum(self.samples_per_stream) - self.samples_per_stream
        self.samples_per_shard: Ints = np.concatenate([index.sizes for index in indexes])
        self.bounds: Ints = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.samples_per_shard)])

    @property
    def samples(self) -> int:
        """Samples of all streams."""
        return int(self.bounds[-1])

    @property
    def shards(self) -> int:
        """Shards of all streams."""
        return len(self.samples_per_shard)

    def open(self, shard: int) -> Shard:
        """A shard by its number among all streams', fetched if it is not in the cache."""
        stream = self.stream_of(shard)
        return self.sources[stream].open(shard - int(self.first_shard[stream]))

    def prefetch(self, shard: int) -> None:
        """Let the same be fetched in the background."""
        stream = self.stream_of(shard)
        self.sources[stream].prefetch([shard - int(self.first_shard[stream])])

    def stream_of(self, shard: int) -> int:
        """Which stream a shard is of.

        Raises:
            IndexError: There is no such shard.
        """
        if not 0 <= shard < self.shards:
            raise IndexError(f"there are {self.shards:,} shards, none is number {shard}")
        return int(np.searchsorted(self.first_shard, shard, side="right")) - 1

    def locate(self, samples: Ints) -> tuple[Ints, Ints, Ints]:
        """Stream, shard in the stream and row in the shard of sample numbers."""
        return split_ids(samples, bounds=self.bounds, first_shard=self.first_shard)

    def number(self, stream: Ints, shard: Ints, row: Ints) -> Ints:
        """Sample numbers of located samples; the inverse of `locate`."""
        return np.asarray(self.bounds[self.first_shard[stream] + shard] + row, dtype=np.int64)

    def read(self, sample: int) -> dict[str, Any]:
        """The sample of a number: column -> value."""
        stream, shard, row = (int(part[0]) for part in self.locate(np.array([sample])))
        return self.sources[stream].open(shard)[row]

    def describe(self, sample: int) -> dict[str, Any]:
        """Which stream, dataset, version, shard and row a sample number means."""
        stream, shard, row = (int(part[0]) for part in self.locate(np.array([sample])))
        index = self.sources[stream].index
        return {
            "stream": stream,
            "dataset": self.streams[stream].name,
            "version": index.extra.get("version"),
            "fingerprint": index.fingerprint,
            "shard": index.shards[shard].stored.basename,
            "row": row,
        }

    def sample_bytes(self) -> int:
        """Bytes of a sample of the first shard, the most of all streams; 0 if decoding is what costs."""
        most = 0
        for source in self.sources:
            info = source.index.shards[int(np.argmax(source.index.sizes > 0))]
            if any(encoding.startswith(_COSTLY) for encoding in info.column_encodings):
                return 0
            most = max(most, info.raw.bytes // max(1, info.samples))
        return most

    def shard_bytes(self) -> int:
        """Bytes of the largest decompressed shard."""
        return max(shard.raw.bytes for source in self.sources for shard in source.index.shards)

    def close(self) -> None:
        """Stop background threads and let go of open shards."""
        for source in self.sources:
            source.close()


class Shards(Sequence[Shard]):
    """The shards of all streams by number, each opened, and fetched before, when it is asked for."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def __len__(self) -> int:
        return self._catalog.shards

    def __getitem__(self, shard: Any) -> Any:
        if isinstance(shard, slice):
            return [self[number] for number in range(*shard.indices(len(self)))]
        return self._catalog.open(int(shard) + len(self) if shard < 0 else int(shard))


class Spanner:
    """Sample number -> its shard among all streams', and its row in the shard."""

    def __init__(self, catalog: Catalog) -> None:
        self._bounds = catalog.bounds

    def __getitem__(self, sample: int) -> tuple[int, int]:
        if not 0 <= sample < self._bounds[-1]:
            raise IndexError(f"there are {self._bounds[-1]:,} samples, none at {sample}")
        shard = int(np.searchsorted(self._bounds, sample, side="right")) - 1
        return shard, int(sample - self._bounds[shard])
