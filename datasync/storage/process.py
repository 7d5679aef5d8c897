"""Things that belong to one process: made when first asked for, and made anew in a forked child.

A connection or a lock that crosses a fork is shared with the parent or held for ever. So no store keeps a
client: it asks here, with a key that says what it needs, and a child that was forked starts with nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

T = TypeVar("T")

_lock = threading.Lock()
_making: dict[Hashable, threading.RLock] = {}
_made: dict[Hashable, Any] = {}


def shared(key: Hashable, make: Callable[[], T]) -> T:
    """What `make` gave in this process for `key`, made now if need be."""
    found = _made.get(key)
    if found is None:
        with _lock:
            alone = _making.setdefault(key, threading.RLock())
        with alone:  # others wait for this key only: to ask an endpoint what it can do takes a while
            found = _made.get(key)
            if found is None:
                found = _made[key] = make()
    return cast(T, found)  # the key decides the type


def _start_anew() -> None:
    global _lock, _making, _made
    _lock, _making, _made = threading.Lock(), {}, {}


os.register_at_fork(after_in_child=_start_anew)
