"""A DataLoader worker ends when the process that started it has ended, however that was.

PyTorch looks at the parent's process id for this, which a fork server hides: workers that it has started
outlive a killed trainer, and keep each other's fork server. What tells in every case is the sentinel, a pipe
that the parent alone holds open.

A trainer that ended by a signal could not remove the folder of its workers' sockets; so the workers do.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import shutil
import threading
from multiprocessing.connection import wait
from typing import Any

_watched: set[int] = set()
_OWNER = "datasync_tempdir_owner"


def make_socket_folder() -> str:
    """The temporary folder of the sockets that workers pass tensors on through; made once a process.

    Each worker would make one of its own, and leave it behind when it is ended with the main process. This
    one is removed at exit, or by workers that find that this process has ended.
    """
    config = _config()
    if config.get("tempdir") is None:  # else a process further up has made it, and removes it
        config[_OWNER] = os.getpid()
    return multiprocessing.util.get_temp_dir()


def end_with_parent() -> None:
    """In a worker: end this process, at once, when its parent has ended. May be called again and again."""
    parent = multiprocessing.parent_process()
    if parent is None or os.getpid() in _watched:
        return
    _watched.add(os.getpid())
    threading.Thread(
        target=_watch, args=(parent.sentinel, parent.pid), name="datasync-parent-watch", daemon=True
    ).start()


def _watch(sentinel: int, parent: int | None) -> None:
    wait([sentinel])
    config = _config()
    if parent is not None and config.get(_OWNER) == parent:
        shutil.rmtree(config["tempdir"], ignore_errors=True)
    os._exit(1)


def _config() -> dict[str, Any]:
    """What a process hands on to the processes that it starts, by fork or spawn."""
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    return config
