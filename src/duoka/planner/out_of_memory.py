"""Memory that a plan counted on and that isn't there: what would fit in what there is now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import DuokaError, InfeasibleError, MachineError, WayOut
from duoka.forecast.profile import Profile
from duoka.forecast.workload import Workload

from .limits import on_fleet
from .plan import Plan
from .resolve import answer_checkpoint

_MOST_WAYS = 3
ProfileOf = Callable[[Checkpoint, Workload], Profile]
"""The profile of a checkpoint for a workload."""


class OutOfMemory(MachineError):
    """A device had no room for what a model needed while it ran.

    Parameters
    ----------
    message : str
    plan : Plan
        Which the model was loaded for.
    available_bytes : mapping of str to int
        What the process could have on its devices in all, when that was.
    """

    def __init__(self, message: str, plan: Plan, available_bytes: Mapping[str, int]) -> None:
        super().__init__(message, hint="something else uses the memory that the plan counted on")
        self.plan = plan
        self.available_bytes = dict(available_bytes)
        self.ways_out: tuple[WayOut, ...] = ()


def look_for_ways(error: OutOfMemory, profile_of: ProfileOf) -> None:
    """Give an error what would fit in the memory that there is now, cheapest for quality first."""
    plan, available = error.plan, error.available_bytes
    shrunk = [
        replace(device, budget_bytes=min(device.budget_bytes, available[device.name]))
        if device.name in available
        else device
        for device in plan.fleet.devices
    ]
    trusts = plan.request.trust_remote_code
    try:
        checkpoint = Checkpoint.open(plan.source, trust_remote_code=trusts)
        problem = on_fleet(plan.request, replace(plan.fleet, devices=tuple(shrunk)))
        answer_checkpoint(checkpoint, problem, partial(profile_of, checkpoint))
    except InfeasibleError as wrong:
        error.ways_out, error.hint = wrong.ways_out[:_MOST_WAYS], wrong.hint
    except DuokaError:  # a map for the GPUs as they were, say: there is nothing to suggest
        pass
    else:
        error.hint = "start again: in the memory that there is now, the same command finds a plan"
