"""The checks of `StreamingDataset`'s arguments: pure, before anything is read."""

from __future__ import annotations

import logging
import numbers
from collections.abc import Iterable, Sequence
from itertools import pairwise

from datasync.errors import UsageError
from datasync.streaming.batching import METHODS
from datasync.streaming.epoch import TAILS
from datasync.streaming.mixture import apportion

OUR_ALGORITHM = "lanes"
THEIR_ALGORITHMS = ("py1e", "py1br", "py1s", "py2s", "naive")

Curriculum = Sequence[tuple[int, Sequence[float]]]

log = logging.getLogger("datasync.streaming")


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Refuse a word that is not among those allowed."""
    if value not in allowed:
        raise UsageError(f"`{name}` is {value!r}", mend=f"use one of {', '.join(allowed)}")


def check_count(name: str, value: int | None, *, least: int) -> None:
    """Refuse what is no whole number, or below `least`; None is no value and passes."""
    if value is None:
        return
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise UsageError(f"`{name}` is {value!r}", mend="give a whole number")
    if value < least:
        raise UsageError(f"`{name}` is {value}", mend=f"give a number of at least {least}")


def check_flag(name: str, value: object) -> None:
    """Refuse what is neither true nor false, such as the word "false"; None is no value and passes."""
    if value is not None and value not in (True, False):
        raise UsageError(f"`{name}` is {value!r}", mend="give True or False")


def check_order(
    *,
    sampling_method: str,
    sampling_granularity: int,
    partition_algo: str,
    num_canonical_nodes: int | None,
    predownload: int | None,
    batch_size: int | None,
    global_batch_size: int | None,
    shuffle_algo: str,
    shuffle_seed: int,
    shuffle_block_size: int | None,
    batching_method: str,
    tail: str,
    curriculum: Curriculum | None,
) -> None:
    """Refuse what cannot be an order; `UsageError`, which is a `ValueError`, names the argument."""
    check_choice("sampling_method", sampling_method, ("balanced", "fixed"))
    check_choice("partition_algo", partition_algo, ("relaxed", "orig"))
    check_choice("batching_method", batching_method, METHODS)
    check_choice("shuffle_algo", shuffle_algo, (OUR_ALGORITHM, *THEIR_ALGORITHMS))
    check_choice("tail", tail, tuple(TAILS))
    positive = {
        "sampling_granularity": sampling_granularity,
        "num_canonical_nodes": num_canonical_nodes,
        "batch_size": batch_size,
        "global_batch_size": global_batch_size,
        "shuffle_block_size": shuffle_block_size,
    }
    for name, value in positive.items():
        check_count(name, value, least=1)
    check_count("predownload", predownload, least=0)
    check_count("shuffle_seed", shuffle_seed, least=0)
    if batch_size is not None and global_batch_size is not None:
        raise UsageError(
            "`batch_size` (of a rank) and `global_batch_size` (of all) are both given",
            mend="give one of them",
        )
    if shuffle_algo != OUR_ALGORITHM:
        only_ours = {
            "tail": tail != "pad",
            "curriculum": curriculum is not None,
            "global_batch_size": global_batch_size is not None,
        }
        for name, given in only_ours.items():
            if given:
                raise UsageError(
                    f"`{name}` does not go with `shuffle_algo` {shuffle_algo!r}, "
                    "which has MosaicML's exact order",
                    mend=f"use the default shuffle_algo, {OUR_ALGORITHM!r}",
                )


def _check_curriculum(curriculum: Curriculum) -> None:
    """Refuse what is no sequence of (whole number, numbers)."""
    good = isinstance(curriculum, Sequence) and not isinstance(curriculum, str)
    for phase in curriculum if good else ():
        good = good and isinstance(phase, Sequence) and len(phase) == 2
        good = good and isinstance(phase[0], numbers.Real) and float(phase[0]).is_integer()
        good = good and isinstance(phase[1], Iterable) and all(isinstance(w, numbers.Real) for w in phase[1])
    if not good:
        raise UsageError(
            f"`curriculum` is {curriculum!r}",
            mend="give (first sample, weights of the streams) pairs, such as [(0, [0.9, 0.1])]",
        )


def plan_phases(chosen: Sequence[int], curriculum: Curriculum | None, *, lanes: int) -> list[list[int]]:
    """Samples of each stream in each phase.

    Args:
        chosen (Sequence[int]): Samples of each stream in an epoch, without a curriculum.
        curriculum (Curriculum | None): From which sample of the epoch on which weights hold, one a stream.
        lanes (int): Canonical lanes; changes are moved to a multiple of them.

    Raises:
        UsageError: It does not begin at 0, does not go up, or has not one weight a stream.
    """
    if curriculum is None:
        return [list(chosen)]
    _check_curriculum(curriculum)
    total = sum(chosen)
    starts = [round(start / lanes) * lanes for start, _ in curriculum]
    if not starts or starts[0] != 0 or any(b <= a for a, b in pairwise(starts)):
        raise UsageError(
            f"a curriculum's starts are {[start for start, _ in curriculum]}",
            mend=f"let them begin at 0 and go up by at least {lanes} samples",
        )
    if starts[-1] >= total:
        raise UsageError(
            f"a curriculum changes at sample {starts[-1]}, the epoch has {total}",
            mend="set epoch_size higher",
        )
    phases = []
    for (_, weights), start, stop in zip(curriculum, starts, [*starts[1:], total], strict=True):
        if len(weights) != len(chosen):
            raise UsageError(
                f"a curriculum has {len(weights)} weights for {len(chosen)} streams", mend="give one a stream"
            )
        phases.append(apportion(stop - start, weights))
    return phases
