"""What stages of a training step cost, and the search over them: exact, by brute force."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, permutations
from typing import Any

import pytest
import rehearsing
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rehearsing import Layer, load

from duoka import Constraints, Device, Fleet
from duoka.errors import InfeasibleError
from duoka.forecast.costs import Costs
from duoka.forecast.profile import Profile
from duoka.forecast.replay_training import in_flight, replay_of
from duoka.forecast.workload import OPTIMIZERS
from duoka.hardware.device import Link
from duoka.planner.request import PlanProblem
from duoka.planner.search import NoPlacement, PlacementLimits, search
from duoka.planner.solve import find_plan, solve

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
        "optimizer": st.sampled_from(OPTIMIZERS),
        "micro_batches": st.integers(1, 4),
        "schedule": st.sampled_from(["sequential", "gpipe", "1f1b"]),
    }
)


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(layers, min_size=1, max_size=5), trainings)
def test_a_bound_is_never_more_than_the_exact_bytes(
    made: list[Layer], training: dict[str, Any]
) -> None:
    costs = Costs(rehearsing.made_up(made), load(1, **training))
    for place in (1, 2, 3):
        for start, stop in combinations(range(len(made) + 1), 2):
            peaks = replay_of(costs.profile, costs.workload, place=place).run(range(start, stop))
            assert peaks is not None
            assert costs.bounds_at(place)[start, stop] <= peaks.allocated_bytes


def placements(num_blocks: int, num_devices: int) -> Iterator[list[tuple[int, int, int]]]:
    """All of them with so many stages: (start, stop, device)."""
    for number in range(1, num_devices + 1):
        for inner in combinations(range(1, num_blocks), number - 1):
            edges = (0, *inner, num_blocks)
            for order in permutations(range(num_devices), number):
                yield [(edges[at], edges[at + 1], device) for at, device in enumerate(order)]


def left_free(
    costs: Costs, fleet: Fleet, stages: list[tuple[int, int, int]]
) -> list[tuple[int, int]] | None:
    """What each stage leaves free of which budget, rehearsed; None where one doesn't fit."""
    told = []
    for at, (start, stop, device) in enumerate(stages):
        budget = fleet.devices[device].budget_bytes
        replay = replay_of(costs.profile, costs.workload, place=len(stages) - at)
        peaks = replay.run(costs.blocks_of(start, stop), budget)
        if peaks is None or peaks.reserved_bytes > costs.usable_bytes(budget):
            return None
        told.append((budget - peaks.requested_bytes, budget))
    return told


def value_of(
    costs: Costs, fleet: Fleet, stages: list[tuple[int, int, int]], objective: str
) -> float | None:
    """What a placement is worth, to be made large; None where it doesn't fit."""
    free = left_free(costs, fleet, stages)
    if free is None:
        return None
    if objective == "headroom":
        return min(size for size, _ in free)
    if objective == "balanced":
        return min(size / budget for size, budget in free)
    named = [(fleet.names[device], start, stop) for start, stop, device in stages]
    seconds = costs.latency.seconds_of(named, fleet)
    assert seconds is not None
    return -(
        seconds.slowest_seconds if costs.time_objective == "throughput" else seconds.total_seconds
    )


def best_by_hand(
    costs: Costs, fleet: Fleet, objective: str = "headroom"
) -> tuple[int, float] | None:
    """The fewest stages, or for "balanced" the most, and what the best such placement is worth."""
    best: dict[int, float] = {}
    for stages in placements(costs.num_blocks, len(fleet.devices)):
        value = value_of(costs, fleet, stages, objective)
        if value is not None:
            best[len(stages)] = max(value, best.get(len(stages), value))
    if objective == "balanced":
        best = {number: best[number] for number in best if number == len(fleet.devices)}
    return next(((-number, best[number]) for number in sorted(best)), None)


@settings(max_examples=examples(60), deadline=None)
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
    expected = best_by_hand(Costs(profile, workload), fleet)
    try:
        solution = search(Costs(profile, workload), fleet)
    except NoPlacement:
        assert expected is None
        return
    assert (-len(solution.stages), solution.value) == expected
    assert solution.bound == solution.value


