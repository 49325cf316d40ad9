"""Plans of models beside what PyTorch's allocator counts when their steps run on the rig."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from cuda_rig.values import values

from duoka import Fleet, Plan, Workload, models, virtual
from duoka.forecast.profile import Profile
from duoka.forecast.serving import Capacity
from duoka.models.quantization import keep_on_host, quantize_model
from duoka.planner.constraints import Constraints
from duoka.planner.planner import with_chunks
from duoka.planner.request import PlanProblem
from duoka.planner.solve import find_plan
from duoka.runtime.call.learner import Learner
from duoka.runtime.call.paged_model import PagedModel
from duoka.runtime.call.stepper import Stepper
from duoka.runtime.dispatch.dispatch import dispatch
from duoka.runtime.image_inputs import prompts_for
from duoka.tracing import Irregular, TraceSpec, profile_training, trace, trace_workload
from duoka.tracing.trace_serving import trace_serving


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, GPUs that are as large as their budgets, and a workload."""

    config: dict[str, Any] = field(repr=False)
    gpus: str
    workload: Workload
    offload: bool = False

    def build(self) -> Any:
        model = models.build(self.config, dtype=getattr(torch, self.workload.dtype))
        if self.workload.quantize != "none":
            trains = self.workload.training is not None
            quantize_model(model, self.workload.quantize, trains=trains)
        if self.workload.host_experts:
            size = self.workload.expert_cache_bytes
            keep_on_host(model, self.workload.host_experts, size)
        return model

    def profile(self) -> Profile:
        spec = TraceSpec(fingerprint="rig", conditions=self.workload.conditions)
        if self.workload.training is not None:
            return virtual.apart(profile_training, self.build, spec, self.workload)[0]
        if self.workload.is_paged:
            return trace_serving(self.build(), spec)
        with suppress(Irregular):
            return trace(self.build(), spec)
        return trace_workload(self.build(), spec, list(with_chunks(self.workload)))

    def plan(self, profile: Profile) -> Plan:
        problem = PlanProblem(
            fleet=Fleet.parse(self.gpus),
            workload=replace(self.workload, host_experts=profile.host_experts),
            use_all=not self.offload,
            constraints=Constraints(offload=self.offload),
        )
        return find_plan(profile, problem)


Peaks = list[tuple[int, int]]
"""Of each device: allocated and reserved bytes."""


def forecast(plan: Plan) -> Peaks:
    return [(told.allocated_bytes, told.reserved_bytes) for told in plan.forecast.devices]


def run(plan: Plan, model: Any) -> None:
    """Run a plan's steps where it says, as they are proved; weights are empty."""
    workload, first = plan.workload, torch.device(plan.placement.entries[0][1])
    prompts = prompts_for(model, workload.conditions)  # of a model that isn't spread yet
    if workload.training is not None:
        assert workload.training.schedule == "sequential", "stages differ in what is in flight"
        models.make_trainable(model, workload.training, getattr(torch, workload.dtype))
    stay = workload.is_paged
    dispatch(model, plan.placement, empty=True, offloaded=plan.offloaded, outputs_stay=stay)
    if workload.is_paged:
        PagedModel(model, Capacity.of(workload), first).warm_up("every")
        return
    with values():  # masks and positions are looked at; in this thread, a backward pass reads none
        if workload.training is not None:
            Learner(model, workload, first).run()
            return
        with torch.no_grad():
            stepper = Stepper.of(model, workload, first, prompts)
            stepper.run(workload, decode_steps=workload.new_tokens - 1)


def counted(plan: Plan) -> Peaks:
    """What CUDA's allocator counted."""
    return [
        (torch.cuda.max_memory_allocated(name), torch.cuda.max_memory_reserved(name))
        for name in plan.devices
    ]
