"""Memory for objects on their way: used again, and never while somebody still needs it."""

from __future__ import annotations

from datasync.replicate.buffers import Buffers


def test_memory_is_used_again_when_the_last_user_has_released_it():
    buffers = Buffers()
    loan = buffers.take(1_000_000)
    assert len(loan.view) == 1_000_000
    loan.view[:4] = b"mine"
    loan.share(2)
    loan.release()
    loan.release()
    other = buffers.take(900_000)
    other.view[:4] = b"next"
    assert loan.view[:4] == b"mine"
    loan.release()
    again = buffers.take(800_000)
    assert len(again.view) == 800_000
    assert again.view[:4] == b"mine"  # the same memory


def test_no_more_memory_is_kept_than_a_lane_may_hold():
    buffers = Buffers()
    loans = [buffers.take(64 << 20) for _ in range(8)]  # never touched: costs nothing
    for loan in loans:
        loan.release()
    assert buffers._idle_bytes == 128 << 20


def test_small_and_empty_objects_have_memory_too():
    buffers = Buffers()
    for length in (0, 1, 1000):
        loan = buffers.take(length)
        assert len(loan.view) == length
        loan.release()
