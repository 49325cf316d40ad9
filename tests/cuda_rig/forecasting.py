"""Plans of models beside what PyTorch's allocator counts when their steps run on the rig."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from cuda_rig.values import values

from duoka import Fleet, Plan, Workload, models, virtual
from duoka.forecast.profile import Profile
from duoka.forecast.workload import Training
from duoka.hardware.gpu_generation import GpuGeneration
from duoka.planner.planner import solve
from duoka.planner.request import PlanProblem
from duoka.runtime.dispatch.dispatch import dispatch
from duoka.runtime.steps import Learner, Stepper
from duoka.tracing import TraceSpec, profile_training, trace


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, GPUs that are as large as their budgets, and a workload."""

    config: dict[str, Any] = field(repr=False)
    gpus: str
    batch: int = 1
    prompt: int
    new: int = 0
    chunk: int | None = None
    training: Training | None = None
    generation: GpuGeneration = field(default_factory=GpuGeneration)

    @property
    def workload(self) -> Workload:
        return Workload(
            gpu_generation=self.generation,
            batch=self.batch,
            prompt_tokens=self.prompt,
            new_tokens=self.new,
            dtype="bfloat16",
            prefill_chunk_tokens=self.chunk,
            training=self.training,
        )

    def build(self) -> Any:
        return models.build(self.config, dtype=torch.bfloat16)

    def profile(self) -> Profile:
        workload = self.workload
        spec = TraceSpec(fingerprint="rig", conditions=workload.conditions)
        if self.training is None:
            return trace(self.build(), spec)
        return virtual.apart(profile_training, self.build, spec, workload)[0]

    def plan(self, profile: Profile) -> Plan:
        fleet = Fleet.parse(self.gpus)
        return solve(profile, PlanProblem(fleet=fleet, workload=self.workload, use_all=True))


Peaks = list[tuple[int, int]]
"""Of each device: allocated and reserved bytes."""


def forecast(plan: Plan) -> Peaks:
    return [(told.allocated_bytes, told.reserved_bytes) for told in plan.forecast.devices]


def measured(plan: Plan, model: Any) -> Peaks:
    """What CUDA's allocator counts when the plan's steps run, as they are proved."""
    workload, first = plan.workload, torch.device(plan.placement.entries[0][1])
    if workload.training is None:
        with torch.no_grad():
            dispatch(model, plan.placement, empty=True)
            stepper = Stepper.of(model, workload, first)
            with values():
                stepper.run(workload, decode_steps=workload.new_tokens - 1)
    else:
        assert workload.training.schedule == "sequential", "stages differ in what is in flight"
        models.make_trainable(model, workload.training, torch.bfloat16)
        dispatch(model, plan.placement, empty=True)
        with values():  # this thread's: a backward pass reads none
            Learner(model, workload, first).run()
    return [
        (torch.cuda.max_memory_allocated(name), torch.cuda.max_memory_reserved(name))
        for name in plan.devices
    ]
