"""Room: what is left free by default, and that little room is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise, permutations

import pytest
import tiny
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import MIB

from duoka.forecast.costs import Costs
from duoka.forecast.replay_training import replay_of
from duoka.forecast.workload import Workload
from duoka.hardware.fleet import Fleet
from duoka.planner.device_map import DeviceMap
from duoka.planner.plan import Plan
from duoka.planner.request import PlanProblem
from duoka.planner.room import cache_tokens, is_tight, preferences, room_bytes
from duoka.planner.search import NoPlacement, search
from duoka.planner.solve import find_plan

LOAD = Workload(prompt_tokens=6000, new_tokens=40, dtype="bfloat16")
WHOLE = replace(LOAD, prefill_chunk_tokens=None)
MODEL = tiny.made_up([40 * MIB] * 6, tiny.Costs(cache=512, work=16384))


def planned(*budgets_mib: float, load: Workload = LOAD, use_all: bool = False) -> Plan:
    return find_plan(
        MODEL, PlanProblem(fleet=tiny.fleet(*budgets_mib), workload=load, use_all=use_all)
    )


def told(plan: Plan) -> list[str]:
    return [reason.kind for reason in plan.why]


@pytest.mark.parametrize(
    ("budget_mib", "room_mib"),
    [(64, 8), (1024, 128), (4096, 512), (12 * 1024, 512), (17066, 512), (80 * 1024, 2457.6)],
)
def test_room_is_three_percent_or_512_mib_or_an_eighth(budget_mib: int, room_mib: float) -> None:
    assert room_bytes(budget_mib * MIB) == pytest.approx(room_mib * MIB, abs=1)


def test_a_second_gpu_is_taken_for_room() -> None:
    needed = planned(4000, load=WHOLE).forecast.devices[0].reserved_bytes / MIB
    roomy, close = (planned(size, 300, load=WHOLE) for size in (needed * 8 / 7 + 1, needed + 1))
    assert len(roomy.devices) == 1
    assert len(close.devices) == 2
    assert not any(map(is_tight, close.forecast.devices))
    (reason,) = close.why
    assert reason.text == (
        "2 of 2 GPUs are needed; no single one holds the workload with room to spare."
    )


def test_large_chunks_with_room_are_tried_first_and_whatever_fits_last() -> None:
    chunks = (None, 4096, 2048, 1024, 512)
    every = [Costs(MODEL, replace(LOAD, prefill_chunk_tokens=chunk)) for chunk in chunks]
    tried = [
        [(costs.workload.prefill_chunk_tokens, costs.room is not None) for costs in some]
        for some in preferences(every)
    ]
    assert tried == [
        [(chunk, True) for chunk in (None, 4096, 2048)],
        [(chunk, True) for chunk in (1024, 512)],
        [(chunk, False) for chunk in chunks],
    ]
    assert len([*preferences(every[-1:])]) == 2  # a small chunk that was asked for


def test_another_gpu_comes_before_a_chunk_below_2048() -> None:
    whole = replace(LOAD, prefill_chunk_tokens=2048)
    (stage,) = planned(4000, load=whole).forecast.devices
    plan = planned(stage.reserved_bytes / MIB + 1, 300)
    assert len(plan.devices) == 2
    assert plan.workload.prefill_chunk_tokens is None


def test_where_nothing_leaves_room_it_is_told() -> None:
    smallest = replace(LOAD, prefill_chunk_tokens=512)
    (stage,) = planned(4000, load=smallest).forecast.devices
    plan = planned(stage.reserved_bytes / MIB + 1)
    assert any(map(is_tight, plan.forecast.devices))
    assert "little-room" in told(plan)
    assert plan.why[-1].text.endswith("; no placement that fits leaves so much on each.")


def test_a_map_runs_in_the_largest_chunk_that_leaves_room() -> None:
    def mapped(budget_mib: float) -> Plan:
        problem = PlanProblem(
            fleet=tiny.fleet(budget_mib), workload=LOAD, device_map=DeviceMap.of("vgpu:0")
        )
        return find_plan(MODEL, problem)

    whole = mapped(4000)
    assert whole.workload.prefill_chunk_tokens is None
    needed = whole.forecast.devices[0].reserved_bytes / MIB
    smaller = mapped(needed + 1)
    assert smaller.workload.prefill_chunk_tokens == 4096
    assert "little-room" not in told(smaller)
    tight = replace(LOAD, prefill_chunk_tokens=None)
    problem = PlanProblem(
        fleet=tiny.fleet(needed + 1), workload=tight, device_map=DeviceMap.of("vgpu:0")
    )
    (*_, last) = find_plan(MODEL, problem).why
    assert last.kind == "little-room"
    assert "no placement" not in last.text


def test_the_cache_grows_into_what_is_free_beside_the_room() -> None:
    plan = planned(1000, load=WHOLE)
    (stage,) = plan.forecast.devices
    each = stage.kv_cache_bytes / WHOLE.context_tokens
    spare = stage.budget_bytes - room_bytes(stage.budget_bytes) - stage.reserved_bytes
    expected = WHOLE.context_tokens + spare / each
    assert cache_tokens(plan.forecast, plan.workload) == pytest.approx(expected, abs=2)
    tight = replace(plan.forecast, devices=(replace(stage, budget_bytes=stage.reserved_bytes),))
    assert cache_tokens(tight, plan.workload) == WHOLE.context_tokens
    without = replace(plan.forecast, devices=(replace(stage, kv_cache_bytes=0),))
    assert cache_tokens(without, plan.workload) == 0


@settings(max_examples=examples(30), deadline=None)
@given(
    weights=st.lists(st.sampled_from([10 * MIB, 40 * MIB]), min_size=3, max_size=5),
    cache=st.sampled_from([512, 30_000, 120_000]),
    chunk=st.sampled_from([None, 64, 300]),
    parts=st.lists(st.integers(20, 160), min_size=1, max_size=3),
    has_room=st.booleans(),
)
def test_the_placement_is_the_best_of_all_with_and_without_room(
    weights: list[int], cache: int, chunk: int | None, parts: list[int], has_room: bool
) -> None:
    profile = tiny.made_up(weights, tiny.Costs(cache=cache, work=16384))
    load = replace(WHOLE, prompt_tokens=1200, new_tokens=4, prefill_chunk_tokens=chunk)
    costs = Costs(profile, load)
    most = int(costs.lower_bound_bytes[0, -1]) / MIB
    fleet = tiny.fleet(*(most * part / 100 for part in parts))
    by_hand = best_by_hand(Costs(profile, load), fleet, room_bytes if has_room else lambda _: 0)
    try:
        solution = search(costs.leaving(room_bytes) if has_room else costs, fleet)
    except NoPlacement:
        assert by_hand is None
        return
    assert (len(solution.stages), solution.value) == by_hand


def best_by_hand(
    costs: Costs, fleet: Fleet, room: Callable[[int], int]
) -> tuple[int, float] | None:
    """The fewest stages that leave room, and the largest least headroom of all such placements."""
    budgets = [device.budget_bytes for device in fleet.devices]
    replay = replay_of(costs.profile, costs.workload)
    for number in range(1, min(len(budgets), costs.num_blocks) + 1):
        values = []
        for inner in combinations(range(1, costs.num_blocks), number - 1):
            runs = [range(*run) for run in pairwise((0, *inner, costs.num_blocks))]
            for order in permutations(budgets, number):
                peaks = [replay.run(run, size) for run, size in zip(runs, order, strict=True)]
                free = [
                    size - peak.requested_bytes
                    for peak, size in zip(peaks, order, strict=True)
                    if peak is not None and peak.reserved_bytes <= size - room(size)
                ]
                values += [min(free)] if len(free) == number else []
        if values:
            return number, max(values)
    return None