def fleet_at_random(rng: random.Random, num_devices: int) -> Fleet:
    """GPUs of different memory and speeds, some of them linked."""
    devices = tuple(
        Device(
            name=f"vgpu:{number}",
            budget_bytes=rng.choice((30, 60, 120)) * MIB,
            memory_bytes_per_second=rng.choice((1e9, 3e9)),
            flops_per_second=rng.choice((1e9, 4e9)),
        )
        for number in range(num_devices)
    )
    links = tuple(
        Link(
            source=one.name,
            target=other.name,
            bytes_per_second=rng.choice((1e8, 1e9)),
            latency_seconds=rng.choice((0.0, 1e-3)),
        )
        for one, other in permutations(devices, 2)
        if rng.random() < 0.7
    )
    return Fleet(devices=devices, links=links)


def busy(profile: Profile, rng: random.Random) -> Profile:
    """The profile with blocks that compute and move bytes, more in the backward pass."""
    kinds = tuple(
        replace(
            kind,
            traces=tuple(
                replace(
                    trace,
                    flops=(rng.randint(1, 9) * 1e6 * (number % 3 + 1),),
                    moved_bytes=(rng.randint(1, 9) * 1e6,),
                )
                for number, trace in enumerate(kind.traces)
            ),
        )
        for kind in profile.kinds
    )
    return replace(profile, kinds=kinds)


@pytest.mark.parametrize("schedule", ["sequential", "gpipe", "1f1b"])
@pytest.mark.parametrize("seed", range(12))
def test_every_objective_is_reached(seed: int, schedule: str) -> None:
    rng = random.Random(seed)
    made = [
        Layer(weight=rng.randint(1, 6) * MIB, result=MIB, saved=rng.randint(1, 6) * MIB)
        for _ in range(rng.randint(2, 5))
    ]
    profile = busy(rehearsing.made_up(made), rng)
    fleet = fleet_at_random(rng, rng.randint(1, min(3, len(made))))
    optimizer = rng.choice(["adamw", "sgd"])
    number = rng.randint(1, 5)
    workload = load(1, method="full", optimizer=optimizer, micro_batches=number, schedule=schedule)
    costs = Costs(profile, workload)
    for objective in ("latency", "throughput", "headroom", "balanced"):
        # First with room on each device, which of these small ones is an eighth.
        expected = best_by_hand(costs.leaving(lambda size: size // 8), fleet, objective)
        expected = expected or best_by_hand(costs, fleet, objective)
        balanced = objective == "balanced"
        problem = PlanProblem(
            fleet=fleet,
            workload=workload,
            objective="auto" if balanced else objective,  # type: ignore[arg-type]
            constraints=Constraints(strategy="balanced" if balanced else "auto"),
        )
        plan = solve(profile, problem) or None
        assert (plan is None) == (expected is None)
        if plan is None or expected is None:
            continue
        number, value = expected
        assert len(plan.devices) == -number
        assert plan.value == pytest.approx(plan.bound, rel=1e-12)  # added in another order
        assert plan.value == pytest.approx(abs(value), rel=1e-12)
        if value < 0:
            assert plan.objective == costs.time_objective


PROFILE = rehearsing.made_up([Layer(weight=2 * MIB, result=MIB, saved=6 * MIB)] * 6)
FLEET = Fleet.parse("virtual:3x120MiB")


def test_the_first_stage_holds_the_most_micro_batches() -> None:
    workload = load(1, method="full", optimizer="sgd", micro_batches=8, schedule="1f1b")
    plan = find_plan(PROFILE, PlanProblem(fleet=FLEET, workload=workload, use_all=True))
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
    limits = PlacementLimits(pins=((5, 0),))
    costs = Costs(PROFILE, workload)
    found = search(costs, FLEET, use_all=True, limits=limits)
    assert found.stages[-1].device == 0


def test_what_does_not_fit() -> None:
    workload = load(1, method="full", micro_batches=8, schedule="1f1b")
    with pytest.raises(InfeasibleError, match="does not fit") as caught:
        find_plan(PROFILE, PlanProblem(fleet=Fleet.parse("virtual:2x30MiB"), workload=workload))
    assert caught.value.shortfall_bytes > 0
