"""Progress that a person watches: a bar on a terminal, plain lines in a log, nothing when quiet.

    with Progress("shard emoji", total_bytes=n, total_items=m, unit="rows") as progress:
        progress.advance(bytes=4096, items=1)

Everything goes to standard error, so that results on standard output can be piped. Thread-safe.
"""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_LOG_EVERY = 10.0


def format_bytes(count: float) -> str:
    """`count` bytes as a person reads them: ``71.3 GiB``."""
    for unit in _UNITS:
        if abs(count) < 1024 or unit == _UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def format_count(count: int, noun: str) -> str:
    """`1 shard`, `1,204 shards`."""
    return f"{count:,} {noun if count == 1 else noun + 's'}"


def format_seconds(seconds: float) -> str:
    """`seconds` as a person reads them: ``0.42 s``, ``3 m 07 s``, ``2 h 15 m``."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} m {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} m"


class Progress:
    """Progress of one job, counted in bytes and in items.

    Args:
        label (str): What is being done.
        total_bytes (int | None): Bytes to do, where known. Default: ``None``.
        total_items (int | None): Items to do, where known. Default: ``None``.
        unit (str): What an item is called. Default: ``objects``.
        quiet (bool): Show nothing. Default: ``False``.
        file (TextIO | None): Where to show it. Default: standard error.
        beside (Progress | None): Another progress, entered before this one and left after it, below whose bar
            this one's is shown. Default: ``None``.
    """

    def __init__(
        self,
        label: str,
        *,
        total_bytes: int | None = None,
        total_items: int | None = None,
        unit: str = "objects",
        quiet: bool = False,
        file: TextIO | None = None,
        beside: Progress | None = None,
    ) -> None:
        self.label = label
        self.total_bytes = total_bytes
        self.total_items = total_items
        self.unit = unit
        self.bytes = 0
        self.items = 0
        self.note = ""
        self._quiet = quiet
        self._file = file if file is not None else sys.stderr
        self._beside = beside
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._logged = self._started
        self._width = 200  # of a log
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Progress:
        self._started = self._logged = time.monotonic()
        if not self._quiet and self._file.isatty():
            self._start_bar()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._refresh_bar()
            if self._beside is None:
                self._bar.stop()

    def advance(self, *, bytes: int = 0, items: int = 0, note: str | None = None) -> None:
        """Count finished work; `note` is a short remark shown at the end of the line."""
        with self._lock:
            self.bytes += bytes
            self.items += items
            if note is not None:
                self.note = note
            if self._quiet:
                return
            if self._bar is not None:
                self._refresh_bar()
            elif time.monotonic() - self._logged >= _LOG_EVERY:
                self._logged = time.monotonic()
                self._file.write(f"{self.label}: {self._counts()}\n")
                self._file.flush()

    def _counts(self) -> str:
        """`1,204/2,000 objects · 12.1/71.3 GiB · 80.2 MiB/s · 5 m 10 s left`."""
        elapsed = max(time.monotonic() - self._started, 1e-9)
        of_items = f"/{self.total_items:,}" if self.total_items is not None else ""
        known = self.total_bytes is not None and self._width >= 110  # on a narrow terminal the bar says it
        of_bytes = f" of {format_bytes(self.total_bytes or 0)}" if known else ""
        parts = [f"{self.items:,}{of_items} {self.unit}"]
        if self.bytes or self.total_bytes:
            parts.append(f"{format_bytes(self.bytes)}{of_bytes}")
            parts.append(f"{format_bytes(self.bytes / elapsed)}/s")
        left = self._seconds_left(elapsed)
        if left is not None:
            parts.append(f"{format_seconds(left)} left")
        if self.note:
            parts.append(self.note)
        if self._width < 70:  # what matters: the rate and the time left
            parts = parts[2:4] or parts[:1]
        return " · ".join(parts)

    def _seconds_left(self, elapsed: float) -> float | None:
        for done, total in ((self.bytes, self.total_bytes), (self.items, self.total_items)):
            if total and done:
                return max(elapsed / done * (total - done), 0.0)
        return None

    def _start_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        console = Console(file=self._file)
        self._width = console.width
        room = 12 if self._width < 70 else 20 if self._width < 110 else len(self.label)
        label = self.label if len(self.label) <= room else f"{self.label[: room - 1]}…"
        if self._beside is not None:
            self._bar = self._beside._bar
        if self._bar is None:
            self._beside = None
            self._bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=4 if self._width < 70 else 8 if self._width < 110 else 24),
                TextColumn("{task.fields[counts]}"),
                console=console,
                refresh_per_second=5,
                transient=True,
            )
            self._bar.start()
        total = self.total_bytes or self.total_items
        self._task = self._bar.add_task(label, total=total, counts="")

    def _refresh_bar(self) -> None:
        assert self._bar is not None
        assert self._task is not None
        done = self.bytes if self.total_bytes else self.items
        self._bar.update(self._task, completed=done, counts=self._counts())
