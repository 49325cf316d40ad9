"""Out of memory: suggestions if a device has less memory at run time than planned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from duoka.base.units import format_bytes
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import InfeasibleError, MachineError, WayOut
from duoka.hardware.fleet import Fleet
from duoka.hardware.parse import devices_in

from .from_device_map import OBJECTIVE as GIVEN
from .limits import given_back
from .plan import Plan
from .request import PlanRequest

_MOST_WAYS = 3
PlanAgain = Callable[[Checkpoint, PlanRequest, Fleet], Plan]
"""A function that plans a checkpoint for a request on a fleet."""


class OutOfMemory(MachineError):
    """A device ran out of memory while a model ran.

    Parameters
    ----------
    message : str
    plan : Plan
        The plan that the model was loaded with.
    available_bytes : mapping of str to int
        The bytes that the process could use on each device when the error occurred.
    """

    def __init__(self, message: str, plan: Plan, available_bytes: Mapping[str, int]) -> None:
        super().__init__(message, hint="free the memory that other programs use")
        self.plan = plan
        self.available_bytes = dict(available_bytes)
        self.ways_out: tuple[WayOut, ...] = ()


def look_for_ways(error: OutOfMemory, plan_again: PlanAgain) -> None:
    """Plan again with the available memory; set the error's hint and suggestions by the result."""
    plan, available = error.plan, error.available_bytes
    if plan.objective == GIVEN:
        return  # the user fixed the placement by a device map
    fleet = given_back(plan)
    shrunk = [
        replace(device, budget_bytes=min(device.budget_bytes, available[device.name]))
        if device.name in available
        else device
        for device in fleet.devices
    ]
    trusts = plan.request.trust_remote_code
    try:
        checkpoint = Checkpoint.open(plan.source, trust_remote_code=trusts)
        plan_again(checkpoint, plan.request, replace(fleet, devices=tuple(shrunk)))
    except InfeasibleError as wrong:
        error.ways_out, error.hint = wrong.ways_out[:_MOST_WAYS], wrong.hint
    else:
        if devices_in(plan.request.gpus) is None:
            error.hint = (
                "run the same command again: it plans with the memory that is free now, "
                "which is enough"
            )
        else:
            sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in available.items())
            error.hint = f"plan with the memory that is free now: --gpus {sizes}"
        error.hint += "; repeat a saved plan with --replan"
