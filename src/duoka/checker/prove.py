"""Proof of a plan: run it with its workload on virtual GPUs without data."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from transformers import PreTrainedModel

from duoka import virtual
from duoka.base.model_code import where_raised
from duoka.base.progress import say
from duoka.base.units import format_count
from duoka.errors import ProofError
from duoka.forecast.replay_training import in_flight
from duoka.forecast.serving import Capacity
from duoka.forecast.workload import Workload
from duoka.planner.placement import Placement
from duoka.planner.plan import Plan
from duoka.report.measured import PeakBytes
from duoka.runtime.call.learner import Learner
from duoka.runtime.call.paged_model import PagedModel
from duoka.runtime.call.stepper import Stepper
from duoka.runtime.dispatch.dispatch import dispatch
from duoka.runtime.dispatch.place_tensors import invent_values, parameter_bytes
from duoka.runtime.image_inputs import ImagePrompts, prompts_for
from duoka.runtime.prepare_training import prepare_for_training

from .execute import BETWEEN, decode_phases


def prove(plan: Plan, model: PreTrainedModel) -> tuple[PeakBytes, ...]:
    """Run a copy of a model as planned, on virtual GPUs with the plan's budgets; return peaks.

    The allocator has the segments that this process asks for, be the forecast for others. Raises
    ProofError if the run fails, or exceeds a budget.
    """
    expandable = plan.fleet.gpu_generation.expandable_segments
    generation = replace(plan.workload.gpu_generation, expandable_segments=expandable)
    if generation != plan.workload.gpu_generation:
        say(f"expandable_segments is {expandable} here, unlike in the plan: its forecast differs")
        plan = replace(plan, workload=replace(plan.workload, gpu_generation=generation))
    if plan.workload.training is not None:
        return virtual.with_values(
            lambda data: virtual.apart(_prove_training, plan, model, data),
            partial(parameter_bytes, model),
        )
    prompts = prompts_for(model, plan.workload.conditions)

    def measured(data: str) -> tuple[PeakBytes, ...]:
        copied = copy.deepcopy(model)
        run = partial(_run, copied, plan.workload, prompts)
        return _measure(plan, copied, run, plan.devices, data=data)

    with torch.no_grad():
        return virtual.with_values(measured, partial(parameter_bytes, model))


def _prove_training(plan: Plan, model: PreTrainedModel, data: str) -> tuple[PeakBytes, ...]:
    """Run training steps, once for each number of micro-batches that a stage holds in flight."""
    workload, names = plan.workload, plan.devices
    assert workload.training is not None, "the plan is for training"
    model = copy.deepcopy(model)
    prompts = prepare_for_training(model, workload)
    flying = [in_flight(workload.training, len(names) - stage) for stage in range(len(names))]
    by_device: dict[str, PeakBytes] = {}
    for limit in sorted(set(flying)):
        copied = copy.deepcopy(model)
        stages = [name for name, number in zip(names, flying, strict=True) if number == limit]
        learner = Learner(copied, workload, virtual.virtual_device(0), prompts)
        run = partial(learner.run, in_flight=limit)
        measured = _measure(plan, copied, run, stages, data=data)
        by_device |= {peak.device: peak for peak in measured}
    return tuple(by_device[name] for name in names)


def _measure(
    plan: Plan,
    model: PreTrainedModel,
    run: Callable[[], None],
    limited: Sequence[str],
    *,
    data: str = "meta",
) -> tuple[PeakBytes, ...]:
    """Run a model on its placement; return the peaks of the `limited` devices, with budgets."""
    names = plan.devices
    virtual_name = {name: str(virtual.virtual_device(index)) for index, name in enumerate(names)}
    budgets = {name: plan.fleet.device(name).budget_bytes for name in limited}
    entries = tuple((module, virtual_name[name]) for module, name in plan.placement.entries)
    capacities = [budgets.get(name) for name in names]
    with virtual.unnamed_gpus(
        capacities, data=data, generation=plan.workload.gpu_generation
    ) as world:
        try:
            dispatch(
                model,
                Placement(entries=entries),
                empty=True,
                offloaded=plan.offloaded,
                has_movers=plan.needs_movers,
                outputs_stay=plan.workload.is_paged,
            )
            if data == "cpu":
                invent_values(model)
            run()
        except torch.OutOfMemoryError as error:
            raise ProofError(
                f"the plan lacks memory{where_raised(error)}: {_rename_devices(str(error), names)}",
                hint="make the plan again; if that fails in the same way, report a defect of duoka",
            ) from error
        except RuntimeError as error:
            raise ProofError(
                f"the model fails on {format_count(len(names), 'device')}{where_raised(error)}: "
                f"{_rename_devices(str(error), names)}",
                hint="this model can't be split there; use one GPU (--gpus)",
            ) from error
        return tuple(
            PeakBytes(
                device=name,
                allocated_bytes=world.max_memory_allocated(index),
                reserved_bytes=world.max_memory_reserved(index),
            )
            for index, name in enumerate(names)
            if name in budgets
        )


def _run(model: PreTrainedModel, workload: Workload, prompts: ImagePrompts | None) -> None:
    """Run prefill and decode steps; with a paged cache the largest steps of the engine."""
    device = virtual.virtual_device(0)
    if workload.is_paged:
        PagedModel(model, Capacity.of(workload), device).warm_up("largest")
        return
    stepper = Stepper.of(model, workload, device, prompts)
    stepper.run(workload, decode_steps=0)
    for phase, tokens in decode_phases(workload.new_tokens - 1):
        advance = stepper.lengthen if phase == BETWEEN else stepper.step
        advance(tokens)


def _rename_devices(message: str, names: tuple[str, ...]) -> str:
    """Return a message with the plan's devices instead of the virtual ones."""
    # In one pass: the plan's own devices may be virtual GPUs with other numbers.
    message = virtual.spoken(message)
    return re.sub(r"(vgpu:|\bGPU )(\d+)", lambda match: names[int(match[2])], message)
