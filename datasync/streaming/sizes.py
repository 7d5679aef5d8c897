"""Numbers as people write them in arguments: ``"64kb"`` of bytes, ``"100k"`` samples. Pure functions.

Bytes count in powers of 1024, samples in powers of 1000, as in MosaicML Streaming.
"""

from __future__ import annotations

from datasync.errors import UsageError

_BYTES = {unit: 1024**power for power, unit in enumerate(["b", "kb", "mb", "gb", "tb", "pb", "eb"])}
_SAMPLES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def parse_bytes(value: int | float | str, *, name: str) -> int:
    """Bytes from a number or a text such as ``100b``, ``64kb``, ``7.5gb``."""
    return _parse(value, {"": 1, **_BYTES}, name)


def parse_count(value: int | float | str, *, name: str) -> int:
    """A count from a number or a text such as ``100k``, ``64M``, ``77b``."""
    return _parse(value, _SAMPLES, name)


def _parse(value: int | float | str, units: dict[str, int], name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise UsageError(f"{name} {value!r} is no number", mend=_mend(units))
    if isinstance(value, int | float):
        return int(value)
    text = value.strip().lower()
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = text[len(number) :]
    try:
        if unit not in units:
            raise ValueError
        if unit == "":
            return int(number)
        return int(float(number) * units[unit])
    except (ValueError, OverflowError):
        raise UsageError(f"{name} {value!r} is no number with a unit", mend=_mend(units)) from None


def _mend(units: dict[str, int]) -> str:
    return f"give a number, or one with a unit: {', '.join(unit for unit in units if unit)}"
