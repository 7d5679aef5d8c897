"""Cron expressions: when is the next run, when should the last one have been.

    minute hour day-of-month month day-of-week        */15  1,5  2-8/3  jan-mar  mon  @hourly

As cron has it: where both days are restricted, either of them is enough. Times are local and naive: what to
do when clocks are changed is left to the scheduler that runs the job.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from datasync.errors import UsageError

_NICKNAMES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_FIELDS = (
    ("minute", 0, 59),
    ("hour", 0, 23),
    ("day of month", 1, 31),
    ("month", 1, 12),
    ("day of week", 0, 7),
)
_HORIZON_DAYS = 366 * 41  # 29 February on a given day of the week may be 40 years away


@dataclass(frozen=True, slots=True)
class Cron:
    """An expression, as sets of what fits.

    Args:
        text (str): Five fields, as every cron takes them.
        minutes, hours, days, months, weekdays (frozenset[int]): What fits; Sunday is 0.
        any_day, any_weekday (bool): Whether the field is ``*``.
    """

    text: str
    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    any_day: bool
    any_weekday: bool

    @classmethod
    def parse(cls, text: str, *, where: str = "schedule") -> Cron:
        """From five fields or a nickname.

        Raises:
            UsageError: A field is not understood, or no day ever fits.
        """
        expanded = _NICKNAMES.get(text.strip().lower(), text)
        parts = expanded.split()
        if len(parts) != 5:
            raise UsageError(f"{where}: {text!r} is no schedule", mend='write five fields, like "30 2 * * *"')
        sets = [_field(part, *field, where=where) for part, field in zip(parts, _FIELDS, strict=True)]
        found = cls(
            " ".join(map(_portable, parts, (name for name, *_ in _FIELDS), sets)),
            sets[0],
            sets[1],
            sets[2],
            sets[3],
            frozenset(day % 7 for day in sets[4]),
            parts[2].startswith("*"),
            parts[4].startswith("*"),
        )
        if next(found.after(datetime(2000, 1, 1)), None) is None:
            raise UsageError(f"{where}: {text!r} never comes", mend="check the day and the month")
        return found

    def fits_day(self, when: datetime) -> bool:
        """Whether a run may be on this day."""
        if when.month not in self.months:
            return False
        by_month, by_week = when.day in self.days, when.isoweekday() % 7 in self.weekdays
        if self.any_day or self.any_weekday:
            return by_month and by_week
        return by_month or by_week

    def after(self, when: datetime) -> Iterator[datetime]:
        """The runs later than `when`, one after the other."""
        day = when.replace(hour=0, minute=0, second=0, microsecond=0)
        for _ in range(_HORIZON_DAYS):
            if self.fits_day(day):
                for hour in sorted(self.hours):
                    for minute in sorted(self.minutes):
                        run = day.replace(hour=hour, minute=minute)
                        if run > when:
                            yield run
            day += timedelta(days=1)

    def between(self, start: datetime, end: datetime, *, most: int = 1000) -> int:
        """How many runs are later than `start` and not later than `end`, at most `most`."""
        count = 0
        for run in self.after(start):
            if run > end or count == most:
                break
            count += 1
        return count

    def calendars(self) -> list[str]:
        """The same for systemd's ``OnCalendar``, which joins days by "and": one line, or two for "either"."""
        time = f"{_listed(self.hours, 24)}:{_listed(self.minutes, 60)}:00"
        month = _listed(self.months, 12, first=1)
        day = "*" if len(self.days) == 31 else _listed(self.days, 32)
        week = (
            "" if len(self.weekdays) == 7 else ",".join(_DAYS[d].title() for d in sorted(self.weekdays)) + " "
        )
        if not self.any_day and not self.any_weekday:
            return [f"*-{month}-{day} {time}", f"{week}*-{month}-* {time}"]
        return [f"{week}*-{month}-{day} {time}"]


def _listed(values: frozenset[int], count: int, *, first: int = 0) -> str:
    if values >= frozenset(range(first, first + count)):
        return "*"
    return ",".join(f"{value:02d}" for value in sorted(values))


def _field(text: str, name: str, low: int, high: int, *, where: str) -> frozenset[int]:
    found: set[int] = set()
    for part in text.split(","):
        body, slash, step_text = part.partition("/")
        try:
            step = int(step_text) if slash else 1
            if step < 1:
                raise ValueError
            if body == "*":
                first, last = low, min(high, 6) if name == "day of week" else high
            elif "-" in body:
                begin, _, end = body.partition("-")
                first, last = _number(begin, name), _number(end, name)
            else:
                first = _number(body, name)
                last = high if slash else first
            if not low <= first <= last <= high:
                raise ValueError
        except ValueError:
            raise UsageError(
                f"{where}: {part!r} is no {name}", mend=f"write {low}-{high}, *, lists and steps such as */15"
            ) from None
        found.update(range(first, last + 1, step))
    return frozenset(found)


def _portable(part: str, name: str, values: frozenset[int]) -> str:
    """A field without what some crons refuse: a step from a number (``5/15``), and 7 for Sunday."""
    if name == "day of week" and 7 in values:
        return ",".join(map(str, sorted({day % 7 for day in values})))
    return ",".join(map(str, sorted(values))) if re.search(r"(^|,)\d+/", part) else part


def _number(text: str, name: str) -> int:
    names = _MONTHS if name == "month" else _DAYS if name == "day of week" else ()
    if text.lower() in names:
        return names.index(text.lower()) + (1 if name == "month" else 0)
    if not text.isdigit():
        raise ValueError(text)
    return int(text)
