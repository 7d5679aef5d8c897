"""What a person sees while a job runs."""

from __future__ import annotations

import io
import re

import pytest

from shards import progress as module
from shards.progress import Progress, format_bytes, format_seconds


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (76_558_000_000, "71.3 GiB"), (2**60, "1024.0 PiB")],
)
def test_bytes_are_written_for_people(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.418, "0.42 s"),
        (42, "42 s"),
        (187, "3 m 07 s"),
        (59.7, "60 s"),
        (3599.9, "1 h 00 m"),
        (8100, "2 h 15 m"),
    ],
)
def test_seconds_are_written_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_a_log_gets_plain_lines_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 4))
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(clock)))
    log = io.StringIO()
    with Progress("shard x", total_items=10, total_bytes=1024, unit="rows", file=log) as shown:
        for _ in range(10):
            shown.advance(bytes=100, items=1)
    lines = log.getvalue().splitlines()
    assert 1 <= len(lines) < 10
    assert all(re.match(r"shard x: \d+/10 rows · .* of 1.0 KiB · .*/s · .* left$", line) for line in lines)


def test_quiet_shows_nothing() -> None:
    log = io.StringIO()
    with Progress("x", quiet=True, file=log) as shown:
        shown.advance(items=1)
    assert log.getvalue() == ""
    assert shown.items == 1


class Terminal(io.StringIO):
    """A terminal of 120 columns that keeps what is written to it."""

    def isatty(self) -> bool:
        return True


def test_each_of_several_has_a_bar_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    shown = Terminal()
    with Progress("a → b", total_bytes=1000, total_items=10, file=shown) as first:
        with Progress("a → c", total_bytes=1000, total_items=10, file=shown, beside=first) as second:
            first.advance(bytes=900, items=9)
            second.advance(bytes=100, items=1)
            assert first._bar is second._bar
            rows = [f"{task.description} {task.fields['counts']}" for task in first._bar.tasks]
    assert re.match(r"a → b 9/10 objects · 900 B of 1000 B · .*/s · .* left$", rows[0])
    assert re.match(r"a → c 1/10 objects · 100 B of 1000 B · .*/s · .* left$", rows[1])
    text = shown.getvalue()
    assert "a → b" in text
    assert "a → c" in text
