"""The programme by itself: many groups, and costs that are revised."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from duoka.planner.search.dynamic_programme import Floats, Programme


def tables(rng: np.random.Generator, num_groups: int, num_blocks: int) -> list[Floats]:
    shape = (num_blocks + 1, num_blocks + 1)
    stages = np.triu(np.ones(shape, np.bool_), 1)
    return [np.where(stages, rng.integers(1, 50, shape), np.inf) for _ in range(num_groups)]


def least(costs: list[Floats], num_stages: int, *, slowest: bool) -> float:
    num_blocks = costs[0].shape[0] - 1
    return min(
        (max if slowest else sum)(
            float(costs[group][start, stop])
            for group, start, stop in zip(order, (0, *cuts), (*cuts, num_blocks), strict=True)
        )
        for order in itertools.permutations(range(len(costs)), num_stages)
        for cuts in itertools.combinations(range(1, num_blocks), num_stages - 1)
    )


@pytest.mark.parametrize("slowest", [True, False])
@pytest.mark.parametrize("num_groups", [3, 66])  # the sets of so many have numbers beyond 64 bits
def test_the_best_is_the_best_of_all(num_groups: int, slowest: bool) -> None:
    rng = np.random.default_rng(num_groups)
    for _ in range(5):
        costs = tables(rng, num_groups, 4)
        groups = [(device,) for device in range(num_groups)]
        programme = Programme([costs], groups, slowest=slowest, num_stages=range(1, 3))
        expected = [least(costs, number, slowest=slowest) for number in (1, 2)]
        fewest, best = programme.find_on_fewest(), programme.find_best()
        assert fewest is not None
        assert best is not None
        assert (len(fewest[0]), fewest[1]) == (1, expected[0])
        assert best[1] == min(expected)
        dearer = [np.where(costs[0] < 25, costs[0] + 20, costs[0]), *costs[1:]]
        programme.revise([dearer])
        again = programme.find_best()
        assert again is not None
        assert again[1] == min(least(dearer, number, slowest=slowest) for number in (1, 2))
