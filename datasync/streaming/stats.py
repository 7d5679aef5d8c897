"""What a stream did, counted in every process and read in one place.

Each process that reads a stream (the main one, each DataLoader worker) has a row of its own in one block of
anonymous shared memory that is made before the workers start; it has no name, so nothing can be left behind
(invariant 6). A process only writes its own row; `Stats.total()` and `Stats.workers()` read all of them, so
the main process sees what its workers did without asking them.

A statistic means the same everywhere; `FIELDS` says what. Events that may come a thousand times are counted
here and logged once a process (`log_once`).
"""

from __future__ import annotations

import logging
import mmap
import multiprocessing.context
import multiprocessing.reduction
import os
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from prometheus_client import Metric

log = logging.getLogger("datasync.streaming")

FIELDS: dict[str, str] = {
    "hits": "Times a shard was asked for and lay ready, verified, in the cache.",
    "misses": "Times a shard was asked for and had to be waited for.",
    "wait_seconds": "Seconds that reading stood still for want of a shard.",
    "stalls": "Waits that were long enough to be logged.",
    "shards_fetched": "Shards downloaded, verified and placed in the cache.",
    "bytes_fetched": "Bytes of those shards as the store has them.",
    "bytes_wasted": "Bytes downloaded and not used: failed attempts, and the slower half of a hedged read.",
    "bytes_placed": "Bytes of those shards as they lie in the cache, decompressed.",
    "fetch_seconds": "Seconds spent in downloads that succeeded, summed over threads.",
    "retries": "Downloads tried again after a failure.",
    "failovers": "Downloads tried at another replica after a failure.",
    "throttled": "Times a store asked to slow down.",
    "hedges": "Second downloads started because the first was slow.",
    "hedges_won": "Times the second one was the first to finish.",
    "strangers": "Times a replica was found to hold another dataset or version.",
    "corrupt": "Downloads that did not have the digest or the length of the index.",
    "quarantined": "Files in the cache that did not verify and were moved aside.",
    "adopted": "Files already in the cache that were checked against the index and accepted.",
    "evicted": "Files removed from the cache to make room.",
    "bytes_evicted": "Bytes of those files.",
    "uncached": "Shards read into memory because the cache folder cannot be written.",
    "bytes_copied": "Bytes of values of fixed size copied on the way from a shard to its batch, each time.",
    "decoded": "Values decoded by `datasync.streaming.decode`.",
    "decode_seconds": "Seconds spent decoding them, summed over threads.",
}

_INDEX = {name: i for i, name in enumerate(FIELDS)}
_ROWS = 257  # the main process, and 256 workers; later ones share a row
_BLOCK_BYTES = 8 * _ROWS * len(FIELDS)


class Stats:
    """Counters of one stream or dataset, over all its processes.

    Pickles: a worker that is being spawned writes to the same block; anywhere else (another host, a file) the
    copy starts from zero.
    """

    def __init__(self) -> None:
        fd = os.memfd_create("datasync-stats")
        try:
            os.ftruncate(fd, _BLOCK_BYTES)
        except BaseException:
            os.close(fd)
            raise
        self._creator = os.getpid()
        self._map(fd)

    def _map(self, fd: int) -> None:
        """Use the block behind a descriptor, which is kept for workers that are spawned."""
        self._fd = fd
        self._block = mmap.mmap(fd, _BLOCK_BYTES)
        weakref.finalize(self, os.close, fd)
        self._reset()

    def _reset(self) -> None:
        """What belongs to this process alone; made again after a fork."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._logged: set[str] = set()
        self._table = np.frombuffer(self._block, dtype=np.float64).reshape(_ROWS, len(FIELDS))
        self._row = self._table[self._own_row()]

    def __getstate__(self) -> dict[str, Any]:
        if multiprocessing.context.get_spawning_popen() is None:
            return {"block": None, "creator": 0}
        return {"block": multiprocessing.reduction.DupFd(self._fd), "creator": self._creator}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        if state["block"] is None:
            self.__init__()  # type: ignore[misc]
            return
        self._creator = state["creator"]
        self._map(state["block"].detach())

    def _own_row(self) -> int:
        if os.getpid() == self._creator:
            return 0
        return 1 + _worker_id() % (_ROWS - 1)

    def add(self, **amounts: float) -> None:
        """Add to counters of this process, by name."""
        if self._pid != os.getpid():
            self._reset()
        with self._lock:
            for name, amount in amounts.items():
                self._row[_INDEX[name]] += amount

    def log_once(self, event: str, message: str, *arguments: object) -> None:
        """Log a warning the first time that `event` happens in this process; count it elsewhere."""
        if self._pid != os.getpid():
            self._reset()
        with self._lock:
            if event in self._logged:
                return
            self._logged.add(event)
        log.warning(message, *arguments)

    def total(self) -> dict[str, int | float]:
        """Every counter, summed over the processes."""
        return _as_dict(self._table.sum(axis=0))

    def workers(self) -> dict[str, dict[str, int | float]]:
        """Every counter by process: ``main``, ``worker 0``, …; only processes that counted something."""
        names = ["main", *(f"worker {i}" for i in range(_ROWS - 1))]
        return {name: _as_dict(row) for name, row in zip(names, self._table, strict=True) if row.any()}


class StatsCollector:
    """The counters as Prometheus metrics: ``datasync_stream_<name>_total{worker=…}``, read when scraped.

        prometheus_client.REGISTRY.register(StatsCollector(dataset.stats, dataset="emoji"))

    Args:
        stats (Stats): What to export.
        labels (str): More labels, by name.
    """

    def __init__(self, stats: Stats, **labels: str) -> None:
        self._stats = stats
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        """One counter family for each field, one sample for each process."""
        from prometheus_client.core import CounterMetricFamily

        workers = self._stats.workers() or {"main": self._stats.total()}
        for name, meaning in FIELDS.items():
            family = CounterMetricFamily(f"datasync_stream_{name}", meaning, labels=["worker", *self._labels])
            for worker, counts in workers.items():
                family.add_metric([worker, *self._labels.values()], counts[name])
            yield family


def write_prometheus(path: str | os.PathLike[str], stats: Stats, **labels: str) -> None:
    """Write the counters as a textfile for the node exporter, replacing an older one at once."""
    from prometheus_client import CollectorRegistry, write_to_textfile

    registry = CollectorRegistry()
    registry.register(StatsCollector(stats, **labels))
    write_to_textfile(str(Path(path)), registry)


def _as_dict(row: Iterable[float]) -> dict[str, int | float]:
    """Seconds stay fractions; everything else is a whole number."""
    return dict(_typed(row))


def _typed(row: Iterable[float]) -> Iterator[tuple[str, int | float]]:
    for name, value in zip(FIELDS, row, strict=True):
        yield name, float(value) if name.endswith("_seconds") else int(value)


def _worker_id() -> int:
    """The DataLoader worker that this process is; 0 for another child. Does not import torch."""
    module = sys.modules.get("torch.utils.data")
    info = module.get_worker_info() if module is not None else None
    return info.id if info is not None else 0
