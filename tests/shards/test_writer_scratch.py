"""Scratch buffers: used again when they are free, never while anything still looks at them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shards import scratch

MIB = 1 << 20


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_buffers", [])


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def test_a_buffer_that_is_let_go_is_used_again() -> None:
    view = scratch.take(3 * MIB)
    address = _address(view)
    del view
    again = scratch.take(2 * MIB)
    assert len(again) == 2 * MIB
    assert _address(again) == address


@pytest.mark.parametrize(
    "look", [memoryview, lambda view: view[5:9], lambda view: view.toreadonly(), np.asarray]
)
def test_a_buffer_that_anything_looks_at_is_not_used_again(look: object) -> None:
    view = scratch.take(MIB)
    view[:] = bytes([7]) * MIB
    seen = look(view)  # type: ignore[operator]
    del view
    for _ in range(5):
        other = scratch.take(MIB)
        other[:] = bytes(MIB)
    assert bytes(seen[:4]) == bytes([7]) * 4


def test_only_a_few_are_kept_and_none_that_is_huge() -> None:
    views = [scratch.take(MIB) for _ in range(6)]
    assert len({_address(view) for view in views}) == 6
    assert len(scratch._buffers) == 2
    scratch.take(200 * MIB)
    scratch.take(10)
    assert max(map(len, scratch._buffers)) == MIB


def test_many_threads_never_share_one() -> None:
    def work(number: int) -> bool:
        for _ in range(50):
            view = scratch.take(MIB)
            view[:] = bytes([number]) * MIB
            if view[0] != number or view[-1] != number or bytes(view[1000:1010]) != bytes([number]) * 10:
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
