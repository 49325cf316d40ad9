"""Room: what is left free by default, and that little room is told."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny
from tiny import MIB

from duoka.forecast.costs import Costs
from duoka.forecast.workload import Workload
from duoka.planner.device_map import DeviceMap
from duoka.planner.plan import Plan
from duoka.planner.request import PlanProblem
from duoka.planner.room import cache_tokens, is_tight, preferences, room_bytes
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
        "2 of 2 GPUs are needed: no single GPU fits the workload with the recommended headroom."
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
    assert plan.why[-1].text.endswith("; no placement has the recommended headroom on every GPU.")


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
