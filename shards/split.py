"""Dividing rows between splits by a hash of their key, so that a row stays where it is as the corpus grows.

The hash of a key is a number in [0, 1); splits take consecutive pieces of it in the order in which they are
given. A row's key is a column the user names, else what the source says (a file name, the key of a WebDataset
sample), else the row's own content.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

from shards.errors import UsageError

_NAME_MEND = "write train=0.98,val=0.02"


def read_split(text: str) -> dict[str, float]:
    """Read ``train=0.98,val=0.02``."""
    shares: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, share = part.partition("=")
        try:
            number = float(share)
        except ValueError:
            number = math.nan
        if not equals or math.isnan(number) or name in shares:
            raise UsageError(f"--split: {part!r} is not NAME=SHARE", mend=_NAME_MEND)
        shares[name] = number
    return shares


def parse_split(shares: Mapping[str, float]) -> list[tuple[str, int]]:
    """Names with the upper edge of their piece of [0, 2**64).

    Raises:
        UsageError: Shares do not add up to 1, or a name could not be a folder.
    """
    if not shares:
        return []
    if any(share <= 0 for share in shares.values()) or abs(sum(shares.values()) - 1) > 1e-9:
        raise UsageError("--split: the shares must be above 0 and add up to 1", mend=_NAME_MEND)
    edges, total = [], 0.0
    for name, share in shares.items():
        if not name or name.startswith((".", "_")) or "/" in name or name == "shards":
            raise UsageError(f"--split: {name!r} cannot be the name of a split", mend=_NAME_MEND)
        total += share
        edges.append((name, round(total * 2**64)))
    edges[-1] = (edges[-1][0], 2**64)
    return edges


def split_of(key: bytes, edges: list[tuple[str, int]]) -> str:
    """The split that the row with this key belongs to; empty where there are no splits."""
    if not edges:
        return ""
    place = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
    return next(name for name, edge in edges if place < edge)
