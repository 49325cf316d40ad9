"""A full-size GLM-4V tower encodes one picture with real numbers, on virtual GPUs that cut it.

    python benchmarks/vision_tower.py [--gpus virtual:2x6GiB] [--layers 63]

The tower of GLM-4V-9B (8.4 GiB in bfloat16, random weights) stands before one layer of its text
model with few words. It is planned, dispatched, and reads a prompt with one picture of 1120x1120;
peaks and seconds are held against the plan's forecast. The plan knows this machine's speeds, which
are measured before: a matrix product of the tower's shapes, and a copy.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from forecast_models import SIZES

import duoka
from duoka import models, virtual
from duoka.planner.placement import Placement
from duoka.planner.request import PlanProblem
from duoka.planner.solve import find_plan
from duoka.runtime.call.stepper import Stepper
from duoka.runtime.dispatch.dispatch import dispatch
from duoka.runtime.image_inputs import prompts_for
from duoka.tracing import TraceSpec, trace_workload

GIB = 2**30
WORKLOAD = duoka.Workload(
    prompt_tokens=1700,
    new_tokens=1,
    dtype="bfloat16",
    prefill_chunk_tokens=None,
    images=1,
    image_size=(1120, 1120),
)


def config(layers: int) -> dict[str, Any]:
    """The tower's published shapes, and a text model that is hardly there."""
    full = SIZES["glm-4v-9b"]
    small = {"num_layers": 1, "padded_vocab_size": 1024, "eos_token_id": 2, "pad_token_id": 0}
    tokens = {"boi_token_id": 1000, "eoi_token_id": 1001}
    vision = {**full["vision_config"], "num_hidden_layers": layers}
    return {**full, **small, **tokens, "vision_config": vision}


@contextmanager
def clocked(result: dict[str, float]) -> Iterator[None]:
    """Wall and processor seconds of what is done."""
    wall, processor = time.perf_counter(), time.process_time()
    yield
    result["wall"] = time.perf_counter() - wall
    result["processor"] = time.process_time() - processor


def operations_per_second() -> float:
    """What this machine reaches in a product of a block's shapes."""
    left, right = torch.randn(6401, 1792).bfloat16(), torch.randn(1792, 15360).bfloat16()
    left @ right
    spent: dict[str, float] = {}
    with clocked(spent):
        for _ in range(3):
            left @ right
    return 3 * 2 * 6401 * 1792 * 15360 / spent["wall"]


def bytes_per_second() -> float:
    """What this machine reads and writes in a copy."""
    source = torch.ones(2**28, dtype=torch.uint8)
    target = torch.empty_like(source)
    target.copy_(source)
    spent: dict[str, float] = {}
    with clocked(spent):
        for _ in range(5):
            target.copy_(source)
    return 5 * 2 * source.numel() / spent["wall"]


def plan_for(gpus: str, shapes: dict[str, Any]) -> duoka.Plan:
    """The plan for these GPUs, as fast as this machine."""
    speeds = {
        "flops_per_second": operations_per_second(),
        "memory_bytes_per_second": bytes_per_second(),
    }
    print(
        f"this machine: {speeds['flops_per_second'] / 1e9:.0f} Gflop/s in bfloat16, "
        f"{speeds['memory_bytes_per_second'] / 1e9:.1f} GB/s"
    )
    fleet = duoka.Fleet.parse(gpus)
    devices = tuple(replace(device, **speeds) for device in fleet.devices)
    spec = TraceSpec(fingerprint="glm-4v-tower", conditions=WORKLOAD.conditions)
    profile = trace_workload(models.build(shapes, dtype=torch.bfloat16), spec, [WORKLOAD])
    return find_plan(
        profile, PlanProblem(fleet=replace(fleet, devices=devices), workload=WORKLOAD, use_all=True)
    )


def run(plan: duoka.Plan, shapes: dict[str, Any]) -> None:
    """Encode the picture, and print what was forecast beside what was measured."""
    model = models.build(shapes, dtype=torch.bfloat16)
    prompts = prompts_for(model, WORKLOAD.conditions)
    budgets = [device.budget_bytes for device in plan.fleet.devices]
    spent: dict[str, float] = {}
    with virtual.gpus(budgets) as world, torch.inference_mode():
        dispatch(model, Placement(entries=plan.placement.entries), empty=True)
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
        stepper = Stepper.of(model, plan.workload, torch.device("vgpu:0"), prompts)
        with clocked(spent):
            stepper.run(plan.workload, decode_steps=0)
        for number, device in enumerate(plan.forecast.devices):
            allocated, reserved = (
                world.max_memory_allocated(number),
                world.max_memory_reserved(number),
            )
            print(
                f"{device.device}: weights {device.weight_bytes / GIB:.2f} GiB; allocated "
                f"{device.allocated_bytes / GIB:.3f} forecast, {allocated / GIB:.3f} measured "
                f"({device.allocated_bytes / allocated - 1:+.2%}); reserved "
                f"{device.reserved_bytes / GIB:.3f} forecast, {reserved / GIB:.3f} measured "
                f"({device.reserved_bytes / reserved - 1:+.2%})"
            )
    seconds = plan.forecast.seconds
    assert seconds is not None, "the speeds are known"
    process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    forecast = sum(device.allocated_bytes for device in plan.forecast.devices)
    print(
        f"seconds: {seconds.total_seconds:.0f} forecast, {spent['wall']:.0f} measured "
        f"({spent['processor']:.0f} of processors)\n"
        f"process: {process / GIB:.2f} GiB at most; the devices' forecasts add up to "
        f"{forecast / GIB:.2f} GiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", default="virtual:2x6GiB")
    parser.add_argument("--layers", type=int, default=63)
    options = parser.parse_args()
    shapes = config(options.layers)
    plan = plan_for(options.gpus, shapes)
    print(plan)
    run(plan, shapes)


if __name__ == "__main__":
    main()
