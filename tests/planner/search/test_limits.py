"""Pins against brute force."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from searching import (
    OBJECTIVES,
    Case,
    candidates,
    fleet_of,
    make_case,
    make_limits,
    oracle,
    plain_costs,
    value_of,
)

from duoka.errors import UsageError
from duoka.planner.search import NoPlacement, Objective, PlacementLimits, search


def limited_case(rng: random.Random) -> Case:
    case = make_case(rng)
    return replace(case, limits=make_limits(rng, case.costs.num_blocks, len(case.fleet.devices)))


def roomy(case: Case) -> Case:
    """The same case where every stage fits."""
    free = {size: np.zeros_like(table) for size, table in case.costs.exact.items()}
    return replace(case, costs=replace(case.costs, exact=free))


def check(case: Case, objective: Objective) -> str:
    """The search must find what the oracle finds; says how the case came out."""
    expected = oracle(case, objective)
    if expected is None:
        kind = UsageError if oracle(roomy(case), "headroom") is None else NoPlacement
        with pytest.raises(kind):
            search(
                case.costs,
                case.fleet,
                objective=objective,
                use_all=case.use_all,
                limits=case.limits,
            )
        return kind.__name__
    found = search(
        case.costs, case.fleet, objective=objective, use_all=case.use_all, limits=case.limits
    )
    value = value_of(case.costs, case.fleet, found.stages, objective)
    assert (len(found.stages), value) == expected
    assert found.stages in set(candidates(case, use_all=case.use_all))
    assert abs(found.value) == abs(found.bound) == abs(value)
    return "found"


def test_random_cases_equal_brute_force() -> None:
    rng = random.Random(5)
    seen = [check(limited_case(rng), rng.choice(OBJECTIVES)) for _ in range(250)]
    assert {kind: seen.count(kind) > 5 for kind in set(seen)} == dict.fromkeys(
        ("found", "UsageError", "NoPlacement"), True
    )


@pytest.mark.fuzz
@settings(max_examples=examples(100), deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(OBJECTIVES))
def test_any_case_equals_brute_force(seed: int, objective: Objective) -> None:
    check(limited_case(random.Random(seed)), objective)


def test_limits_that_nothing_obeys_are_refused() -> None:
    limits = PlacementLimits(pins=((0, 0), (1, 1), (2, 0)))
    with pytest.raises(UsageError, match="contradict each other"):
        search(plain_costs(1, 1, 1), fleet_of(9, 9), limits=limits)


def test_the_shortfall_knows_the_pins() -> None:
    with pytest.raises(NoPlacement) as caught:
        search(plain_costs(5, 1), fleet_of(8, 2), limits=PlacementLimits(pins=((0, 1),)))
    assert caught.value.shortfall_bytes() == 3
