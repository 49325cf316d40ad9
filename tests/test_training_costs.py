"""What stages of a training step cost, and the search over them: exact, by brute force."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, permutations
from typing import Any

import pytest
import rehearsing
from hypothesis import given, settings
from hypothesis import strategies as st
from rehearsing import Layer, load

from duoka import Fleet
from duoka.errors import InfeasibleError
from duoka.forecast import Costs
from duoka.planner import Question, solve
from duoka.rehearsal import in_flight
from duoka.search import Limits, NoPlacement, search
from duoka.training_costs import TrainingCosts, costs_of

MIB = 2**20

layers = st.builds(
    Layer,
    weight=st.integers(1, 6).map(lambda number: number * MIB),
    result=st.integers(1, 8).map(lambda number: number * MIB // 4),
    saved=st.integers(1, 12).map(lambda number: number * MIB // 2),
)
trainings = st.fixed_dictionaries(
    {
        "method": st.just("full"),
        "optimizer": st.sampled_from(["adamw", "sgd"]),
        "micro_batches": st.integers(1, 4),
        "schedule": st.sampled_from(["sequential", "gpipe", "1f1b"]),
    }
)


@settings(max_examples=30, deadline=None)
@given(st.lists(layers, min_size=1, max_size=5), trainings)
def test_a_bound_is_never_more_than_the_exact_bytes(
    made: list[Layer], training: dict[str, Any]
) -> None:
    costs = costs_of(rehearsing.made_up(made), load(1, **training))
    for place in (1, 2, 3):
        for start, stop in combinations(range(len(made) + 1), 2):
            # Not the training costs' own, which the bound is a floor of.
            exact = Costs.allocated_bytes(costs, start, stop, 2**60, place=place)
            assert exact is not None
            assert costs.bounds_at(place)[start, stop] <= exact


def placements(num_blocks: int, num_devices: int) -> Iterator[list[tuple[int, int, int]]]:
    """All of them with so many stages: (start, stop, device)."""
    for number in range(1, num_devices + 1):
        for inner in combinations(range(1, num_blocks), number - 1):
            edges = (0, *inner, num_blocks)
            for order in permutations(range(num_devices), number):
                yield [(edges[at], edges[at + 1], device) for at, device in enumerate(order)]


def best_by_hand(costs: Costs, fleet: Fleet) -> tuple[int, float] | None:
    """The fewest stages, and the most that they leave free on each device."""
    best: tuple[int, float] | None = None
    for stages in placements(costs.num_blocks, len(fleet.devices)):
        frees = []
        for at, (start, stop, device) in enumerate(stages):
            budget = fleet.devices[device].budget_bytes
            bytes_ = costs.allocated_bytes(start, stop, budget, place=len(stages) - at)
            frees.append(None if bytes_ is None else budget - bytes_)
        if None not in frees:
            found = -len(stages), min(free for free in frees if free is not None)
            best = found if best is None else max(best, found)
    return best


@settings(max_examples=60, deadline=None)
@given(
    st.lists(layers, min_size=1, max_size=5),
    trainings,
    st.lists(st.sampled_from([24, 40, 60, 90]), min_size=1, max_size=3),
)
def test_the_best_placement_is_the_best_of_all(
    made: list[Layer], training: dict[str, Any], budgets: list[int]
) -> None:
    fleet = Fleet.parse("virtual:" + ",".join(f"{budget}MiB" for budget in budgets))
    profile, workload = rehearsing.made_up(made), load(1, **training)
    expected = best_by_hand(TrainingCosts(profile, workload), fleet)
    try:
        solution = search(costs_of(profile, workload), fleet)
    except NoPlacement:
        assert expected is None
        return
    assert (-len(solution.stages), solution.value) == expected
    assert solution.bound == solution.value


PROFILE = rehearsing.made_up([Layer(weight=2 * MIB, result=MIB, saved=6 * MIB)] * 6)
FLEET = Fleet.parse("virtual:3x120MiB")


def test_the_first_stage_holds_the_most_micro_batches() -> None:
    workload = load(1, method="full", optimizer="sgd", micro_batches=8, schedule="1f1b")
    plan = solve(PROFILE, Question(fleet=FLEET, workload=workload, use_all=True))
    numbers = [list(plan.device_map.values()).count(name) for name in plan.devices]
    assert numbers == sorted(numbers)
    assert numbers[0] < numbers[-1]
    flying = [in_flight(workload.training, place) for place in (3, 2, 1)]  # type: ignore[arg-type]
    for told, number, count in zip(plan.forecast.devices, numbers, flying, strict=True):
        assert told.activation_bytes // (6 * MIB) >= number * count
        assert told.gradient_bytes + told.optimizer_bytes > 0
        assert told.kv_cache_bytes == 0


def test_pins_hold_where_places_count() -> None:
    workload = load(1, method="full", micro_batches=8, schedule="1f1b")
    limits = Limits(uncut=frozenset({1, 2}), pins=((5, 0),))
    costs = costs_of(PROFILE, workload)
    found = search(costs, FLEET, use_all=True, limits=limits)
    assert found.stages[-1].device == 0
    assert {stage.start for stage in found.stages}.isdisjoint({1, 2})


def test_what_does_not_fit() -> None:
    workload = load(1, method="full", micro_batches=8, schedule="1f1b")
    with pytest.raises(InfeasibleError, match="does not fit") as caught:
        solve(PROFILE, Question(fleet=Fleet.parse("virtual:2x30MiB"), workload=workload))
    assert caught.value.shortfall_bytes > 0
