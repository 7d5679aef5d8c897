"""A shuffle of all rows, in memory that does not grow with the corpus.

    scatter    every task gives each of its rows a random place in [0, 1), sorts them by it and stores them in
               one run, cut into buckets: bucket b has the places from b/n to (b+1)/n
    gather     a task a bucket reads it out of every run, sorts its rows by their places, makes shards of them

Places are digests of seed, task and number of the row, so every order of all rows is as likely as any other,
and the same for any number of workers (invariant 3). There is a bucket for each shard's worth of input, so a
gathering task holds about one shard. Runs lie in the journal and go with it.

    run        buckets, each compressed by itself; a row is u64 place · u32 bytes · the sample as in a shard
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import zstandard

from shards.errors import CorruptError
from shards.journal import JOBS
from shards.sink import Sink

_HEAD = struct.Struct("<QI")
_HELD_BYTES = 64 << 20
_LEVEL = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """The payload of a gathering task: where the pieces of one bucket lie.

    Args:
        split (str): The split that it belongs to.
        pieces (tuple[tuple[str, int, int, int], ...]): Run, offset, bytes compressed, bytes uncompressed.
    """

    split: str
    pieces: tuple[tuple[str, int, int, int], ...]

    @property
    def bytes(self) -> int:
        """Uncompressed bytes of all pieces."""
        return sum(piece[3] for piece in self.pieces)


class Scatter:
    """Rows of one task and split into runs.

    Args:
        sink (Sink): The destination.
        job (str): The job's name.
        seed (int): The shuffle's seed.
        number (int): The task's number.
        split (str): The split.
        buckets (int): How many buckets there are.
    """

    def __init__(self, sink: Sink, job: str, *, seed: int, number: int, split: str, buckets: int) -> None:
        self._sink = sink
        self._prefix = f"{JOBS}{job}/runs/{split}{number:06d}"
        self._key = f"{seed} {number} {split} ".encode()
        self._buckets = buckets
        self._rows: list[tuple[int, int, bytes]] = []
        self._bytes = self._count = 0
        self.runs: list[dict[str, Any]] = []

    def add(self, sample: bytes) -> None:
        """Take the next row of the task."""
        digest = hashlib.blake2b(self._key + str(self._count).encode(), digest_size=8).digest()
        self._rows.append((int.from_bytes(digest, "little"), self._count, sample))
        self._count += 1
        self._bytes += len(sample)
        if self._bytes >= _HELD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Store what is held as a run."""
        if not self._rows:
            return
        self._rows.sort()
        compressor = zstandard.ZstdCompressor(level=_LEVEL)
        pieces: list[tuple[int, int, int, int]] = []  # bucket, offset, compressed, uncompressed
        data: list[bytes] = []
        offset = 0
        for bucket, rows in self._by_bucket():
            raw = b"".join(
                part for place, _, sample in rows for part in (_HEAD.pack(place, len(sample)), sample)
            )
            packed = compressor.compress(raw)
            pieces.append((bucket, offset, len(packed), len(raw)))
            data.append(packed)
            offset += len(packed)
        key = f"{self._prefix}-{len(self.runs)}"
        self._sink.write(key, b"".join(data))
        self.runs.append({"key": key, "pieces": pieces})
        self._rows, self._bytes = [], 0

    def _by_bucket(self) -> Iterator[tuple[int, list[tuple[int, int, bytes]]]]:
        held: list[tuple[int, int, bytes]] = []
        last = 0
        for row in self._rows:
            bucket = row[0] * self._buckets >> 64
            if held and bucket != last:
                yield last, held
                held = []
            held.append(row)
            last = bucket
        yield last, held


def buckets_of(records: Mapping[int, Mapping[str, Any]], count: int, splits: Sequence[str]) -> list[Bucket]:
    """The gathering tasks that follow from the records of all scattering ones."""
    found: dict[tuple[str, int], list[tuple[str, int, int, int]]] = {}
    for number in sorted(records):
        for split, runs in records[number].get("runs", {}).items():
            for run in runs:
                for bucket, offset, packed, raw in run["pieces"]:
                    found.setdefault((split, bucket), []).append((run["key"], offset, packed, raw))
    return [
        Bucket(split=split, pieces=tuple(found.get((split, bucket), ())))
        for split in splits
        for bucket in range(count)
    ]


def gather(sink: Sink, bucket: Bucket) -> Iterator[bytes]:
    """The samples of a bucket in their order."""
    rows: list[tuple[int, int, bytes]] = []
    decompressor = zstandard.ZstdDecompressor()
    for key, offset, packed, raw in bucket.pieces:
        data = decompressor.decompress(sink.read(key, start=offset, length=packed), max_output_size=raw)
        if len(data) != raw:
            raise CorruptError(
                f"{key} in {sink.url} is damaged", mend="delete the journal of the job and run again"
            )
        at = 0
        while at < raw:
            place, size = _HEAD.unpack_from(data, at)
            at += _HEAD.size
            rows.append((place, len(rows), data[at : at + size]))
            at += size
    rows.sort()
    for _, _, sample in rows:
        yield sample
