"""Request: what a person asks of the planner, and that on GPUs that are there.

The command line, Python, plan files and the command to paste all say a request; none of it is
resolved. What the names in it mean for one model and one fleet is found out where it is solved.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

from duoka.forecast.costs import ReplayCache
from duoka.forecast.workload import Workload
from duoka.hardware.fleet import Fleet

from .constraints import Constraints
from .device_map import DeviceMap
from .search import Limits, Objective

Largest = Literal["context", "batch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What was asked for, but for the model: enough to ask again.

    Parameters
    ----------
    workload : Workload
        With "auto" where it was said.
    objective : {"auto", "headroom", "latency", "throughput"}
    use_all : bool
        Whether every GPU has to be used.
    gpus : str
        The GPUs as they were named (`Fleet.parse`); empty when they were given as an object.
    constraints : Constraints
        What is demanded of the placement.
    largest : {"context", "batch"}, optional
        What is to be as large as fits, whatever the workload says of it.
    trust_remote_code : bool
        Whether model code that comes with the checkpoint may run.
    """

    workload: Workload
    objective: Objective | Literal["auto"] = "auto"
    use_all: bool = False
    gpus: str = ""
    constraints: Constraints = field(default_factory=Constraints)
    largest: Largest | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanProblem(PlanRequest):
    """A request on the GPUs that are there: what the planner solves for a profile.

    Parameters
    ----------
    fleet : Fleet
        What the constraints reserve is taken off its budgets already (`limits.usable`).
    device_map : DeviceMap, optional
        Where the modules go, if a person has decided that (`from_device_map`).
    limits : Limits, optional
        What the constraints mean for the profile; None until that is looked at.
    replay_cache : ReplayCache
        What one replay tells all problems that are made of this one.
    """

    fleet: Fleet
    device_map: DeviceMap | None = None
    limits: Limits | None = None
    replay_cache: ReplayCache = field(default_factory=ReplayCache, compare=False, repr=False)

    @property
    def request(self) -> PlanRequest:
        """What a plan keeps of it."""
        return PlanRequest(**{each.name: getattr(self, each.name) for each in fields(PlanRequest)})
