"""Where a dataset stands: the epoch in progress and the one to begin, agreed on by a rank and its workers.

A DataLoader that is not ours tells nobody that it begins an epoch: its workers just start to iterate. So a
rank and its workers keep one small page of memory between them. It is anonymous, so nothing can be left
behind, and guarded by a POSIX record lock, which ends with the process that holds it (invariant 6). Nobody
waits for anybody: the first worker of a generation takes the next epoch, the others find it taken and join.

A generation is one pass of one DataLoader. All its workers know the same base seed, which is drawn anew for
each pass; a persistent worker counts its passes besides. A worker that finds itself already counted in a
generation knows that it is a new one with the same seed.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import multiprocessing.context
import multiprocessing.reduction
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

_BYTES = 4096
_NEXT_EPOCH, _NEXT_OFFSET, _EPOCH, _OFFSET, _SERIAL, _LANES, _NODES, _RING, _SOUGHT, _SHIFT = range(10)
_FIRST_GENERATION = 16
_GENERATIONS = 8
_SEED, _PASS, _OF_EPOCH, _OF_OFFSET, _WORKERS = range(5)
_WORKER_WORDS = 8
_GENERATION_WORDS = _WORKERS + _WORKER_WORDS
_MAX_WORKERS = 32 * _WORKER_WORDS


@dataclass(frozen=True, slots=True)
class Generation:
    """A pass of a DataLoader with workers.

    Args:
        seed (int): What the workers of the pass have in common.
        number (int): Which pass of persistent workers.
        worker (int): Which worker this is.
    """

    seed: int
    number: int
    worker: int


class Position:
    """The page. A worker that is being spawned shares it; any other copy by pickle starts from its values."""

    def __init__(self) -> None:
        self._create()
        self._words[_EPOCH] = -1

    def begin(self, generation: Generation | None) -> tuple[int, int]:
        """Begin the next epoch, or join the one that this generation has begun: (epoch, first sample)."""
        with self._locked():
            if generation is not None:
                joined = self._join(generation)
                if joined is not None:
                    return joined
            epoch, offset = int(self._words[_NEXT_EPOCH]), int(self._words[_NEXT_OFFSET])
            self._words[_NEXT_EPOCH] = epoch + 1
            self._words[_NEXT_OFFSET] = 0
            self._words[_EPOCH], self._words[_OFFSET] = epoch, offset
            self._words[_SERIAL] += 1
            self._words[_SOUGHT] = 0
            if generation is not None:
                self._open(generation, epoch, offset)
            return epoch, offset

    def seek(self, epoch: int, offset: int, *, lanes: int, nodes: int) -> None:
        """Let the next iteration begin at sample `offset` of `epoch`; nothing is in progress until then."""
        with self._locked():
            self._words[_NEXT_EPOCH], self._words[_NEXT_OFFSET] = epoch, offset
            self._words[_EPOCH] = -1
            self._words[_LANES], self._words[_NODES] = lanes, nodes
            self._words[_SERIAL] += 1
            self._words[_SOUGHT] = 1

    def enter(self, epoch: int, offset: int, *, lanes: int) -> None:
        """Note that `epoch` is in progress, entered at `offset`; every worker may say so."""
        with self._locked():
            self._words[_EPOCH], self._words[_OFFSET] = epoch, offset
            self._words[_NEXT_EPOCH], self._words[_NEXT_OFFSET] = epoch + 1, 0
            self._words[_LANES] = lanes

    def skip(self, epoch: int) -> None:
        """Note that nothing was left of `epoch`, so that the next is in progress; every worker may say so."""
        with self._locked():
            if self._words[_EPOCH] == epoch:
                self._words[_EPOCH], self._words[_OFFSET] = epoch + 1, 0
                self._words[_NEXT_EPOCH], self._words[_NEXT_OFFSET] = epoch + 2, 0
                self._words[_SHIFT] += 1

    def current(self) -> tuple[int, int, bool]:
        """Epoch, the sample it was begun at, and whether it is in progress (else it is still to begin)."""
        with self._locked():
            if self._words[_EPOCH] < 0:
                return int(self._words[_NEXT_EPOCH]), int(self._words[_NEXT_OFFSET]), False
            return int(self._words[_EPOCH]), int(self._words[_OFFSET]), True

    @property
    def serial(self) -> int:
        """Changes whenever an epoch begins or a position is set."""
        return int(self._words[_SERIAL])

    @property
    def lanes(self) -> int:
        """Lanes that a loaded state asks for; 0 for none."""
        return int(self._words[_LANES])

    @property
    def initial_nodes(self) -> int:
        """Nodes of the run that a loaded state began in; 0 if unknown."""
        return int(self._words[_NODES])

    @property
    def next_epoch(self) -> int:
        """The epoch that the next iteration will be."""
        return int(self._words[_NEXT_EPOCH])

    def set_next_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch, from its beginning."""
        with self._locked():
            self._words[_NEXT_EPOCH], self._words[_NEXT_OFFSET] = epoch, 0

    def name_epoch(self, epoch: int) -> None:
        """Hear from a loop which epoch it is about to begin.

        Right behind a `seek` that says how the loop's numbers differ from ours; otherwise it is obeyed.
        """
        with self._locked():
            if self._words[_SOUGHT]:
                self._words[_SHIFT] = self._words[_NEXT_EPOCH] - epoch
                return
            wanted = epoch + int(self._words[_SHIFT])
            if wanted >= 0 and wanted != self._words[_NEXT_EPOCH]:
                self._words[_NEXT_EPOCH], self._words[_NEXT_OFFSET] = wanted, 0

    # The ring of generations

    def _join(self, generation: Generation) -> tuple[int, int] | None:
        for slot in range(_GENERATIONS):
            words = self._generation(slot)
            if (words[_SEED], words[_PASS]) != (generation.seed, generation.number):
                continue
            word, bit = divmod(generation.worker % _MAX_WORKERS, 32)
            if words[_WORKERS + word] & (1 << bit):
                continue
            words[_WORKERS + word] |= 1 << bit
            return int(words[_OF_EPOCH]), int(words[_OF_OFFSET])
        return None

    def _open(self, generation: Generation, epoch: int, offset: int) -> None:
        # An older generation with the same name must not be joined by workers of this one.
        for slot in range(_GENERATIONS):
            words = self._generation(slot)
            if (words[_SEED], words[_PASS]) == (generation.seed, generation.number):
                words[:] = 0
        words = self._generation(int(self._words[_RING]) % _GENERATIONS)
        self._words[_RING] += 1
        words[:] = 0
        words[_SEED], words[_PASS] = generation.seed, generation.number
        words[_OF_EPOCH], words[_OF_OFFSET] = epoch, offset
        word, bit = divmod(generation.worker % _MAX_WORKERS, 32)
        words[_WORKERS + word] = 1 << bit

    def _generation(self, slot: int) -> Any:
        first = _FIRST_GENERATION + slot * _GENERATION_WORDS
        return self._words[first : first + _GENERATION_WORDS]

    # The memory

    def _create(self) -> None:
        fd = os.memfd_create("datasync-position")
        try:
            os.ftruncate(fd, _BYTES)
        except BaseException:
            os.close(fd)
            raise
        self._map(fd)

    def _map(self, fd: int) -> None:
        self._fd = fd
        self._words: Any = np.frombuffer(mmap.mmap(fd, _BYTES), dtype=np.int64)
        self._thread_lock = threading.Lock()
        self._pid = os.getpid()
        weakref.finalize(self, os.close, fd)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        if self._pid != os.getpid():
            # The lock of threads may have been held when this process was forked.
            self._thread_lock, self._pid = threading.Lock(), os.getpid()
        with self._thread_lock:
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def __getstate__(self) -> dict[str, Any]:
        if multiprocessing.context.get_spawning_popen() is None:
            return {"words": self._words[:_FIRST_GENERATION].tolist()}
        return {"block": multiprocessing.reduction.DupFd(self._fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "block" in state:
            self._map(state["block"].detach())
        else:
            self._create()
            self._words[:_FIRST_GENERATION] = state["words"]
