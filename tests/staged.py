"""Plans in stages of whole layers, made by hand: no profile, no search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from duoka.forecast.forecast import Forecast
from duoka.forecast.stage_bytes import StageBytes
from duoka.forecast.workload import Workload
from duoka.hardware.fleet import Fleet
from duoka.planner.placement import Placement
from duoka.planner.plan import Plan
from duoka.planner.reasons import Reason
from duoka.planner.request import PlanRequest

GIB = 2**30
LAYER_BYTES = GIB // 4
WORKLOAD = Workload(prompt_tokens=7936, new_tokens=256, dtype="bfloat16", prefill_chunk_tokens=None)


def entries(counts: Sequence[int], devices: Sequence[str]) -> list[tuple[str, str]]:
    """An embedding, so many layers on each device, a norm and a head."""
    at = [name for name, count in zip(devices, counts, strict=True) for _ in range(count)]
    layers = [(f"model.layers.{number}", name) for number, name in enumerate(at)]
    head = [("model.norm", devices[-1]), ("lm_head", devices[-1])]
    return [("model.embed_tokens", devices[0]), ("model.rotary_emb", devices[0]), *layers, *head]


def forecast(device: str, layers: int, budget_bytes: int) -> StageBytes:
    weights, activations = layers * LAYER_BYTES, GIB // 2
    return StageBytes(
        device=device,
        weight_bytes=weights,
        kv_cache_bytes=0,
        activation_bytes=activations,
        allocated_bytes=weights + activations,
        requested_bytes=weights + activations,
        reserved_bytes=weights + activations,
        budget_bytes=budget_bytes,
    )


def staged(counts: Sequence[int], gpus: str = "24GiB,12GiB,8GiB,8GiB", **changes: Any) -> Plan:
    """A plan with so many layers on each of the first GPUs."""
    fleet = Fleet.parse(gpus)
    devices = fleet.names[: len(counts)]
    forecasts = tuple(
        forecast(name, count, fleet.device(name).budget_bytes)
        for name, count in zip(devices, counts, strict=True)
    )
    plan = Plan(
        source="my model",
        model="LlamaForCausalLM",
        fingerprint="f",
        fleet=fleet,
        workload=WORKLOAD,
        placement=Placement(entries=tuple(entries(counts, devices)), fingerprint="f"),
        forecast=Forecast(devices=forecasts),
        objective="headroom",
        value=1.0,
        bound=1.0,
        binding_device=devices[0],
        request=PlanRequest(workload=WORKLOAD, gpus=gpus),
        why=(Reason("note", {"text": "Because."}),),
    )
    return replace(plan, **changes)


def placed(plan: Plan, **moves: str) -> Plan:
    """The same plan with some modules elsewhere; dots in names are written as "__"."""
    moved = {name.replace("__", "."): device for name, device in moves.items()}
    changed = tuple((name, moved.pop(name, at)) for name, at in plan.placement.entries)
    assert not moved
    return rearranged(plan, changed)


def renamed(plan: Plan, names: Mapping[str, str]) -> Plan:
    """The same plan on GPUs of other names."""
    devices = [replace(each, name=names.get(each.name, each.name)) for each in plan.fleet.devices]
    stages = [replace(each, device=names[each.device]) for each in plan.forecast.devices]
    entries = tuple((name, names[at]) for name, at in plan.placement.entries)
    return replace(
        plan,
        fleet=Fleet(devices=tuple(devices)),
        placement=replace(plan.placement, entries=entries),
        forecast=replace(plan.forecast, devices=tuple(stages)),
        binding_device=names[plan.binding_device],
    )


def rearranged(plan: Plan, changed: Sequence[tuple[str, str]]) -> Plan:
    """The same plan with these entries; forecasts stay as they are, device by device."""
    placement = replace(plan.placement, entries=tuple(changed))
    known = {each.device: each for each in plan.forecast.devices}
    devices = tuple(known[name] for name in placement.devices)
    return replace(plan, placement=placement, forecast=replace(plan.forecast, devices=devices))
