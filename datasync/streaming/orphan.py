"""A DataLoader worker ends when the process that started it has ended, however that was.

PyTorch looks at the parent's process id for this, which a fork server hides: workers that it has started
outlive a killed trainer, and keep each other's fork server. What tells in every case is the sentinel, a pipe
that the parent alone holds open.

A trainer that ended by a signal could not remove the folder of its workers' sockets; so the workers do, or,
if they were ended with it, the next trainer on that machine, to which a lock says that nobody is left.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import multiprocessing.util
import os
import shutil
import threading
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

_watched: set[int] = set()
_OWNER = "datasync_tempdir_owner"
_LOCK = "datasync-lock"
_held: dict[str, int] = {}  # folder -> its open lock, until the process ends


def make_socket_folder() -> str:
    """The temporary folder of the sockets that workers pass tensors on through; made once a process.

    Each worker would make one of its own, and leave it behind when it is ended with the main process. This
    one is removed at exit, or by workers that find that this process has ended.
    """
    config = _config()
    if config.get("tempdir") is None:  # else a process further up may have made it, and removes it
        config[_OWNER] = os.getpid()
    return multiprocessing.util.get_temp_dir()


def hold_socket_folder(folder: str) -> None:
    """Show that the folder that this process has made is in use, and remove those that no longer are."""
    if _config().get(_OWNER) != os.getpid() or folder in _held:
        return
    _remove_left(Path(folder).parent)
    begun = os.path.join(folder, f"{_LOCK}.new")
    _held[folder] = os.open(begun, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(_held[folder], fcntl.LOCK_EX)
    os.rename(begun, os.path.join(folder, _LOCK))


def _remove_left(folder: Path) -> None:
    """Remove the folders of trainers that have ended with all their workers."""
    for lock in folder.glob(f"pymp-*/{_LOCK}"):
        with contextlib.suppress(OSError), open(lock) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)


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
