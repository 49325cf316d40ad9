"""The search against a brute-force oracle: every cut, every subset and order of devices."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from searching import (
    OBJECTIVES,
    Case,
    budget,
    fleet_of,
    make_case,
    oracle,
    placements,
    plain_costs,
    reserved,
    shape_of,
    value_of,
)

from duoka.errors import UsageError
from duoka.hardware.device import Link
from duoka.hardware.fleet import Fleet
from duoka.planner.search import NoPlacement, Objective, Solution, search


def check(case: Case, objective: Objective) -> Solution | None:
    """The search must find what the oracle finds, and say so truthfully."""
    expected = oracle(case, objective)
    case.costs.asked.clear()
    if expected is None:
        with pytest.raises(NoPlacement):
            search(case.costs, case.fleet, objective=objective, use_all=case.use_all)
        return None
    found = search(case.costs, case.fleet, objective=objective, use_all=case.use_all)
    num_stages, value = expected
    assert len(found.stages) == num_stages
    assert value_of(case.costs, case.fleet, found.stages, objective) == value
    assert found.value == found.bound == (-value if objective == "headroom" else value)
    assert found.stages in set(placements(case.costs, case.fleet, use_all=case.use_all))
    assert len(case.costs.asked) == len(set(case.costs.asked))
    assert found.binding_device in {stage.device for stage in found.stages}
    return found


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_random_cases_equal_brute_force(objective: Objective) -> None:
    rng = random.Random(20240607)
    found = [check(make_case(rng), objective) for _ in range(250)]
    assert 35 < sum(each is None for each in found) < 215
    assert sum(each is not None and len(each.stages) > 1 for each in found) > 35


@pytest.mark.fuzz
@settings(max_examples=examples(300), deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(OBJECTIVES))
def test_any_case_equals_brute_force(seed: int, objective: Objective) -> None:
    check(make_case(random.Random(seed)), objective)


def test_more_devices_to_use_than_blocks() -> None:
    with pytest.raises(UsageError, match=r"3 devices .* 2 blocks"):
        search(plain_costs(1, 1), fleet_of(9, 9, 9), use_all=True)
    assert len(search(plain_costs(1, 1), fleet_of(9, 9, 9)).stages) == 1


def test_ties_go_to_the_users_order_of_devices() -> None:
    assert shape_of(search(plain_costs(3, 3), fleet_of(4, 4, 4))) == [(0, 1, 0), (1, 2, 1)]
    # Either order has the same headroom; so has either pair.
    assert shape_of(search(plain_costs(3, 3), fleet_of(5, 4, 5, 4), use_all=False)) == [
        (0, 1, 0),
        (1, 2, 2),
    ]
    assert shape_of(search(plain_costs(3, 2), fleet_of(4, 3))) == [(0, 1, 0), (1, 2, 1)]


def test_ties_leave_memory_free_evenly() -> None:
    """The small device binds whatever the others do; they still share the rest."""
    found = search(plain_costs(*[2] * 11), fleet_of(3, 24, 24), use_all=True)
    assert found.value == 1
    assert sorted(stop - start for start, stop, _ in shape_of(found)) == [1, 5, 5]
    alike = search(plain_costs(*[2] * 10), fleet_of(16, 16, speed=1.0), objective="latency")
    assert [stage.stop - stage.start for stage in alike.stages] == [5, 5]


def test_exact_bounds_need_one_evaluation_for_each_stage() -> None:
    costs = plain_costs(*[3] * 40)
    found = search(costs, fleet_of(*[31] * 8))
    assert len(costs.asked) == len(found.stages) == 4


def test_one_answer_serves_all_stages_that_are_alike() -> None:
    costs = plain_costs(*[3] * 40)
    starts, stops = np.indices(costs.stage_classes.shape)
    costs.stage_classes = stops - starts
    search(costs, fleet_of(*[31] * 8))
    assert len(costs.asked) == 1


def test_auto_is_headroom_unless_speeds_differ() -> None:
    costs, fleet = plain_costs(1, 1), fleet_of(9, 9, speed=1.0)
    assert search(costs, fleet_of(9, 9)).objective == "headroom"
    assert search(costs, fleet).objective == "headroom"
    faster = replace(fleet.devices[1], memory_bytes_per_second=2.0)
    mixed = Fleet(devices=(fleet.devices[0], faster))
    assert search(costs, mixed).objective == "latency"
    unknown = replace(faster, memory_bytes_per_second=None)
    assert search(costs, Fleet(devices=(fleet.devices[0], unknown))).objective == "headroom"


def test_speeds_must_be_known_for_times() -> None:
    with pytest.raises(UsageError, match="vgpu:0"):
        search(plain_costs(1), fleet_of(9), objective="latency")
    with pytest.raises(UsageError, match="fastest"):
        search(plain_costs(1), fleet_of(9), objective="fastest")  # type: ignore[arg-type]


def test_a_pair_without_a_link_is_as_slow_as_the_slowest() -> None:
    fleet = fleet_of(2, 1, 2, speed=1.0)
    link = Link(source="vgpu:0", target="vgpu:1", bytes_per_second=1.0, latency_seconds=5)
    fast = Link(source="vgpu:2", target="vgpu:0", bytes_per_second=4.0, latency_seconds=0)
    found = search(plain_costs(1, 1, 1), replace(fleet, links=(link, fast)), objective="latency")
    assert [stage.device for stage in found.stages] == [2, 0]
    assert found.value == 3 / 8 + 1 / 4
    found = search(plain_costs(1, 1, 1), replace(fleet, links=(link,)), objective="throughput")
    assert (found.value, found.binding_device) == (6, found.stages[0].device)


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=6),
    st.lists(st.integers(1, 20), min_size=1, max_size=3),
    st.booleans(),
)
def test_the_shortfall_is_the_least(sizes: list[int], budgets: list[int], use_all: bool) -> None:
    costs, fleet = plain_costs(*sizes), fleet_of(*budgets)
    use_all = use_all and len(budgets) <= len(sizes)
    roomy = fleet_of(*[sum(sizes)] * len(budgets))  # where everything fits
    expected = min(
        sum(max(0, reserved(costs, roomy, s) - budget(fleet, s)) for s in stages)
        for stages in placements(costs, roomy, use_all=use_all)
    )
    if not expected:
        assert search(costs, fleet, use_all=use_all).stages
        return
    with pytest.raises(NoPlacement) as caught:
        search(costs, fleet, use_all=use_all)
    assert caught.value.shortfall_bytes() == expected


def test_a_stage_that_exceeds_its_bound_misses_at_least_a_byte() -> None:
    costs = replace(plain_costs(1, 1), exact=defaultdict(lambda: np.full((3, 3), -1)))
    with pytest.raises(NoPlacement) as caught:
        search(costs, fleet_of(5))
    assert caught.value.shortfall_bytes() == 1


def test_many_identical_devices_are_no_work() -> None:
    found = search(plain_costs(*[1] * 64), fleet_of(*[1] * 64))
    assert shape_of(found) == [(index, index + 1, index) for index in range(64)]


def test_many_different_devices_are_refused_before_the_work() -> None:
    fleet = fleet_of(*range(10, 40))
    assert len(search(plain_costs(*[5] * 10), fleet).stages) == 2
    with pytest.raises(UsageError, match="sets of"):
        search(plain_costs(*[1] * 400), fleet)
