"""Permutations that are computed, never stored.

`permute(index, size, key)` maps each index below `size` to another one, and every index is hit exactly
once: a shuffle of `size` items that needs no memory and can be entered anywhere. Order (invariant 4) is
made of these.

The construction is a Feistel network over two unequal halves. An index is written in mixed radix as `left *
columns + right`, where `rows * columns` is the smallest such rectangle, nearly square, that holds `size`.
The halves take turns at being moved by a keyed hash of the other one, modulo their radix; each turn can be
undone, so the whole is a bijection of the rectangle whatever the hash is. A result that is not below `size`
is sent through the network again ("cycle walking", Black and Rogaway 2002): following the cycle of a
bijection from inside a set ends inside the set, at a different place for every start. The rectangle exceeds
`size` by less than its side, so that hardly any index walks. Before it enters the network an index is
rotated by a keyed amount, because a network on a handful of cells alone would favour some of them.

`size` and `key` may differ for each index: one call serves thousands of positions in hundreds of blocks.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int64]
Keys = NDArray[np.uint64]

_ROUNDS = 6
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_ONE = np.uint64(1)
_SHIFT = np.uint64(29)
_HALF = np.uint64(32)
_ROTATION = 0x5851F42D4C957F2D
_MAX_SIZE = 1 << 62


def hash_key(*parts: int | str) -> int:
    """A 64-bit key from numbers and names, so that seeds are hashed with the epoch and never added to it.

    Args:
        *parts (int | str): What the key depends on, for example a seed, an epoch and the use it is for.

    Returns:
        int: From 0 to 2**64 - 1; BLAKE2b of the parts, each preceded by its kind and length.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = str(part).encode()
        digest.update(b"%c%d:" % (b"s" if isinstance(part, str) else b"i", len(data)))
        digest.update(data)
    return int.from_bytes(digest.digest(), "little")


def spread_keys(key: int, numbers: ArrayLike) -> Keys:
    """One 64-bit key for each number, all different from each other's (SplitMix64 of Steele et al. 2014).

    Args:
        key (int): The common key.
        numbers (ArrayLike): Non-negative integers, for example block numbers.

    Returns:
        Keys: Of the shape of `numbers`.
    """
    mixed = np.asarray(numbers).astype(np.uint64) * _GOLDEN + np.uint64(key & 0xFFFFFFFFFFFFFFFF)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    return np.asarray(mixed ^ (mixed >> np.uint64(31)), dtype=np.uint64)


def permute(index: ArrayLike, size: ArrayLike, key: ArrayLike) -> Ints:
    """Where each index goes in the permutation of `size` items that `key` names.

    Args:
        index (ArrayLike): Integers, each from 0 to below its size.
        size (ArrayLike): Number of items, at most 2**62; one for all or one for each index.
        key (ArrayLike): 64-bit keys; one for all or one for each index.

    Returns:
        Ints: Of the shape of `index`.

    Raises:
        IndexError: An index is negative or not below its size.
    """
    given = np.asarray(index, dtype=np.int64)
    sizes = np.broadcast_to(np.asarray(size, dtype=np.int64), given.shape).ravel()
    flat = given.ravel()
    if flat.size == 0:
        return given.copy()
    if (flat < 0).any() or (flat >= sizes).any() or int(sizes.max()) > _MAX_SIZE:
        raise IndexError("an index to permute is negative or not below its size")
    keys = np.broadcast_to(np.asarray(key).astype(np.uint64), given.shape).ravel()

    limit = sizes.astype(np.uint64)
    rows, columns = _rectangle(limit)
    start = flat.astype(np.uint64) + spread_keys(_ROTATION, keys) % limit
    start -= limit * (start >= limit)
    out = _network(start, rows, columns, keys)
    outside = np.flatnonzero(out >= limit)
    while outside.size:
        walked = _network(out[outside], rows[outside], columns[outside], keys[outside])
        out[outside] = walked
        outside = outside[walked >= limit[outside]]
    return out.astype(np.int64).reshape(given.shape)


def _rectangle(limit: Keys) -> tuple[Keys, Keys]:
    """Rows and columns, each below 2**32, of a nearly square rectangle with at least `limit` cells."""
    # The root is an estimate above 2**53; the ceiling of the division makes it large enough.
    columns = np.ceil(np.sqrt(limit.astype(np.float64))).astype(np.uint64)
    return (limit + columns - _ONE) // columns, columns


def _network(value: Keys, rows: Keys, columns: Keys, key: Keys) -> Keys:
    """One pass through the network: a cell number of the rectangle to another one."""
    left = value // columns
    right = value - left * columns
    round_key = key.copy()
    for number in range(_ROUNDS):
        round_key += _GOLDEN
        if number % 2:
            _move(right, left, columns, round_key)
        else:
            _move(left, right, rows, round_key)
    left *= columns
    left += right
    return left


def _move(half: Keys, other: Keys, radix: Keys, round_key: Keys) -> None:
    """Add to `half` a hash of `other`, modulo `radix`, in place."""
    mixed = other + round_key
    mixed *= _MIX_1
    mixed ^= mixed >> _SHIFT
    mixed *= _MIX_2
    # The high 32 bits, which mix best, scaled to the radix: cheaper than a remainder (Lemire 2019).
    mixed >>= _HALF
    mixed *= radix
    mixed >>= _HALF
    half += mixed
    half -= radix * (half >= radix)
