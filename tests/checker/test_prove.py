from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path

import families
import pytest
import rehearsing
import tiny
import torch
from tiers import only
from tiny import MIB
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

import duoka
from duoka import Device, Fleet, Placement, Plan, Workload, models, virtual
from duoka.base.progress import heard_by
from duoka.checker.prove import prove
from duoka.errors import PlacementError, ProofError
from duoka.forecast.workload import Training
from duoka.planner.limits import on_fleet
from duoka.planner.request import PlanProblem, PlanRequest
from duoka.planner.solve import find_plan
from duoka.runtime.call.stepper import Stepper
from duoka.tracing import TraceSpec
from duoka.tracing.trace_training import trace_training_workload

pytestmark = pytest.mark.usefixtures("single_sequences")

LOAD = Workload(
    batch=2, prompt_tokens=601, new_tokens=30, dtype="bfloat16", prefill_chunk_tokens=300
)


def build(name: str = "llama") -> PreTrainedModel:
    return models.build(tiny.CONFIGS[name], dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def plan() -> Plan:
    fleet = Fleet.parse("2x512MiB")
    problem = PlanProblem(fleet=fleet, workload=LOAD, use_all=True)
    return find_plan(tiny.regular("llama"), problem)


def placed(plan: Plan, **devices: str) -> Plan:
    """The plan with a finer placement: layer 1 falls into its parts."""
    layer = "model.layers.1"
    parts = ["input_layernorm", "self_attn", "post_attention_layernorm", "mlp"]
    entries: list[tuple[str, str]] = []
    for name, device in plan.placement.entries:
        if name == layer:
            entries += [(f"{layer}.{part}", devices.get(part, device)) for part in parts]
        else:
            entries.append((name, device))
    return replace(plan, placement=Placement(entries=tuple(entries), fingerprint=plan.fingerprint))


def test_a_good_plan_passes_and_is_measured(plan: Plan) -> None:
    measured = prove(plan, build())
    assert tuple(item.device for item in measured) == plan.devices
    assert set(plan.devices) == {"cuda:0", "cuda:1"}
    for item, forecast in zip(measured, plan.forecast.devices, strict=True):
        assert item.allocated_bytes == pytest.approx(forecast.allocated_bytes, rel=0.01)
        assert item.reserved_bytes == pytest.approx(forecast.reserved_bytes, rel=0.03)


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 4, 5, 6])
def test_the_proof_goes_to_the_end_of_the_context(
    plan: Plan, new_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = []
    real = Stepper.step

    def step(self: Stepper, query: int) -> None:
        real(self, query)
        ends.append(self.past)

    monkeypatch.setattr(Stepper, "step", step)
    prove(replace(plan, workload=replace(plan.workload, new_tokens=new_tokens)), build())
    # The last new token isn't fed back.
    assert ends[-1] == 601 + new_tokens - 1


@pytest.mark.parametrize("name", only(["mamba2"], ["tied", "window", "mamba2"]))
def test_plans_of_other_models_pass(name: str) -> None:
    problem = PlanProblem(fleet=Fleet.parse("2x512MiB"), workload=LOAD, use_all=True)
    plan = find_plan(tiny.profile_for(name, LOAD), problem)
    assert len(prove(plan, build(name))) == 2


def test_a_cut_residual_is_refused_with_file_and_line(plan: Plan) -> None:
    first = plan.placement.device_of("model.layers.1")
    other = next(name for name in plan.devices if name != first)
    with pytest.raises(ProofError) as caught:
        prove(placed(plan, mlp=other), build())
    message = str(caught.value)
    place = re.search(r"at (\S+):(\d+) \((.*?)\)", message)
    assert place is not None, message
    assert Path(place[1]) == Path(modeling_llama.__file__)
    line = Path(place[1]).read_text(encoding="utf-8").splitlines()[int(place[2]) - 1]
    assert "residual + hidden_states" in line
    assert place[3] in line
    assert "same device" in message
    # The devices are the plan's, not those of the proof.
    assert "cuda:0" in message
    assert "cuda:1" in message
    assert "vgpu" not in message
    assert caught.value.exit_code == 8


def test_messages_name_virtual_gpus_of_another_order(plan: Plan) -> None:
    devices = ("vgpu:1", "vgpu:0")
    index = dict(zip(plan.devices, devices, strict=True))
    renamed = replace(
        plan,
        fleet=Fleet(devices=tuple(Device(name=name, budget_bytes=512 * MIB) for name in devices)),
        placement=Placement(
            entries=tuple((name, index[device]) for name, device in plan.placement.entries),
            fingerprint=plan.fingerprint,
        ),
        forecast=replace(
            plan.forecast,
            devices=tuple(replace(d, device=index[d.device]) for d in plan.forecast.devices),
        ),
        binding_device=index[plan.binding_device],
    )
    first = renamed.placement.device_of("model.layers.1")
    other = "vgpu:0" if first == "vgpu:1" else "vgpu:1"
    with pytest.raises(ProofError) as caught:
        prove(placed(renamed, mlp=other), build())
    assert {"vgpu:0", "vgpu:1"} == set(re.findall(r"vgpu:\d", str(caught.value)))


def test_a_budget_that_is_too_small_is_refused(plan: Plan) -> None:
    for forecast in plan.forecast.devices:
        # Weights alone, and almost what is allocated at the peak.
        for tight in (forecast.weight_bytes - 1, forecast.allocated_bytes - 1):
            devices = tuple(
                replace(d, budget_bytes=tight) if d.name == forecast.device else d
                for d in plan.fleet.devices
            )
            smaller = replace(plan, fleet=replace(plan.fleet, devices=devices))
            with pytest.raises(ProofError, match=f"lacks memory.*{forecast.device} has a total"):
                prove(smaller, build())


def test_a_longer_workload_than_planned_is_refused(plan: Plan) -> None:
    needed = {d.device: d.allocated_bytes for d in plan.forecast.devices}
    devices = tuple(replace(d, budget_bytes=needed[d.name]) for d in plan.fleet.devices)
    load = replace(plan.workload, prompt_tokens=6000, prefill_chunk_tokens=None)
    with pytest.raises(ProofError, match="lacks memory"):
        prove(replace(plan, fleet=replace(plan.fleet, devices=devices), workload=load), build())


def test_an_incomplete_placement_is_refused(plan: Plan) -> None:
    entries = plan.placement.entries[1:]
    short = Placement(entries=entries, fingerprint=plan.fingerprint)
    with pytest.raises(PlacementError) as caught:
        prove(replace(plan, placement=short), build())
    assert caught.value.missing


def test_the_allocator_is_that_of_this_process(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    said: list[str] = []
    with heard_by(said.append):
        measured = prove(plan, build())
    assert said == ["expandable_segments is True here, unlike in the plan: its forecast differs"]
    assert "expandable" not in str(plan)
    generation = plan.fleet.gpu_generation
    workload = replace(plan.workload, gpu_generation=generation)
    again = find_plan(
        tiny.regular("llama"), PlanProblem(fleet=plan.fleet, workload=workload, use_all=True)
    )
    assert "expandable segments (PYTORCH_ALLOC_CONF)" in str(again)
    for stage, peak in zip(again.forecast.devices, measured, strict=True):
        assert stage.reserved_bytes == peak.reserved_bytes
        assert stage.allocated_bytes == stage.requested_bytes == peak.allocated_bytes
    moved = again.move_to({device.name: device for device in plan.fleet.devices})
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    assert moved.workload.gpu_generation.expandable_segments
    prove(moved, build())


def test_the_proof_leaves_no_virtual_gpus_behind(plan: Plan) -> None:
    virtual.set_gpus([123 * MIB])
    prove(plan, build())
    assert [gpu.allocator.capacity_bytes for gpu in virtual.active_world().gpus] == [123 * MIB]


def test_a_plan_for_training_is_proved_by_training() -> None:
    workload = rehearsing.load(64, method="full", micro_batches=3, schedule="1f1b")
    model = models.build(tiny.CONFIGS["glm"], dtype=torch.bfloat16)
    spec = TraceSpec(fingerprint="glm", conditions=workload.conditions)
    profile = trace_training_workload(copy.deepcopy(model), spec, workload)
    fleet = Fleet.parse("virtual:3x48MiB")
    plan = find_plan(profile, PlanProblem(fleet=fleet, workload=workload, use_all=True))
    measured = prove(plan, model)
    for told, found in zip(plan.forecast.devices, measured, strict=True):
        assert told.device == found.device
        assert told.allocated_bytes == pytest.approx(found.allocated_bytes, rel=2e-3)
        assert told.reserved_bytes == found.reserved_bytes

    small = tuple(replace(each, budget_bytes=each.budget_bytes // 4) for each in fleet.devices)
    with pytest.raises(ProofError, match="lacks memory"):
        prove(replace(plan, fleet=Fleet(devices=small)), model)


@pytest.mark.slow
def test_training_where_code_reads_how_many_tokens_experts_got() -> None:
    model = families.build("jetmoe")
    workload = Workload(
        prompt_tokens=64, new_tokens=0, prefill_chunk_tokens=None, training=Training(method="lora")
    )
    plan = duoka.plan(model, "virtual:2x64MiB", workload, use_all=True)
    names = [name for name, _ in model.named_parameters()]
    measured = prove(plan, model)
    for told, found in zip(plan.forecast.devices, measured, strict=True):
        assert told.allocated_bytes == pytest.approx(found.allocated_bytes, rel=0.01)
    assert [name for name, _ in model.named_parameters()] == names


@pytest.mark.parametrize("trains", [False, True])
def test_workspaces_are_forecast_as_they_are_taken(
    monkeypatch: pytest.MonkeyPatch, trains: bool
) -> None:
    """Whatever else differs by a little, they don't add to it."""
    workload, profile = LOAD, tiny.regular("llama")
    if trains:
        workload = rehearsing.load(64, method="full", gradient_checkpointing=True, micro_batches=3)
        spec = TraceSpec(fingerprint="llama", conditions=workload.conditions)
        profile = trace_training_workload(build(), spec, workload)
    found = []
    for config, size in ((":0:0", 0), (":4096:2:16:8", 8_519_680), (":4096:8", 32 * MIB)):
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
        problem = on_fleet(PlanRequest(workload=workload, use_all=True), "2x512MiB")
        plan = find_plan(profile, problem)
        peaks = [peak.allocated_bytes for peak in prove(plan, build())]
        forecast = [told.allocated_bytes for told in plan.forecast.devices]
        taken = size * (2 if trains else 1)
        found.append(([told - taken for told in forecast], [peak - taken for peak in peaks]))
        for told, peak in zip(forecast, peaks, strict=True):
            assert told - peak == pytest.approx(0, abs=told * 0.005)
    assert found[0] == found[1] == found[2]
