"""Checking files that have no replica: read once a process, never touched.

Nothing is written beside them, not even a stamp: the folder may be a published dataset. A file is verified
when this process first opens it, and again when its size or times have changed.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from datasync.errors import CorruptError, NotFoundError
from datasync.streaming.stamps import Item
from shards.digests import check_size, compare, digest_file

_MEND = "restore the file, or name a remote to fetch it from"


class OnlyCopy:
    """The files of a folder that holds the dataset itself.

    Args:
        root (Path): The folder.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._seen: dict[str, tuple[int, ...]] = {}
        self._lock = threading.Lock()

    def check(self, item: Item) -> None:
        """Verify a file, unless it is unchanged since it was.

        Raises:
            NotFoundError: It is not there.
            CorruptError: It is not what the index says; names the file and both digests.
        """
        path = os.path.join(self._root, item.name)
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFoundError(f"{path} does not exist, and there is no remote", mend=_MEND) from error
        now = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        with self._lock:
            if self._seen.get(item.name) == now:
                return
        try:
            check_size(status.st_size, size=item.bytes, where=path)
            compare(item.hashes, digest_file(path, item.check), where=path)
        except CorruptError as error:
            raise CorruptError(error.message, mend=_MEND) from error
        with self._lock:
            self._seen[item.name] = now
