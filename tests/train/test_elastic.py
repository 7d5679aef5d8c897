"""The canonical sum: the same bits however it is cut over ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from train.elastic import put_gradients, sum_over_ranks, take_gradients, tree_sum, usable_ranks


def leaves(n: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 33, generator=generator) * 10.0 ** torch.randint(-6, 6, (n, 1), generator=generator)


def run_over(leaf: Callable[[int], torch.Tensor]) -> Callable[[int, int], torch.Tensor]:
    """Leaves added one after another."""

    def run(first: int, n: int) -> torch.Tensor:
        total = leaf(first).clone()
        for i in range(first + 1, first + n):
            total += leaf(i)
        return total

    return run


@given(st.integers(1, 64), st.integers(0, 5), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_a_power_of_two_of_ranks_gives_the_same_bits(atoms: int, power: int, seed: int) -> None:
    world = usable_ranks(atoms, 2**power)
    x = leaves(atoms, seed)
    whole = tree_sum(run_over(lambda i: x[i]), atoms)
    share = atoms // world
    partials = [tree_sum(run_over(lambda i, r=r: x[r * share + i]), share) for r in range(world)]
    assert torch.equal(whole, tree_sum(run_over(lambda r: partials[r]), world))


def test_leaves_are_asked_for_from_left_to_right_once() -> None:
    asked: list[int] = []

    def leaf(i: int) -> torch.Tensor:
        asked.append(i)
        return torch.tensor([float(i)])

    assert float(tree_sum(run_over(leaf), 12)) == sum(range(12))
    assert asked == list(range(12))


def test_few_partial_sums_live_at_once() -> None:
    alive = most = 0

    class Leaf:
        def __init__(self) -> None:
            nonlocal alive, most
            alive += 1
            most = max(most, alive)

        def __iadd__(self, other: Leaf) -> Leaf:
            return self

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    tree_sum(lambda first, n: Leaf(), 64)
    assert most <= 8


def test_the_plain_order_would_not_do() -> None:
    x = leaves(16, 1)
    halves = x[:8].sum(0) + x[8:].sum(0)
    running = torch.zeros(33)
    for row in x:
        running += row
    assert not torch.equal(halves, running)


@pytest.mark.parametrize(
    ("atoms", "world", "usable"),
    [(8, 1, 1), (8, 2, 2), (8, 3, 2), (8, 7, 4), (8, 8, 8), (8, 9, 8), (12, 8, 4), (7, 8, 1)],
)
def test_ranks_that_would_cut_the_tree_are_not_used(atoms: int, world: int, usable: int) -> None:
    assert usable_ranks(atoms, world) == usable


def test_gradients_are_taken_added_and_put_back() -> None:
    parameters = [torch.nn.Parameter(torch.randn(3, 2)), torch.nn.Parameter(torch.randn(4))]
    taken = []
    for value in (1.0, 2.0):
        parameters[0].grad = torch.full((3, 2), value)
        taken.append(take_gradients(parameters, torch.tensor(value + 6)))
        assert parameters[0].grad is None
    total = tree_sum(lambda first, n: taken[0].__iadd__(taken[1]), 2)
    assert float(put_gradients(parameters, sum_over_ranks(total, 1), 0.5)) == 15.0
    assert torch.equal(parameters[0].grad, torch.full((3, 2), 1.5))
    assert torch.equal(parameters[1].grad, torch.zeros(4))
