"""Locks between processes that end with the process that holds them (invariant 6).

All are `flock` on a file. A lock belongs to the open file, so a child made by `fork` inherits it and would
keep it alive after its parent died; the child therefore closes what it inherited. On a file system without
locks everybody gets every lock: what they guard is then done twice, never wrongly, because files are placed
by rename under unique temporary names.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL}
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.05

_held: set[int] = set()
_guard = threading.Lock()


def try_lock(fd: int, *, shared: bool = False, without: bool = True) -> bool:
    """Whether the lock on this open file is now ours; never waits.

    Args:
        fd (int): The open file.
        shared (bool): Allow others to hold it shared too. Default: ``False``.
        without (bool): The answer on a file system that has no locks. Default: ``True``.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return without
    return True


@contextlib.contextmanager
def held(fd: int) -> Iterator[int]:
    """An open file that is locked in this process: closed at the end, and in a child right after the fork."""
    with _guard:
        _held.add(fd)
    try:
        yield fd
    finally:
        with _guard:
            mine = fd in _held
            _held.discard(fd)
        if mine:
            # A child may still have a copy of the descriptor: give the lock back by name, not by closing.
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)


@contextlib.contextmanager
def file_lock(
    path: str, *, wait: Callable[[float], bool] = lambda seconds: True, remove: bool = False
) -> Iterator[bool]:
    """Hold the lock file `path`, whose folder exists.

    Args:
        path (str): The lock file; made when needed.
        wait (Callable): Called now and then with the seconds waited so far; False ends the wait.
        remove (bool): Remove the file when the lock is given back. Default: ``False``.

    Yields:
        bool: Whether the lock is held; False after a wait that was ended.
    """
    started = time.monotonic()
    pause = _FIRST_PAUSE
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if try_lock(fd):
                # Its last holder may have removed the file between our open and our lock.
                if os.fstat(fd).st_nlink:
                    break
                os.close(fd)
                continue
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        if not wait(time.monotonic() - started):
            yield False
            return
        time.sleep(pause)
        pause = min(pause * 2, _LONGEST_PAUSE)
    with held(fd):
        try:
            yield True
        finally:
            if remove and fd in _held:
                with contextlib.suppress(OSError):
                    os.unlink(path)


def _forget_in_child() -> None:
    """After a fork: drop the copies of the parent's descriptors, without touching its locks."""
    global _guard
    _guard = threading.Lock()
    for fd in _held:
        with contextlib.suppress(OSError):
            os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)
