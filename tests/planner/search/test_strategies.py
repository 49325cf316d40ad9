"""Balanced and sequential against brute force."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from searching import (
    Case,
    budget,
    candidates,
    fleet_of,
    make_case,
    make_limits,
    plain_costs,
    reserved,
    shape_of,
)

from duoka.errors import UsageError
from duoka.planner.constraints import Strategy
from duoka.planner.search import BlockRange, NoPlacement, search

Stages = tuple[BlockRange, ...]


def any_case(rng: random.Random) -> Case:
    case = make_case(rng)
    if rng.random() < 0.3:
        limits = make_limits(rng, case.costs.num_blocks, len(case.fleet.devices))
        return replace(case, limits=limits)
    return case


def fullness(case: Case, stages: Stages) -> float:
    return max(
        reserved(case.costs, case.fleet, stage) / budget(case.fleet, stage) for stage in stages
    )


def counts(case: Case, stages: Stages) -> list[int]:
    """Blocks on each device, in the user's order."""
    found = [0] * len(case.fleet.devices)
    for stage in stages:
        found[stage.device] = stage.stop - stage.start
    return found


def in_order(stages: Stages) -> bool:
    devices = [stage.device for stage in stages]
    return devices == sorted(devices)


def check_balanced(case: Case) -> bool:
    found = list(candidates(case, use_all=True))
    if not found:
        with pytest.raises((NoPlacement, UsageError)):
            search(case.costs, case.fleet, strategy="balanced", limits=case.limits)
        return False
    best = min(fullness(case, stages) for stages in found)
    solution = search(case.costs, case.fleet, strategy="balanced", limits=case.limits)
    assert solution.stages in found
    assert fullness(case, solution.stages) == best
    assert solution.value == solution.bound == 1 - best
    assert solution.objective == "balance"
    stage = next(s for s in solution.stages if s.device == solution.binding_device)
    assert fullness(case, (stage,)) == best
    return True


def check_sequential(case: Case) -> bool:
    found = [stages for stages in candidates(case, use_all=False) if in_order(stages)]
    if not found:
        with pytest.raises((NoPlacement, UsageError)):
            search(case.costs, case.fleet, strategy="sequential", limits=case.limits)
        return False
    best = max(counts(case, stages) for stages in found)
    solution = search(case.costs, case.fleet, strategy="sequential", limits=case.limits)
    assert solution.stages in found
    assert counts(case, solution.stages) == best
    assert solution.value == solution.bound == best[0]
    return True


def test_balanced_equals_brute_force() -> None:
    rng = random.Random(11)
    seen = [check_balanced(any_case(rng)) for _ in range(200)]
    assert 50 < sum(seen) < 175


def test_sequential_equals_brute_force() -> None:
    rng = random.Random(12)
    seen = [check_sequential(any_case(rng)) for _ in range(200)]
    assert 50 < sum(seen) < 175


@pytest.mark.fuzz
@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 2**32))
def test_any_case_equals_brute_force(seed: int) -> None:
    check_balanced(any_case(random.Random(seed)))
    check_sequential(any_case(random.Random(seed)))


def test_balanced_uses_every_device_by_its_share() -> None:
    found = search(plain_costs(*[1] * 12), fleet_of(8, 16), strategy="balanced")
    assert sorted(stop - start for start, stop, _ in shape_of(found)) == [4, 8]
    assert (found.value, found.bound) == (0.5, 0.5)


def test_sequential_fills_each_device_before_the_next() -> None:
    found = search(plain_costs(*[1] * 12), fleet_of(5, 5, 20), strategy="sequential")
    assert shape_of(found) == [(0, 5, 0), (5, 10, 1), (10, 12, 2)]
    assert found.binding_device == 0


@pytest.mark.parametrize(
    ("strategy", "values", "message"),
    [
        ("balanced", {"objective": "latency"}, "strategy balanced conflicts with the objective"),
        ("sequential", {"objective": "headroom"}, "strategy sequential conflicts"),
        (
            "sequential",
            {"use_all": True},
            "the strategy sequential may leave GPUs unused, and --use-all requires all",
        ),
        ("even", {}, "strategy 'even' is unknown"),
    ],
)
def test_contradictions_are_refused(
    strategy: Strategy, values: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        search(plain_costs(1, 1), fleet_of(9, 9), strategy=strategy, **values)  # type: ignore[arg-type]
