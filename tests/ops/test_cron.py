"""When cron runs what: the expression itself, and the same for systemd."""

from __future__ import annotations

import shutil
import subprocess
from datetime import datetime, timedelta
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datasync.errors import UsageError
from datasync.ops.cron import Cron


def runs(text: str, after: str, count: int = 3) -> list[str]:
    found = islice(Cron.parse(text).after(datetime.fromisoformat(after)), count)
    return [when.isoformat(sep=" ", timespec="minutes") for when in found]


@pytest.mark.parametrize(
    ("text", "after", "expected"),
    [
        ("30 2 * * *", "2026-03-01 02:30", ["2026-03-02 02:30", "2026-03-03 02:30", "2026-03-04 02:30"]),
        ("*/20 * * * *", "2026-03-01 23:41", ["2026-03-02 00:00", "2026-03-02 00:20", "2026-03-02 00:40"]),
        ("0 0 29 2 *", "2026-01-01", ["2028-02-29 00:00", "2032-02-29 00:00"]),
        ("0 0 */7 3 0", "1999-12-31", ["2009-03-01 00:00", "2009-03-08 00:00", "2009-03-15 00:00"]),
        ("0 9 * * mon-fri", "2026-12-04 10:00", ["2026-12-07 09:00", "2026-12-08 09:00", "2026-12-09 09:00"]),
        (
            "0 0 13 * fri",
            "2026-11-01",
            ["2026-11-06 00:00", "2026-11-13 00:00", "2026-11-20 00:00"],
        ),  # either day
        ("0 12 1 jan,jul *", "2026-02-01", ["2026-07-01 12:00", "2027-01-01 12:00", "2027-07-01 12:00"]),
        ("5 4 * * 7", "2026-12-01", ["2026-12-06 04:05", "2026-12-13 04:05", "2026-12-20 04:05"]),
        ("@hourly", "2026-12-01 00:30", ["2026-12-01 01:00", "2026-12-01 02:00", "2026-12-01 03:00"]),
        (
            "0 22-23/1,5 * * *",
            "2026-12-01 21:00",
            ["2026-12-01 22:00", "2026-12-01 23:00", "2026-12-02 05:00"],
        ),
    ],
)
def test_the_next_runs(text, after, expected):
    assert runs(text, after, len(expected)) == expected


@pytest.mark.parametrize(
    "text", ["", "* * * *", "60 * * * *", "* 24 * * *", "* * 0 * *", "* * * 13 *", "x * * * *", "5-1 * * * *",
             "*/0 * * * *", "0 0 30 feb *", "@sometimes", "1,,2 * * * *"],
)  # fmt: skip
def test_what_is_no_schedule_is_refused(text):
    with pytest.raises(UsageError):
        Cron.parse(text)


field = st.one_of(st.just("*"), st.sampled_from(["*/7", "1-5", "3", "2,4"]))
schedules = st.tuples(field, field, field, field, st.sampled_from(["*", "1-5", "0", "7", "3,6"]))


@settings(max_examples=40, deadline=None)
@given(schedules, st.datetimes(datetime(2024, 1, 1), datetime(2028, 1, 1)))
def test_every_minute_is_a_run_or_not_as_the_fields_say(parts, when):
    cron = Cron.parse(" ".join(parts))
    when = when.replace(second=0, microsecond=0)
    found = set(islice(cron.after(when), 50))
    for step in range(1, 600):
        minute = when + timedelta(minutes=step)
        fits = minute.minute in cron.minutes and minute.hour in cron.hours and cron.fits_day(minute)
        if found and minute <= max(found):
            assert (minute in found) == fits
    assert cron.between(when, max(found)) == len(found)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize(
    "text", ["30 2 * * *", "*/20 8-18 * * mon-fri", "0 0 1,15 * *", "0 12 1 jan,jul *", "5 4 * * 7"]
)
def test_systemd_agrees_on_the_next_run(text):
    (calendar,) = Cron.parse(text).calendars()
    done = subprocess.run(
        ["systemd-analyze", "calendar", "--base-time=2026-03-03 10:07:00", "--iterations=2", calendar],
        capture_output=True, text=True, check=False,
        env={"TZ": "UTC", "LC_ALL": "C", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    if done.returncode != 0 and "unrecognized" in done.stderr:
        pytest.skip("this systemd-analyze is too old to be asked")
    assert done.returncode == 0, done.stderr
    for when in runs(text, "2026-03-03 10:07", 2):
        assert f"{when}:00 UTC" in done.stdout


def test_either_day_needs_two_lines_for_systemd():
    assert Cron.parse("0 0 13 * fri").calendars() == ["*-*-13 00:00:00", "Fri *-*-* 00:00:00"]


@pytest.mark.parametrize(
    ("text", "installed"),
    [
        ("5/15 * * * *", "5,20,35,50 * * * *"),
        ("0 0 * * 7", "0 0 * * 0"),
        ("0 0 * * 5-7", "0 0 * * 0,5,6"),
        ("7,17 7 7 7 *", "7,17 7 7 7 *"),
        ("*/15 1-5/2 * jan mon", "*/15 1-5/2 * jan mon"),
    ],
)
def test_what_some_crons_refuse_is_written_in_another_way(text, installed):
    assert Cron.parse(text).text == installed
    assert Cron.parse(installed) == Cron.parse(text)
