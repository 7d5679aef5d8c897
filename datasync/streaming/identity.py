"""Whether a replica holds the dataset in use, by its own index.

Nothing but its place tells a replica from another dataset, and one may have been left behind by a newer
version. So before the first shard is read from a replica that the index in use did not come from, the two
indexes are compared:

    the same shards, or more    it is read from
    some of the shards          another version: read from for the shards that both have
    none of them                another dataset: left alone (`replicas.py`), and looked at again afterwards

Where shards have no digests nothing else would tell bytes of one dataset from those of another: then anything
but the same shards is another dataset. A replica is looked at again when a shard was missing or wrong there,
since it may have been published anew meanwhile. One without an index that can be read is taken for what it
should be as long as digests tell.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from datasync.errors import FormatError, NotFoundError
from datasync.streaming.replicas import Replica, Stranger
from datasync.streaming.stats import Stats
from shards.index import Index, ShardInfo

_LOOK_AGAIN_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What was found at a replica.

    Args:
        lacks (frozenset[str] | None): Files of the shards that it lacks or has otherwise; None for all.
        version (str): Which version it has.
    """

    lacks: frozenset[str] | None
    version: str


class Identity:
    """What this process knows of the replicas of one stream. Thread-safe.

    Args:
        index (Index): The index in use.
        read (Callable): The index of a replica; raises what the store raises.
        known (int | None): Number of the replica that the index in use came from, if there is one.
        prefix (str): Folder of the split with its slash, as files are named in `Stranger`. Default: none.
        stats (Stats): Where replicas that are something else are counted.
    """

    def __init__(
        self,
        *,
        index: Index,
        read: Callable[[Replica], Index],
        known: int | None,
        stats: Stats,
        prefix: str = "",
    ) -> None:
        self._index = index
        self._read = read
        self._prefix = prefix
        self._stats = stats
        self._seen: dict[int, _Seen | None] = {} if known is None else {known: None}
        self._looked: dict[int, float] = {}  # when, monotonic seconds
        self._locks: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)  # one looks, others wait

    def check(self, replica: Replica, key: str) -> None:
        """Look whether a shard may be read from a replica.

        Raises:
            Stranger: The replica holds another dataset.
            NotFoundError: It holds another version, without this shard.
            StoreError: Its index cannot be read now.
        """
        number = replica.number
        with self._locks[number]:
            if number not in self._seen:
                self._seen[number] = self._look(replica)
            seen = self._seen[number]
            if seen is None or (seen.lacks is not None and key not in seen.lacks):
                return
            if time.monotonic() - self._looked[number] > _LOOK_AGAIN_SECONDS:
                del self._seen[number]
        if seen.lacks is None:
            raise Stranger(
                f"it holds another dataset: version {seen.version}, not {_version(self._index)}",
                mend="give replicas of one dataset; datasync status lists what is where",
            )
        raise NotFoundError(
            f"it has version {seen.version}, where {key} is missing or another one",
            mend="wait until that replica has the version in use (datasync wait)",
        )

    def doubt(self, replica: Replica) -> None:
        """A shard was missing or wrong there: look again before the next one, unless that was just done."""
        number = replica.number
        with self._locks[number]:
            recent = time.monotonic() - self._looked.get(number, -math.inf) < _LOOK_AGAIN_SECONDS
            if self._seen.get(number) is None and not recent:
                self._seen.pop(number, None)

    def _look(self, replica: Replica) -> _Seen | None:
        """What a replica has, if it is not what is in use."""
        self._looked[replica.number] = time.monotonic()
        own = self._index
        try:
            other = self._read(replica)
        except (NotFoundError, FormatError):
            if _has_digests(own):
                return None
            raise
        if other.fingerprint == own.fingerprint:
            return None
        theirs = {info.stored.basename: _content(info) for info in other.shards}
        lacks = [
            info.stored.basename for info in own.shards if theirs.get(info.stored.basename) != _content(info)
        ]
        if not lacks:
            return None
        self._stats.add(strangers=1)
        every = len(lacks) == len(own.shards) or not _has_digests(own)
        if not every:
            self._stats.log_once(
                f"version {replica.number}",
                "replica %s has version %s, not %s: it is read for the shards that both have",
                replica.name,
                _version(other),
                _version(own),
            )
        return _Seen(
            lacks=None if every else frozenset(self._prefix + name for name in lacks),
            version=_version(other),
        )


def _has_digests(index: Index) -> bool:
    return all(info.stored.hashes for info in index.shards)


def _content(info: ShardInfo) -> tuple[Any, ...]:
    return info.stored.bytes, dict(info.stored.hashes), info.samples, info.columns


def _version(index: Index) -> str:
    return str(index.extra.get("version") or index.fingerprint)[:12]
