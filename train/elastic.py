"""Gradients with the same bits on 1, 2, 4 or 8 ranks.

Floating-point addition is not associative, so a sum over ranks depends on how many there are. Here it does
not: the global batch is cut into atoms, microbatches that never change, and their gradients are added along
one tree that depends on the number of atoms alone.

    atoms    0   1   2   3   4   5   6   7
              ╲ ╱     ╲ ╱     ╲ ╱     ╲ ╱
    1 rank    ░░░░░░░░░░░░░░░░░░░░░░░░░░░░     all of the tree here
    2 ranks   ░░░░░░░░░░░░   ░░░░░░░░░░░░░     a half each, the last addition between them
    4 ranks   ░░░░   ░░░░░   ░░░░    ░░░░░     a quarter each, two levels between them

An even node splits in half, an odd one is added from left to right (as is a node of two, by the backward
pass itself), so a power of two of ranks that divides the number of atoms holds whole subtrees; ranks beyond
it stand by. Between ranks each gets one slice of every partial sum (all-to-all), adds along the top of the
tree, and gives the result to all (all-gather): as many bytes as a ring all-reduce, without its order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

T = TypeVar("T", bound=Any)


def tree_sum(run: Callable[[int, int], T], n: int, first: int = 0) -> T:
    """The sum of leaves first … first+n-1 in the canonical order, from left to right.

    Args:
        run (Callable[[int, int], T]): ``run(first, n)`` adds n leaves one after another; asked for nodes that
            are odd, or two. What it returns is added to in place.
        n (int): How many leaves.
    """
    if n % 2 or n == 2:
        return run(first, n)
    total = tree_sum(run, n // 2, first)
    total += tree_sum(run, n // 2, first + n // 2)
    return total


def usable_ranks(atoms: int, world: int) -> int:
    """How many of `world` ranks can hold whole subtrees: the largest power of two that divides the atoms."""
    ranks = 1
    while 2 * ranks <= world and atoms % (2 * ranks) == 0:
        ranks *= 2
    return ranks


class Gradients(list[Tensor]):
    """The gradients of all parameters, and the loss last; added to in place."""

    def __iadd__(self, other: list[Tensor]) -> Gradients:  # type: ignore[override,misc]
        torch._foreach_add_(self, other)
        return self


def take_gradients(parameters: Iterable[nn.Parameter], loss: Tensor) -> Gradients:
    """Move the gradients out of the parameters; nothing is copied."""
    taken = Gradients()
    for p in parameters:
        taken.append(torch.zeros_like(p) if p.grad is None else p.grad)
        p.grad = None
    taken.append(loss.detach().to(torch.float32).view(1))
    return taken


def put_gradients(parameters: Iterable[nn.Parameter], taken: Gradients, scale: float) -> Tensor:
    """The reverse of `take_gradients`, multiplied by `scale`; returns the loss, not multiplied."""
    *grads, loss = taken
    torch._foreach_mul_(grads, scale)
    for p, grad in zip(parameters, grads, strict=True):
        p.grad = grad
    return loss


@torch.no_grad()
def sum_over_ranks(partial: Gradients, world: int) -> Gradients:
    """Add the partial sums of all ranks along the top of the tree; every rank gets the same bits."""
    if world == 1:
        return partial
    count = sum(part.numel() for part in partial)
    size = -(-count // world)
    mine = torch.zeros(size * world, dtype=partial[0].dtype, device=partial[0].device)
    torch.cat([part.reshape(-1) for part in partial], out=mine[:count])
    slices = torch.empty_like(mine)
    dist.all_to_all_single(slices, mine)
    rows = slices.view(world, size)
    total = tree_sum(lambda first, n: rows[first] + rows[first + 1] if n == 2 else rows[first], world)
    _all_gather(mine, total.contiguous())
    parts = mine[:count].split([part.numel() for part in partial])
    return Gradients(part.view_as(like) for part, like in zip(parts, partial, strict=True))


def _all_gather(whole: Tensor, mine: Tensor) -> None:
    """By its name of today, or that of before torch 2.13."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, mine)
