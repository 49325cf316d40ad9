"""Weights in the host's memory: the fewest bytes that will do, and a forecast that is measured."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from closeness import HALF_TOLERANCE, close
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import only
from tiny import MIB
from transformers import AutoModelForCausalLM, LlamaConfig

from duoka import Device, Fleet, Plan, Workload, check, load, models
from duoka import plan as plan_model
from duoka.checker.prove import prove
from duoka.errors import FleetError, InfeasibleError, UsageError
from duoka.forecast.profile import Profile
from duoka.planner.constraints import Constraints
from duoka.planner.limits import on_fleet
from duoka.planner.offload import candidates, offloadable, weight_bytes
from duoka.planner.request import PlanProblem, PlanRequest
from duoka.planner.solve import find_plan
from duoka.planner.suggestions import SuggestionSearch
from duoka.tracing import TraceSpec, trace

LOAD = Workload(prompt_tokens=700, new_tokens=40, dtype="bfloat16", prefill_chunk_tokens=None)
LAYERS = tiny.made_up([60 * MIB, *[40 * MIB] * 6, 60 * MIB], tiny.Costs(cache=2048))
OFFLOAD = Constraints(offload=True)
DEEP: dict[str, Any] = {**tiny.CONFIGS["llama"], "hidden_size": 512, "num_hidden_layers": 10}


def ask(*budgets_mib: float, **more: Any) -> PlanProblem:
    return PlanProblem(
        fleet=tiny.fleet(*budgets_mib), workload=LOAD, **{"constraints": OFFLOAD, **more}
    )


def names(*blocks: int) -> tuple[str, ...]:
    return tuple(f"block.{block}" for block in blocks)


def fits(profile: Profile, problem: PlanProblem) -> bool:
    try:
        find_plan(profile, replace(problem, constraints=Constraints()))
    except InfeasibleError:
        return False
    return True


def all_that_fit(profile: Profile, *budgets: float) -> list[int]:
    """The bytes on the host of all that may lie there and make the rest fit."""
    return [
        size
        for size, blocks in [(0, ()), *candidates(profile)]
        if fits(profile.offloading(blocks), ask(*budgets))
    ]


def test_nothing_is_offloaded_unless_asked() -> None:
    with pytest.raises(InfeasibleError):
        find_plan(LAYERS, ask(300, constraints=Constraints()))


def test_layers_are_offloaded_rather_than_a_large_head() -> None:
    plan = find_plan(LAYERS, ask(345))
    # 60 + 60 + 40 * 6 = 360 MiB; of what is offloaded two layers' worth is taken for buffers
    assert plan.offloaded == names(4, 5, 6)
    assert plan.forecast.host_bytes == 120 * MIB
    assert plan.forecast.devices[0].weight_bytes == 320 * MIB
    assert any("120.00 MiB of weights" in reason.text for reason in plan.why)
    assert any("CPU memory is not checked" in reason.text for reason in plan.why)
    assert Plan.from_json(plan.to_json()) == plan


def test_the_buffers_are_for_what_is_on_the_same_gpu() -> None:
    plan = find_plan(LAYERS, ask(200, 150))
    placed = dict(plan.placement.entries)
    assert plan.offloaded
    for device in plan.forecast.devices:
        here = [n for n in plan.offloaded if placed[n] == device.device]
        resident = [n for n, at in placed.items() if at == device.device and n not in here]
        sizes = {n: weight_bytes(LAYERS, int(n.removeprefix("block."))) for n in placed}
        buffers = [max(sizes[n] for n in here[k::2]) for k in range(min(2, len(here)))]
        assert device.weight_bytes == sum(sizes[n] for n in resident) + sum(buffers)


@settings(max_examples=examples(12))
@given(
    budgets=st.lists(st.integers(40, 200), min_size=1, max_size=2),
    weights=st.lists(st.integers(1, 60), min_size=3, max_size=7),
    cache=st.sampled_from([0, 2048]),
)
def test_nothing_less_would_do(budgets: list[int], weights: list[int], cache: int) -> None:
    profile = tiny.made_up([weight * MIB for weight in weights], tiny.Costs(cache=cache))
    sizes = all_that_fit(profile, *budgets)
    try:
        plan = find_plan(profile, ask(*budgets))
    except InfeasibleError:
        assert not sizes
        return
    assert plan.forecast.host_bytes == min(sizes)


def test_small_tensors_free_more_than_their_bytes() -> None:
    """An allocator makes 512 bytes of each 100: what is taken away counts as that, too."""
    sizes = [3 * MIB, *[2 * MIB] * 8, 3 * MIB]
    profile = tiny.made_up(sizes)
    kinds = [(100,) * (sum(kind.weight_bytes) // 512) for kind in profile.kinds]
    profile = replace(
        profile,
        kinds=tuple(
            replace(kind, weight_bytes=pieces)
            for kind, pieces in zip(profile.kinds, kinds, strict=True)
        ),
    )
    budget = next(each for each in range(40, 8, -1) if not fits(profile, ask(each)))
    plan = find_plan(profile, ask(budget))
    assert plan.forecast.host_bytes == min(all_that_fit(profile, budget)) > 0


def test_candidates_are_runs_that_end_with_the_layers_or_the_model() -> None:
    tied = tiny.made_up([60, *[40] * 3, 50, 60, 0], tied_to={6: 0})
    assert offloadable(tied) == [1, 2, 3, 4, 5]
    runs = [blocks for _, blocks in candidates(tied)]
    assert sorted({blocks[-1] for blocks in runs}) == [3, 4, 5]
    assert [size for size, _ in candidates(tied)] == sorted(size for size, _ in candidates(tied))
    assert all(list(blocks) == list(range(blocks[0], blocks[-1] + 1)) for blocks in runs)


def test_the_host_has_its_limit_too() -> None:
    gpu, host = Device(name="vgpu:0", budget_bytes=345 * MIB), Device(name="cpu", budget_bytes=1)
    fleet = Fleet(devices=(gpu, host))
    with pytest.raises(InfeasibleError):
        find_plan(LAYERS, replace(ask(1), fleet=fleet))
    fleet = replace(fleet, devices=(gpu, replace(host, budget_bytes=200 * MIB)))
    plan = find_plan(LAYERS, replace(ask(1), fleet=fleet))
    assert plan.offloaded
    assert "host-unknown" not in [reason.kind for reason in plan.why]


def test_a_declared_host_is_one_with_a_limit() -> None:
    request = PlanRequest(workload=LOAD, constraints=OFFLOAD)
    fleet = tiny.fleet(345)
    with pytest.raises(InfeasibleError):
        find_plan(LAYERS, on_fleet(request, fleet.with_host("110MiB")))
    plan = find_plan(LAYERS, on_fleet(request, fleet.with_host("120MiB,50GB/s")))
    assert plan.offloaded == find_plan(LAYERS, ask(345)).offloaded
    assert "host-unknown" not in [reason.kind for reason in plan.why]
    assert plan.fleet == fleet
    assert plan.request.host == fleet.with_host("120MiB,50GB/s").host
    assert Plan.from_json(plan.to_json()) == plan
    # Suggestions keep to it as well.
    plain = on_fleet(replace(request, constraints=Constraints()), fleet.with_host("110MiB"))
    assert "offload" not in [way.kind for way in SuggestionSearch(LAYERS, plain).run()]
    plain = on_fleet(plain.request, fleet.with_host("120MiB"))
    assert "offload" in [way.kind for way in SuggestionSearch(LAYERS, plain).run()]


def test_seconds_are_those_of_the_link() -> None:
    fleet = Fleet.parse("RTX 3060")
    (card,) = fleet.devices
    fleet = replace(fleet, devices=(replace(card, budget_bytes=345 * MIB),))
    plan = find_plan(LAYERS, replace(ask(1), fleet=fleet))
    rate = card.host_bytes_per_second
    assert rate is not None
    assert 10e9 < rate < 25e9  # PCIe 4.0, 16 lanes, and what a copy gets of it
    assert plan.forecast.copy_seconds == pytest.approx(120 * MIB / rate)
    assert plan.forecast.seconds is not None
    assert plan.forecast.seconds.token_seconds is not None
    assert plan.forecast.seconds.token_seconds == pytest.approx(120 * MIB / rate, rel=1e-3)


def test_gpus_that_differ_in_their_link_to_the_host_are_not_exchanged() -> None:
    cards = [
        Device(
            name=f"vgpu:{number}",
            budget_bytes=185 * MIB,
            memory_bytes_per_second=1e12,
            flops_per_second=1e14,
            host_bytes_per_second=rate,
        )
        for number, rate in enumerate((1e9, 1e11))
    ]
    for devices in (cards, cards[::-1]):
        plan = find_plan(
            LAYERS, replace(ask(1), fleet=Fleet(devices=tuple(devices)), objective="latency")
        )
        assert plan.offloaded
        assert plan.forecast.seconds is not None
        assert plan.value == pytest.approx(plan.forecast.seconds.total_seconds)


@functools.cache
def deep() -> Profile:
    model = models.build(DEEP, dtype=torch.bfloat16)
    return trace(model, TraceSpec(fingerprint="deep", max_context_tokens=8192))


@pytest.mark.parametrize(
    "case",
    only([(300, 20, (24, 26))], [(300, 20, (44,)), (300, 20, (24, 26)), (1500, 5, (62,))]),
    ids=str,
)
def test_the_forecast_is_what_is_measured(case: tuple[int, int, tuple[int, ...]]) -> None:
    prompt, new, budgets = case
    work = replace(LOAD, prompt_tokens=prompt, new_tokens=new)
    plan = find_plan(deep(), replace(ask(*budgets), workload=work))
    assert len(plan.offloaded) > 2
    measured = prove(plan, models.build(DEEP, dtype=torch.bfloat16))
    for device, found in zip(plan.forecast.devices, measured, strict=True):
        assert found.allocated_bytes == device.allocated_bytes
        assert found.reserved_bytes <= device.budget_bytes
    report = check(models.build(DEEP, dtype=torch.bfloat16), plan)
    assert report.ok
    for device, peak in zip(plan.forecast.devices, report.memory, strict=True):
        assert peak.allocated_bytes == device.allocated_bytes
    with pytest.raises(UsageError, match="can't be trained"):
        check(models.build(DEEP, dtype=torch.bfloat16), plan, train=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    fields = {name: DEEP[name] for name in DEEP.keys() - {"model_type"}}
    model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**fields), dtype=torch.bfloat16)
    path = tmp_path_factory.mktemp("deep")
    model.save_pretrained(path)
    return path


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(torch.arange(40, device=model.device)[None]).logits
    return found.cpu()


def test_what_is_loaded_computes_the_same(checkpoint: Path) -> None:
    work = Workload(prompt_tokens=300, new_tokens=20)
    expected = logits(load(plan_model(checkpoint, "virtual:1GiB", work)))
    plan = plan_model(checkpoint, "virtual:44MiB", work, constraints=OFFLOAD)
    assert len(plan.offloaded) > 2
    model = load(plan)
    assert close(logits(model), expected, HALF_TOLERANCE)
    on_host = {name for name, tensor in model.named_parameters() if tensor.device.type == "cpu"}
    assert {".".join(name.split(".")[:3]) for name in on_host} == set(plan.offloaded)


def test_more_than_the_host_has_is_refused_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path
) -> None:
    work = Workload(prompt_tokens=300, new_tokens=20)
    plan = plan_model(checkpoint, "virtual:44MiB", work, constraints=OFFLOAD)
    monkeypatch.setattr("duoka.hardware.host.available_bytes", lambda: 1000)
    with pytest.raises(FleetError, match="of weights in host memory, and only 1000 B"):
        load(plan)
