"""The planner on made-up profiles: optimal, deterministic, and refusing with ways that work."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import tiny
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import MIB

from duoka import Device, Fleet, Workload
from duoka.errors import InfeasibleError, UsageError
from duoka.forecast.costs import Costs
from duoka.forecast.profile import Profile
from duoka.planner.constraints import Constraints
from duoka.planner.limits import usable
from duoka.planner.planner import with_chunks
from duoka.planner.request import PlanProblem
from duoka.planner.solve import find_plan

LOAD = Workload(prompt_tokens=700, new_tokens=40, dtype="bfloat16", prefill_chunk_tokens=None)
LAYERS = tiny.made_up([60 * MIB, *[40 * MIB] * 6, 60 * MIB], tiny.Costs(cache=2048))
TIED = tiny.made_up([60 * MIB, *[40 * MIB] * 4, 0], tiny.Costs(cache=2048), tied_to={5: 0})


def ask(*budgets_mib: float, load: Workload = LOAD, use_all: bool = False) -> PlanProblem:
    return PlanProblem(fleet=tiny.fleet(*budgets_mib), workload=load, use_all=use_all)


def headrooms(
    profile: Profile, problem: PlanProblem, *, room: float = 0.0
) -> Iterator[tuple[int, float]]:
    """Devices used and least headroom, for every cut and every order of devices.

    On each a share `room` of its budget isn't reserved.
    """
    costs = Costs(profile, problem.workload)
    budgets = [device.budget_bytes for device in problem.fleet.devices]
    for count in range(1, len(budgets) + 1):
        for cuts in itertools.combinations(range(1, costs.num_blocks), count - 1):
            edges = [0, *cuts, costs.num_blocks]
            for chosen in itertools.permutations(budgets, count):
                free = []
                for (start, stop), budget in zip(itertools.pairwise(edges), chosen, strict=True):
                    needed = costs.requested_bytes(start, stop, budget)
                    peaks = costs.stage_bytes(start, stop, budget)
                    if needed is None or peaks is None:
                        break
                    if peaks.reserved_bytes > budget * (1 - room):
                        break
                    free.append(budget - needed)
                else:
                    yield count, min(free)


@settings(max_examples=examples(15))
@given(
    budgets=st.lists(st.integers(60, 300), min_size=1, max_size=3),
    weights=st.lists(st.integers(1, 60), min_size=3, max_size=6),
    cache=st.sampled_from([0, 2048, 20_000]),
    use_all=st.booleans(),
)
def test_nothing_is_better(
    budgets: list[int], weights: list[int], cache: int, use_all: bool
) -> None:
    profile = tiny.made_up([w * MIB for w in weights], tiny.Costs(cache=cache))
    use_all = use_all and len(budgets) <= len(weights)
    problem = ask(*budgets, use_all=use_all)
    number = len(budgets)
    for room in (1 / 8, 0.0):  # an eighth of so small a budget stays free, where it can
        found = [
            pair
            for pair in headrooms(profile, problem, room=room)
            if not use_all or pair[0] == number
        ]
        if found:
            break
    if not found:
        with pytest.raises(InfeasibleError):
            find_plan(profile, problem)
        return
    plan = find_plan(profile, problem)
    fewest = min(count for count, _ in found)
    assert len(plan.devices) == fewest
    best = max(free for count, free in found if count == fewest)
    assert plan.value == best == plan.bound
    assert min(device.headroom_bytes for device in plan.forecast.devices) == best
    assert plan.objective == "headroom"


def test_the_same_question_has_the_same_answer() -> None:
    problem = ask(240, 200, 220)
    assert find_plan(LAYERS, problem) == find_plan(LAYERS, problem)
    again = tiny.made_up([60 * MIB, *[40 * MIB] * 6, 60 * MIB], tiny.Costs(cache=2048))
    assert find_plan(again, problem).to_json() == find_plan(LAYERS, problem).to_json()


def test_one_gpu_when_one_suffices() -> None:
    plan = find_plan(LAYERS, ask(300, 1000, 600))
    assert plan.devices == ("vgpu:1",)
    assert any("One GPU is enough: vgpu:1" in reason.text for reason in plan.why)


def test_all_gpus_when_asked() -> None:
    plan = find_plan(LAYERS, ask(300, 1000, 600, use_all=True))
    assert set(plan.devices) == {"vgpu:0", "vgpu:1", "vgpu:2"}
    assert not any("suffices" in reason.text for reason in plan.why)
    with pytest.raises(UsageError, match="8 blocks"):
        find_plan(LAYERS, ask(*[400] * 9, use_all=True))


def test_a_plan_is_whole_and_contiguous() -> None:
    plan = find_plan(LAYERS, ask(240, 200, 220))
    assert list(plan.device_map) == [f"block.{index}" for index in range(8)]
    runs = [device for device, _ in itertools.groupby(plan.device_map.values())]
    assert len(runs) == len(set(runs))
    for device in plan.forecast.devices:
        assert device.reserved_bytes <= device.budget_bytes
    total = sum(device.weight_bytes for device in plan.forecast.devices)
    assert total == LAYERS.weight_bytes


def test_a_tied_head_runs_on_its_partners_device() -> None:
    plan = find_plan(TIED, ask(160, 240, use_all=True))
    assert plan.device_map["block.5"] == plan.device_map["block.0"]
    assert plan.device_map["block.4"] != plan.device_map["block.5"]
    assert any("Tied" in reason.text for reason in plan.why)
    assert sum(d.weight_bytes for d in plan.forecast.devices) == TIED.weight_bytes


# Chunks.


def test_the_chunks_to_try() -> None:
    auto = replace(LOAD, prompt_tokens=3000, prefill_chunk_tokens="auto")
    assert [w.prefill_chunk_tokens for w in with_chunks(auto)] == [None, 2048, 1024, 512]
    fixed = replace(auto, prefill_chunk_tokens=100)
    assert list(with_chunks(fixed)) == [fixed]


HUNGRY = tiny.made_up([40 * MIB] * 4, tiny.Costs(cache=256, result=8192, work=32768))


def test_the_largest_chunk_that_fits_where_it_does_not() -> None:
    load = replace(LOAD, prompt_tokens=4000, prefill_chunk_tokens="auto")
    plan = find_plan(HUNGRY, ask(300, load=load))
    chunk = plan.workload.prefill_chunk_tokens
    assert chunk == 2048
    assert any("chunks of 2048 tokens" in reason.text for reason in plan.why)
    with pytest.raises(InfeasibleError):
        find_plan(HUNGRY, ask(300, load=replace(load, prefill_chunk_tokens=None)))
    find_plan(HUNGRY, ask(300, load=replace(load, prefill_chunk_tokens=chunk)))


def test_a_chunk_that_saves_a_gpu_is_taken() -> None:
    load = replace(LOAD, prompt_tokens=4000, prefill_chunk_tokens="auto")
    whole = find_plan(HUNGRY, ask(300, 300, load=replace(load, prefill_chunk_tokens=None)))
    assert len(whole.devices) == 2
    plan = find_plan(HUNGRY, ask(300, 300, load=load))
    assert len(plan.devices) == 1
    assert plan.workload.prefill_chunk_tokens is not None


# Refusals.


def test_what_was_demanded_is_told_where_it_matters() -> None:
    profile = tiny.made_up([40 * tiny.MIB] * 4)

    def why(*budgets: int, **demands: Any) -> str:
        constraints = Constraints(**demands)
        fleet = usable(tiny.fleet(*budgets), constraints)
        problem = PlanProblem(fleet=fleet, workload=Workload(), constraints=constraints)
        return " ".join(reason.text for reason in find_plan(profile, problem).why)

    unused = "vgpu:0 is not used; 300.00 MiB of it were reserved."
    assert unused in why(400, 400, reserve=(("vgpu:0", 300 * tiny.MIB),))
    assert unused not in why(900, 400, reserve=(("vgpu:0", 300 * tiny.MIB),))
    assert "No weights are offloaded" in why(400, offload=True)
    assert "offloaded" not in why(400)


def test_a_context_beyond_the_models_is_refused() -> None:
    profile = replace(LAYERS, max_context_tokens=512)
    with pytest.raises(UsageError, match=r"700 prompt and 40 new tokens are 740; MadeUp .* 512"):
        find_plan(profile, ask(1000))


def test_a_block_that_fits_nowhere_is_refused() -> None:
    huge = tiny.made_up([MIB, 100 * MIB, MIB])
    with pytest.raises(InfeasibleError) as caught:
        find_plan(huge, ask(50, 50))
    assert caught.value.shortfall_bytes >= 50 * MIB
    assert caught.value.ways_out == ()
    assert caught.value.hint is not None


# Speeds.


def timed(*speeds: float) -> Fleet:
    return Fleet(
        devices=tuple(
            Device(
                name=f"vgpu:{index}",
                budget_bytes=300 * MIB,
                memory_bytes_per_second=speed,
                flops_per_second=1e15,
            )
            for index, speed in enumerate(speeds)
        )
    )


def test_the_faster_gpu_takes_more_for_latency() -> None:
    problem = PlanProblem(fleet=timed(1e9, 5e9), workload=LOAD)
    plan = find_plan(LAYERS, problem)
    assert plan.objective == "latency"
    assert plan.forecast.seconds is not None
    assert list(plan.device_map.values()).count("vgpu:1") > 4
    assert plan.forecast.seconds.total_seconds == pytest.approx(plan.value)
    even = find_plan(LAYERS, replace(problem, objective="headroom"))
    assert even.forecast.seconds is not None
    assert even.forecast.seconds.total_seconds >= plan.forecast.seconds.total_seconds


def test_a_further_gpu_makes_no_more_missing() -> None:
    profile = tiny.made_up([30 * MIB, *[20 * MIB] * 4, 30 * MIB], tiny.Costs(cache=4096, work=9000))
    workload = Workload(prompt_tokens=900, new_tokens=4, dtype="bfloat16")
    missing = []
    for budgets in ((161,), (161, 2)):
        with pytest.raises(InfeasibleError) as caught:
            find_plan(profile, PlanProblem(fleet=tiny.fleet(*budgets), workload=workload))
        missing.append(caught.value.shortfall_bytes)
    assert missing == [1, 1]


@pytest.mark.parametrize("budget_mib", [390, 400, 440])
def test_pins_that_forbid_more_devices_leave_a_tight_plan(budget_mib: int) -> None:
    """Room would take a second device, which the pins rule out: the first one holds it all."""
    constraints = Constraints(pins=(("block.0", "0"), ("block.7", "0")))
    problem = replace(ask(budget_mib, budget_mib), constraints=constraints)
    assert len(find_plan(LAYERS, problem).devices) == 1
