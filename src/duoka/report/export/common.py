"""Which GPUs a tool may see, and what they hold: what several tools are told alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from duoka.hardware.device import Device
from duoka.planner.plan import Plan

from .stages import Pipeline
from .text import refusal


def visible(tool: str, devices: Sequence[Device]) -> list[tuple[str, str]]:
    """Environment in which CUDA's first device is the first of these, and so on.

    A GPU that was detected is named by its UUID, which no renumbering changes; a declared one by
    its number (CUDA C++ Programming Guide, "CUDA Environment Variables").
    """
    if all(device.uuid for device in devices):
        return [("CUDA_VISIBLE_DEVICES", ",".join(device.uuid for device in devices))]
    numbers = [device.name.partition(":")[2] for device in devices]
    if not all(numbers):
        raise refusal(tool, f"{devices[0].name} has no number", "plan for GPUs")
    return [("CUDA_DEVICE_ORDER", "PCI_BUS_ID"), ("CUDA_VISIBLE_DEVICES", ",".join(numbers))]


def common_notes(plan: Plan, pipeline: Pipeline | None = None) -> Iterator[str]:
    """What is true of every tool but duoka."""
    if any(name.startswith("vgpu") for name in plan.devices):
        yield "NOTE: planned for virtual GPUs; their numbers are taken for those of CUDA's."
    elif not all(plan.fleet.device(name).uuid for name in plan.devices):
        yield (
            "NOTE: the GPUs were declared, not detected: their numbers are taken for those that "
            "nvidia-smi shows."
        )
    if pipeline is not None and pipeline.returning:
        names = ", ".join(pipeline.returning)
        yield (
            f"NOTE: {names} is tied and runs on {pipeline.stages[0].device.name} in the plan; this "
            f"tool keeps a copy of the weights on {pipeline.stages[-1].device.name} instead, which "
            "the plan doesn't count there."
        )


def total_bytes(device: Device) -> int:
    """What a GPU has in all, as far as that is known."""
    if device.memory_bytes is not None:
        return device.memory_bytes
    return device.budget_bytes + device.reserve_bytes
