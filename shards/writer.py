"""ShardWriter: rows in, an MDS dataset in a folder or on a store out.

It takes the arguments of MosaicML's MDSWriter, so that a script of theirs runs with the import changed:

    with ShardWriter(columns={"text": "str"}, out="s3://bucket/data", compression="zstd:3") as writer:
        writer.write({"text": "one sample"})

Shards are compressed, digested and stored on threads while the next rows are taken. The index is written last
and replaces an older one in one step (invariant 1); when something fails, no index is written.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import mkdtemp
from types import TracebackType
from typing import TYPE_CHECKING, Any

from shards.builder import DEFAULT_SIZE_LIMIT, Draft, Recipe, ShardBuilder, ShardCutter
from shards.errors import FormatError, UsageError
from shards.index import BASENAME, Index, ShardInfo
from shards.place import Folder, Place, open_place
from shards.progress import Progress

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["ShardBuilder", "ShardWriter"]

_log = logging.getLogger(__name__)


class ShardWriter:
    """Writes a dataset, row by row or in Arrow batches.

    Args:
        columns (Mapping[str, str]): Column -> encoding, such as ``{"image": "jpeg", "caption": "str"}``.
        out (str | Path | tuple[str, str]): A folder, a URL that fsspec knows, or both as (local, remote).
        keep_local (bool): With a remote, also keep the dataset in the local folder. Default: ``False``.
        compression (str | None): Such as ``zstd:3``. Default: ``None``.
        hashes (Sequence[str] | None): Digests to keep in the index beside sha256 and xxh3_64.
            Default: ``None``.
        size_limit (int | str | None): Bytes that a raw shard does not exceed, also as ``"64mb"``; None for as
            many as fit in 4 GiB. Default: 64 MiB.
        progress_bar (bool): Show progress. Default: ``False``.
        max_workers (int | None): Shards compressed and stored at the same time. Default: the number of CPUs.
        retry (int): How often a failed upload is tried again. Default: ``2``.
        exist_ok (bool): Replace a dataset that is already there. Default: ``False``.

    Raises:
        UsageError: An argument is wrong, or `out` is not empty and `exist_ok` is not set.
    """

    def __init__(
        self,
        *,
        columns: Mapping[str, str],
        out: str | Path | tuple[str, str],
        keep_local: bool = False,
        compression: str | None = None,
        hashes: Sequence[str] | None = None,
        size_limit: int | str | None = DEFAULT_SIZE_LIMIT,
        progress_bar: bool = False,
        max_workers: int | None = None,
        retry: int = 2,
        exist_ok: bool = False,
    ) -> None:
        if max_workers is not None and max_workers < 1:
            raise UsageError(f"max_workers is {max_workers}", mend="use at least 1, or leave it out")
        self.columns = dict(columns)
        self._recipe = Recipe(columns, compression=compression, hashes=hashes, size_limit=size_limit)
        self._cutter = ShardCutter(self._recipe)
        self.local, self.remote, self._places = _places(out, keep_local=keep_local, retry=retry)
        self._older = [_occupant(place, exist_ok=exist_ok) for place in self._places]
        self._workers = max_workers or os.cpu_count() or 1
        self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="shard")
        self._running: deque[Future[ShardInfo]] = deque()
        self._shards: list[ShardInfo] = []
        self._closed = False
        self._progress = Progress(f"write {self._places[-1].url}", unit="shards", quiet=not progress_bar)
        self._progress.__enter__()

    def write(self, sample: Mapping[str, Any]) -> None:
        """Take one row. `RowError` names the column that cannot hold its value; the row is then left out."""
        self._store(self._cutter.write(sample))

    def write_batch(self, batch: pa.RecordBatch) -> None:
        """Take the rows of an Arrow batch: the same bytes as row by row, many times faster.

        Raises:
            RowError: Some row cannot be held; its `written` says how many rows of the batch were taken.
        """
        self._store(self._cutter.write_batch(batch))

    def finish(self) -> Index:
        """Store what is left, then the index, which makes the dataset visible; returns the index."""
        if self._closed:
            raise UsageError("this writer has finished or was aborted", mend="make a new one")
        try:
            self._store(self._cutter.finish())
            while self._running:
                self._collect()
            index = Index(self._shards)
            for place, older in zip(self._places, self._older, strict=True):
                place.write(BASENAME, index.dumps())
                _drop_older(place, older, index)
        except BaseException:
            self.abort()
            raise
        self._close()
        return index

    def abort(self) -> None:
        """Stop without an index.

        Shards that this run put into a local folder are removed; those on a store have names of their own and
        harm nobody.
        """
        if self._closed:
            return
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._close()
        for place in self._places:
            place.undo()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
        elif not self._closed:
            self.finish()

    def _store(self, drafts: Sequence[Draft]) -> None:
        """Hand drafts to the threads; waits while enough are on their way, so that memory is bounded."""
        if self._closed:
            raise UsageError("this writer has finished or was aborted", mend="make a new one")
        for draft in drafts:
            while len(self._running) > self._workers:
                self._collect()
            self._running.append(self._pool.submit(self._seal, draft))
        while self._running and self._running[0].done():
            self._collect()

    def _seal(self, draft: Draft) -> ShardInfo:
        shard = self._recipe.seal(draft)
        for place in self._places:
            place.write(shard.info.stored.basename, shard.data)
        return shard.info

    def _collect(self) -> None:
        """The oldest shard on its way; its error, if it has one, ends the writer."""
        try:
            info = self._running.popleft().result()
        except BaseException:
            self.abort()
            raise
        self._shards.append(info)
        self._progress.advance(bytes=info.stored.bytes, items=1)

    def _close(self) -> None:
        self._closed = True
        self._pool.shutdown(wait=True)
        self._progress.__exit__(None, None, None)


def _places(
    out: str | Path | tuple[str, str], *, keep_local: bool, retry: int
) -> tuple[str | None, str | None, list[Place]]:
    """Local folder, remote URL, and where files are really written; the one that is read from stands last."""
    if isinstance(out, tuple):
        if len(out) != 2 or not all(out):
            raise UsageError(f"out is {out!r}", mend="give a folder, a URL, or (local, remote)")
        local, remote = map(str, out)
    else:
        text = str(out)
        if not text:
            raise UsageError("out is empty", mend="give a folder, a URL, or (local, remote)")
        local, remote = ("", text) if "://" in text else (text, "")
    if not remote:
        return local, None, [Folder(local)]
    target = open_place(remote, retry=retry)
    if not keep_local:
        return None, remote, [target]
    local = local or mkdtemp(prefix="shards-")
    return local, remote, [Folder(local), target]


def _occupant(place: Place, *, exist_ok: bool) -> Index | None:
    """The dataset that is already in a place, if it may be replaced."""
    text = place.read(BASENAME)
    if text is None and not (isinstance(place, Folder) and place.occupied()):
        return None
    if not exist_ok:
        what = "holds a dataset" if text is not None else "is not empty"
        raise UsageError(
            f"{place.url} {what}", mend="choose another folder, or pass exist_ok=True to replace it"
        )
    try:
        return None if text is None else Index.parse(text, where=f"{place.url}/{BASENAME}")
    except FormatError as error:
        _log.warning(
            "%s: its index cannot be read (%s); its shards are left where they are", place.url, error
        )
        return None


def _drop_older(place: Place, older: Index | None, index: Index) -> None:
    """Delete the shards of the dataset that was replaced: only files that its index named (invariant 7)."""
    if older is None:
        return
    kept = {info.stored.basename for info in index.shards}
    for info in older.shards:
        if info.stored.basename not in kept:
            place.delete(info.stored.basename)
