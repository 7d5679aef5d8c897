"""Sizes in bytes as people write them: ``67108864``, ``"64mb"``, ``"1.5 GiB"``. One kb is 1,024 bytes."""

from __future__ import annotations

import re

from shards.errors import UsageError

_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgtpezy]?)(i?)b?\s*", re.IGNORECASE)
_POWERS = {unit: power for power, unit in enumerate(("", "k", "m", "g", "t", "p", "e", "z", "y"))}


def parse_bytes(value: int | float | str) -> int:
    """The number of bytes that `value` says; `UsageError` if it says none."""
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
        return int(value)
    match = _PATTERN.fullmatch(value) if isinstance(value, str) else None
    if match is None or (match[3] and not match[2]):
        raise UsageError(f"{value!r} is no size in bytes", mend='write it like 67108864, "64mb" or "1.5gb"')
    return int(float(match[1]) * 1024 ** _POWERS[match[2].lower()])
