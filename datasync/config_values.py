"""Reading values of `datasync.toml`: each reader takes a value and its place, and gives it back typed.

    size("200 MiB")  rate("200 MiB/s")  duration("1h30m")  timetable({"08:00-20:00" = "200 MiB/s"})

A value that does not fit raises `UsageError` naming the file, the key and what would fit.
An unknown key names the nearest one that exists.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from datasync.errors import UsageError
from datasync.storage.rate import Hours, Timetable
from datasync.storage.secrets import check_reference

_SIZES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZES |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_BITS = {"bit": 1 / 8, "kbit": 10**3 / 8, "mbit": 10**6 / 8, "gbit": 10**9 / 8}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LONGEST_SECONDS = 3653 * 86_400.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value stands: a file and a dotted key."""

    file: str
    key: str = ""

    def at(self, key: str) -> Place:
        return Place(self.file, f"{self.key}.{key}" if self.key else key)

    def __str__(self) -> str:
        return f"{self.file}: {self.key}" if self.key else self.file

    def wrong(self, why: str, mend: str) -> UsageError:
        return UsageError(f"{self}: {why}", mend=mend)


Reader = Callable[[Any, Place], Any]


def nearest(name: str, known: Iterable[str]) -> str:
    """A mend for a name that is not known: the nearest one, else all there are."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known are: {', '.join(known)}" if known else "there are none"


def table(value: object, place: Place) -> Mapping[str, Any]:
    """A table, whatever its keys."""
    if not isinstance(value, Mapping):
        raise place.wrong("must be a table", f"write [{place.key}]")
    return value


def fields(value: object, place: Place, readers: Mapping[str, Reader]) -> dict[str, Any]:
    """A table with known keys, each read by its reader."""
    found = {}
    for key, item in table(value, place).items():
        if key not in readers:
            raise place.wrong(f"unknown key {key!r}", nearest(key, readers))
        found[key] = readers[key](item, place.at(key))
    return found


def text(value: object, place: Place) -> str:
    if not isinstance(value, str) or not value:
        raise place.wrong("must be a text", f'write {place.key.rpartition(".")[2]} = "..."')
    return value


def flag(value: object, place: Place) -> bool:
    if not isinstance(value, bool):
        raise place.wrong("must be true or false", "write true or false, without quotes")
    return value


def count(value: object, place: Place) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise place.wrong("must be a whole number, not negative", "write a number, without quotes")
    return value


def at_least_one(value: object, place: Place) -> int:
    if count(value, place) < 1:
        raise place.wrong("must be at least 1", "write 1 or more, or leave it out")
    return count(value, place)


def number(value: object, place: Place) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise place.wrong("must be a number, not negative", "write a number, without quotes")
    return float(value)


def share(value: object, place: Place) -> float:
    """A fraction: 0.05, or "5%"."""
    found = re.fullmatch(r"([\d.]+)\s*%", value) if isinstance(value, str) else None
    try:
        fraction = float(found[1]) / 100 if found else number(value, place)
    except ValueError:
        fraction = -1.0
    if not 0 <= fraction <= 1:
        raise place.wrong("must be a share between 0 and 1", 'write 0.05 or "5%"')
    return fraction


def texts(value: object, place: Place) -> tuple[str, ...]:
    """A list of texts; a single one may stand alone."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise place.wrong("must be a list of texts", 'write ["one", "two"]')
    return tuple(value)


def some_texts(value: object, place: Place) -> tuple[str, ...]:
    """A list of texts that is not empty."""
    found = texts(value, place)
    if not found:
        raise place.wrong("is empty", "name some, or leave the key out for all")
    return found


def web_url(value: object, place: Place) -> str:
    """An address that can be asked over http."""
    found = text(value, place)
    if not is_web_url(found):
        raise place.wrong(f"{found!r} is no URL", 'write "https://host/path"')
    return found


def is_web_url(value: str) -> bool:
    try:
        parts = urlsplit(value)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        return False


def one_of(*allowed: str) -> Reader:
    """A reader of a text that is one of a few."""

    def read(value: object, place: Place) -> str:
        if value not in allowed:
            raise place.wrong(f"{value!r} is none of {', '.join(allowed)}", nearest(str(value), allowed))
        return str(value)

    return read


def reference(value: object, place: Place) -> str:
    """Where a secret is; the secret itself is refused."""
    return check_reference(text(value, place), where=str(place))


def size(value: object, place: Place) -> int:
    """Bytes: a number, or a text such as ``64 MiB``."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    found = _quantity(value, _SIZES)
    if found is None:
        raise place.wrong("is no size", 'write bytes, or a text such as "64 MiB"')
    return int(found)


def rate(value: object, place: Place) -> float | None:
    """Bytes a second: ``200 MiB/s``, ``10 Gbit/s``; ``unlimited`` is None."""
    if value == "unlimited":
        return None
    found = None
    if isinstance(value, str) and value.rstrip().endswith("/s"):
        found = _quantity(value.rstrip().removesuffix("/s"), _SIZES | _BITS)
    if not found:
        raise place.wrong(f"{value!r} is no rate", 'write "200 MiB/s", "10 Gbit/s" or "unlimited"')
    return found


def duration(value: object, place: Place) -> float:
    """Seconds: a number, or a text such as ``90``, ``90s``, ``1h30m``, ``7d``."""
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
        seconds = float(value)
    else:
        text = value.strip() if isinstance(value, str) else ""
        if not re.fullmatch(r"\d+(\.\d+)?|(\d+(\.\d+)? ?[smhd] *)+", text):
            raise place.wrong(f"{value!r} is no duration", 'write seconds, or "90s", "1h30m", "7d"')
        parts = re.findall(r"(\d+(?:\.\d+)?) ?([smhd]?)", text)
        seconds = sum(float(amount) * _SECONDS[unit or "s"] for amount, unit in parts)
    if seconds > _LONGEST_SECONDS:
        raise place.wrong(f"{value!r} is longer than ten years", "write less")
    return seconds


def timetable(value: object, place: Place) -> Timetable:
    """One rate for the whole day, or a table of hours with rates and a ``default``."""
    if not isinstance(value, Mapping):
        return Timetable(default=rate(value, place))
    hours, default = [], None
    for key, item in value.items():
        if key == "default":
            default = rate(item, place.at(key))
            continue
        hours.append(_hours(key, rate(item, place.at(key)), place))
    found = Timetable(default=default, hours=tuple(hours))
    both = found.overlap()
    if both is not None:
        raise place.wrong("two limits claim the same time", "make the hours follow each other")
    return found


def _hours(key: str, limit: float | None, place: Place) -> Hours:
    found = re.fullmatch(r"\s*(\d{1,2}):(\d{2})\s*-\s*(\d{1,2}):(\d{2})\s*", key)
    if found:
        begin, until = int(found[1]) * 60 + int(found[2]), int(found[3]) * 60 + int(found[4])
        fits = int(found[2]) < 60 and int(found[4]) < 60 and begin < 1440 and until <= 1440
        if fits and begin != until:
            return Hours(start=begin, end=until, rate=limit)
    raise place.wrong(f"{key!r} is no time of day", '"08:00-20:00" = "200 MiB/s", or default = "1 GiB/s"')


def _quantity(value: object, units: Mapping[str, float]) -> float | None:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value) if isinstance(value, str) else None
    if not found or found[2].lower() not in units:
        return None
    return float(found[1]) * units[found[2].lower()]
