"""Ways out: every one works as it is told, and the numbers are those of its plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from tiny import MIB

from duoka import Fleet, Plan, Workload, models
from duoka.errors import InfeasibleError, ModelError, WayOut
from duoka.forecast.profile import Profile
from duoka.planner.constraints import Constraints
from duoka.planner.device_map import DeviceMap
from duoka.planner.request import PlanProblem
from duoka.planner.resolve import answer
from duoka.planner.solve import find_plan
from duoka.planner.suggestions import SuggestionSearch
from duoka.tracing.get_profile import profile_module

LOAD = Workload(prompt_tokens=3000, new_tokens=40, batch=4, dtype="bfloat16")
WEIGHTS = [60 * MIB, *[40 * MIB] * 6, 60 * MIB]
LAYERS = tiny.made_up(WEIGHTS, tiny.Costs(cache=2048))
FLAGS = {"--offload"}


def ask(gpus: str, load: Workload = LOAD, **more: Any) -> PlanProblem:
    return PlanProblem(fleet=Fleet.parse(gpus), workload=load, gpus=gpus, **more)


def refused(
    problem: PlanProblem,
    profile: Profile = LAYERS,
    profile_for: Callable[[Workload], Profile | None] | None = None,
) -> InfeasibleError:
    with pytest.raises(InfeasibleError) as caught:
        answer(profile, problem, profile_for=profile_for)
    return caught.value


def follow(way: WayOut, problem: PlanProblem) -> PlanProblem:
    """What a way's options make of a problem."""
    said = _values(way.options)
    load, constraints, fleet = problem.workload, problem.constraints, problem.fleet
    if "--context" in said:
        new = int(said["--new-tokens"])
        load = replace(load, prompt_tokens=int(said["--context"]) - new, new_tokens=new)
    if "--batch" in said:
        load = replace(load, batch=int(said["--batch"]))
    if "--prefill-chunk" in said:
        load = replace(load, prefill_chunk_tokens=int(said["--prefill-chunk"]))
    named: Any = {"cache": said.get("--cache"), "quantize": said.get("--quantize")}
    named["pages_for_batch"] = said.get("--cache") == "paged"
    load = replace(load, **{name: value for name, value in named.items() if value})
    if "--gpus" in said:
        fleet = Fleet.parse(said["--gpus"])
    if "--offload" in said:
        constraints = replace(constraints, offload=True)
    device_map = None if "--device-map" in way.without else problem.device_map
    return replace(
        problem, workload=load, fleet=fleet, constraints=constraints, device_map=device_map
    )


def _values(options: Sequence[str]) -> dict[str, str]:
    left, said = list(options), {}
    while left:
        name = left.pop(0)
        said[name] = "" if name in FLAGS else left.pop(0)
    return said


def kinds(error: InfeasibleError) -> list[str]:
    return [way.kind for way in error.ways_out]


def matches(way: WayOut, plan: Plan) -> bool:
    return (
        way.context_tokens == plan.workload.context_tokens
        and way.batch == plan.workload.batch
        and way.prefill_chunk_tokens == plan.workload.prefill_chunk_tokens
        and way.num_gpus == len(plan.devices)
        and way.free_bytes == min(each.free_bytes for each in plan.forecast.devices)
    )


@pytest.mark.parametrize("gpus", ["virtual:270MiB,250MiB", "virtual:200MiB", "virtual:3x120MiB"])
def test_every_way_works_as_it_is_told(gpus: str) -> None:
    problem = ask(gpus)
    error = refused(problem)
    assert error.shortfall_bytes >= 0
    assert "gpu" in kinds(error)
    for way in error.ways_out:
        assert matches(way, find_plan(LAYERS, follow(way, problem))), way
    assert error.hint == "; or ".join(way.sentence for way in error.ways_out)


def test_fewer_tokens_and_smaller_batches_go_as_far_as_they_can() -> None:
    problem = ask("virtual:270MiB,250MiB")
    ways = {way.kind: way for way in refused(problem).ways_out}
    assert list(ways)[:2] == ["context", "batch"]
    longest = find_plan(LAYERS, replace(problem, largest="context"))
    assert ways["context"].context_tokens == longest.workload.context_tokens
    assert longest.workload.new_tokens == LOAD.new_tokens
    assert (
        ways["batch"].batch == find_plan(LAYERS, replace(problem, largest="batch")).workload.batch
    )


@pytest.mark.parametrize("asked", [None, 4096])
def test_a_chunk_that_was_asked_for_may_be_smaller(asked: int | None) -> None:
    profile = tiny.made_up(WEIGHTS, tiny.Costs(cache=64, work=60_000))
    load = replace(LOAD, prompt_tokens=8000, batch=1, prefill_chunk_tokens=asked)
    problem = ask("virtual:600MiB", load)
    error = refused(problem, profile)
    way = next(way for way in error.ways_out if way.kind == "chunk")
    assert way.context_tokens == load.context_tokens
    assert way.prefill_chunk_tokens is not None
    assert way.options == ("--prefill-chunk", str(way.prefill_chunk_tokens))
    assert matches(way, find_plan(profile, follow(way, problem)))
    assert "chunk" not in kinds(
        refused(replace(problem, workload=replace(load, prompt_tokens=900_000)), profile)
    )


