"""What is told of a plan is what the search would find: every number is computed again here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import rehearsing
from tiny import MIB, Costs, fleet, made_up

from duoka import explain
from duoka.errors import FormatError, UsageError
from duoka.forecast.costs import Costs as Measured
from duoka.forecast.profile import Profile
from duoka.forecast.workload import Workload
from duoka.hardware.fleet import Fleet
from duoka.planner.device_map import DeviceMap
from duoka.planner.plan import Plan
from duoka.planner.request import PlanProblem
from duoka.planner.search.dynamic_programme import BlockRange
from duoka.planner.solve import find_plan

WORKLOAD = Workload(prompt_tokens=1000, new_tokens=24, prefill_chunk_tokens=None, dtype="bfloat16")
PROFILE = made_up([12 * MIB, *[8 * MIB] * 10, 20 * MIB], Costs(cache=4096))
CARDS = "MyCard:{}MiB,900GB/s,70TFLOPs+Other:{}MiB,450GB/s,70TFLOPs"


def planned(gpus: Fleet, workload: Workload = WORKLOAD, profile: Profile = PROFILE) -> Plan:
    return find_plan(profile, PlanProblem(fleet=gpus, workload=workload))


def stages_of(parts: Sequence[tuple[str, Sequence[str]]], gpus: Fleet) -> tuple[BlockRange, ...]:
    stages, start = [], 0
    for device, modules in parts:
        stop = start + len(modules)
        stages.append(BlockRange(start=start, stop=stop, device=gpus.names.index(device)))
        start = stop
    assert start == len(PROFILE.blocks)
    return tuple(stages)


def test_changes_are_what_the_search_thinks_of_them() -> None:
    gpus = fleet(130, 126)
    plan = planned(gpus)
    costs = Measured(PROFILE, plan.workload)
    found = explain(plan, PROFILE)
    own = [(share.device, share.modules) for share in found.shares]
    assert [modules for _, modules in own] == [
        tuple(name for name, at in plan.placement.entries if at == device) for device, _ in own
    ]
    assert {(change.giver.device, change.taker.device) for change in found.changes} == {
        ("vgpu:0", "vgpu:1"),
        ("vgpu:1", "vgpu:0"),
    }
    for change in found.changes:
        after = {**dict(own), change.giver.device: change.giver.modules}
        after[change.taker.device] = change.taker.modules
        stages = stages_of([(name, after[name]) for name, _ in own], gpus)
        fits = min(change.giver.headroom_bytes, change.taker.headroom_bytes) >= 0
        assert (change.outcome == "impossible") == (not fits)
        if change.outcome == "tight":
            assert fits
            assert change.value is None
        elif fits:
            needs = [costs.requested_bytes(s.start, s.stop, 1 << 50) or 0 for s in stages]
            free = [
                gpus.devices[s.device].budget_bytes - n for s, n in zip(stages, needs, strict=True)
            ]
            assert change.value == min(free)
            assert change.value <= plan.value  # the plan is the optimum
        for share, stage in zip((after[name] for name, _ in own), stages, strict=True):
            needed = costs.requested_bytes(stage.start, stage.stop, 1 << 50)
            told = [s for s in (change.giver, change.taker) if s.modules == share]
            assert [each.requested_bytes for each in told] == [needed]


def test_one_gpu_has_no_boundaries() -> None:
    found = explain(planned(fleet(200, 100)), PROFILE)
    assert (len(found.shares), found.changes, found.fewer) == (1, (), None)


def test_one_gpu_less_is_missing_something() -> None:
    plan = planned(fleet(100, 96))
    found = explain(plan, PROFILE).fewer
    assert found is not None
    assert found.devices == ("vgpu:0",)
    whole = Measured(PROFILE, plan.workload)
    needed = whole.requested_bytes(0, whole.num_blocks, 1 << 50)
    assert needed is not None
    assert 0 < found.missing_bytes <= needed - 100 * MIB
    everything = find_plan(
        PROFILE, PlanProblem(fleet=fleet(300, 300), workload=WORKLOAD, use_all=True)
    )
    assert explain(everything, PROFILE).fewer is None


def test_a_step_of_training_has_one_shortest_time() -> None:
    gpus = Fleet.parse(CARDS.format(900, 880))
    layer = rehearsing.Layer(weight=2 * MIB, result=MIB, saved=6 * MIB)
    profile = rehearsing.made_up([layer] * 6)
    load = rehearsing.load(1, method="full", micro_batches=8, schedule="1f1b")
    problem = PlanProblem(fleet=gpus, workload=load, objective="throughput", use_all=True)
    plan = find_plan(profile, problem)
    found = explain(plan, profile)
    assert (found.work, found.objective, found.value) == ("step", "throughput", plan.value)
    assert {change.outcome for change in found.changes} <= {"worse", "equal", "impossible"}


def test_a_map_by_hand_is_explained_as_far_as_it_goes() -> None:
    gpus = fleet(150, 150)
    zigzag = {f"block.{number}": number % 2 for number in range(12)}
    problem = PlanProblem(fleet=gpus, workload=WORKLOAD, device_map=DeviceMap.of(zigzag))
    found = explain(find_plan(PROFILE, problem), PROFILE)
    assert (found.objective, found.changes) == ("given", ())
    halves = {f"block.{number}": int(number > 3) for number in range(12)}
    problem = replace(problem, device_map=DeviceMap.of(halves))
    found = explain(find_plan(PROFILE, problem), PROFILE)
    assert {change.outcome for change in found.changes} == {"better", "worse"}


def test_without_a_profile_it_is_said() -> None:
    plan = planned(fleet(100, 96))
    with pytest.raises(UsageError, match="no profile of MadeUp in the cache"):
        explain(plan)
    with pytest.raises(FormatError, match="or has changed; different"):
        explain(plan, replace(PROFILE, fingerprint="other"))


def test_a_plan_that_places_too_little_is_refused() -> None:
    plan = planned(fleet(100, 96))
    short = replace(plan.placement, entries=(*plan.placement.entries[1:],))
    with pytest.raises(FormatError, match=r"has no placement of block\.0"):
        explain(replace(plan, placement=short), PROFILE)


def test_what_leaves_too_little_room_is_tight() -> None:
    found = explain(planned(fleet(115, 110)), PROFILE)
    assert found.leaves_room
    assert [change.outcome for change in found.changes] == ["tight", "tight"]
    for change in found.changes:
        assert change.value is None
        assert change.taker.is_tight
        assert change.taker.headroom_bytes > 0
    assert not explain(planned(fleet(100, 96)), PROFILE).leaves_room