def smaller(workload: Workload) -> Profile:
    """The made-up model with fewer bits."""
    factor = {"none": 1.0, "int8": 0.5, "int4": 0.25}[workload.quantize]
    cache = 1024 if workload.cache == "int8" else 2048
    profile = tiny.made_up([int(size * factor) for size in WEIGHTS], tiny.Costs(cache=cache))
    return replace(profile, conditions=workload.conditions)


def test_a_cache_and_weights_of_fewer_bits() -> None:
    problem = ask("virtual:250MiB", replace(LOAD, batch=1))
    error = refused(problem, profile_for=smaller)
    assert [kind for kind in kinds(error) if kind.startswith("int")] == ["int8", "int4"]
    for way in error.ways_out:
        followed = follow(way, problem)
        assert matches(way, find_plan(smaller(followed.workload), followed)), way
    cached = refused(ask("virtual:490MiB"), profile_for=smaller)
    assert kinds(cached)[:3] == ["context", "batch", "cache"]


@pytest.mark.slow
def test_pages_need_less_memory_than_a_cache_that_each_step_copies() -> None:
    load = Workload(
        prompt_tokens=8000, new_tokens=100, batch=16, dtype="bfloat16", prefill_chunk_tokens=2048
    )
    model = models.build(tiny.CONFIGS["llama"], dtype=torch.bfloat16)

    def profile_for(load: Workload) -> Profile:
        return profile_module(model, load, None)

    paged = replace(load, cache="paged", pages_for_batch=True)
    (stage,) = find_plan(profile_for(paged), ask("virtual:4GiB", paged)).forecast.devices
    problem = ask(f"virtual:{round(1.05 * stage.reserved_bytes / MIB)}MiB", load)
    with pytest.raises(InfeasibleError):
        find_plan(profile_for(load), problem)
    way = next(SuggestionSearch(profile_for(load), problem, profile_for).run())
    assert (way.kind, way.options) == ("pages", ("--cache", "paged"))
    followed = follow(way, problem)
    assert matches(way, find_plan(profile_for(followed.workload), followed))
    assert followed.workload.pages == 16 * -(-8100 // 16)


def test_fewer_bits_and_fewer_tokens_where_neither_suffices() -> None:
    problem = ask("virtual:140MiB", replace(LOAD, prompt_tokens=30_000, batch=1))
    error = refused(problem, profile_for=smaller)
    (way,) = (way for way in error.ways_out if way.kind == "int4")
    assert "--quantize" in way.options
    assert "--context" in way.options
    followed = follow(way, problem)
    assert matches(way, find_plan(smaller(followed.workload), followed))


def test_what_outweighs_all_memory_is_never_traced() -> None:
    """A quarter of the weights fits these devices, half of them doesn't."""
    asked: set[str] = set()

    def traced(workload: Workload) -> Profile:
        asked.add(workload.quantize)
        return smaller(workload)

    budget_mib = sum(WEIGHTS) * 0.45 / MIB
    refused(ask(f"{budget_mib:.0f}MiB", replace(LOAD, batch=1)), profile_for=traced)
    assert "int4" in asked
    assert "int8" not in asked


def test_what_the_model_cant_do_is_no_way_out() -> None:
    def fail(workload: Workload) -> Profile:
        raise ModelError("it can't")

    error = refused(ask("virtual:250MiB"), profile_for=fail)
    assert not {"cache", "int8", "int4"} & {*kinds(error)}


def test_offload_tells_what_it_costs() -> None:
    problem = ask("RTX 3060")
    fleet = replace(problem.fleet.devices[0], budget_bytes=345 * MIB)
    load = replace(LOAD, prompt_tokens=700, batch=1)
    problem = replace(problem, fleet=Fleet(devices=(fleet,)), workload=load, gpus="345MiB")
    way = next(way for way in refused(problem).ways_out if way.kind == "offload")
    assert way.text.startswith("120.00 MiB of weights offloaded to CPU memory")
    assert "about 0.0052 s" in way.text
    asked = replace(problem, constraints=Constraints(offload=True))
    assert answer(LAYERS, asked).offloaded
    assert "offload" not in kinds(refused(replace(asked, fleet=Fleet.parse("virtual:60MiB"))))


def test_a_way_for_a_map_and_one_without() -> None:
    load = replace(LOAD, prompt_tokens=9000, new_tokens=100, batch=1)
    device_map = DeviceMap.of({"": 1, "block.0": 0})
    problem = ask("virtual:100MiB,390MiB,200MiB", load, device_map=device_map)
    error = refused(problem)
    assert kinds(error) == ["map"]
    (own,) = error.ways_out
    assert own.without == ("--device-map",)
    assert own.sentence.endswith("(without --device-map)")
    for way in error.ways_out:
        assert matches(way, answer(LAYERS, follow(way, problem)))


def test_a_map_where_nothing_fits_without_it_either() -> None:
    problem = ask("virtual:100MiB,150MiB", device_map=DeviceMap.of({"": 1, "block.0": 0}))
    error = refused(problem)
    assert error.ways_out
    for way in error.ways_out:
        assert "--device-map" in way.without
        assert matches(way, answer(LAYERS, follow(way, problem)))
