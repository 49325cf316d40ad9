"""Requests to the planner, and the same on a fleet.

The command line, Python, plan files and the command to paste all contain a request; none of it is
resolved. Its names are translated for one model and one fleet where it is solved.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal, get_args

from duoka.forecast.costs import ReplayCache
from duoka.forecast.workload import Workload
from duoka.hardware.fleet import Fleet

from .constraints import Constraints
from .device_map import DeviceMap
from .search import NO_LIMITS, Objective, PlacementLimits

Largest = Literal["context", "batch"]
LARGEST: tuple[Largest, ...] = get_args(Largest)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The demands on a plan, without the model: enough to repeat the request.

    The workload keeps "auto" where it was requested. With `use_all` every GPU has to be used.
    `gpus` are named as in `Fleet.parse`; empty when they were given as an object. `largest` is the
    size to maximize; the workload's own value of it is ignored. With `trust_remote_code` model code
    that comes with the checkpoint may run. `most_new_tokens` limits a generation that is requested
    without a limit of its own; what is planned doesn't depend on it.
    """

    workload: Workload
    objective: Objective | Literal["auto"] = "auto"
    use_all: bool = False
    gpus: str = ""
    constraints: Constraints = field(default_factory=Constraints)
    largest: Largest | None = None
    trust_remote_code: bool = False
    most_new_tokens: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanProblem(PlanRequest):
    """A request on a fleet: the problem to solve for a profile.

    What the constraints reserve is taken off the fleet's budgets already (`limits.usable`). With a
    device map a person has decided where the modules go (`from_device_map`). `limits` is what the
    planner takes the constraints to mean for a profile; what replays have found out is shared by
    all problems that are made of one.
    """

    fleet: Fleet
    device_map: DeviceMap | None = None
    limits: PlacementLimits = NO_LIMITS
    replay_cache: ReplayCache = field(default_factory=ReplayCache, compare=False, repr=False)

    @classmethod
    def of(
        cls, request: PlanRequest, fleet: Fleet, device_map: DeviceMap | None = None
    ) -> PlanProblem:
        """Put a request on a fleet."""
        values = {part.name: getattr(request, part.name) for part in fields(PlanRequest)}
        return cls(fleet=fleet, device_map=device_map, **values)

    @property
    def request(self) -> PlanRequest:
        """The request, without the fleet."""
        return PlanRequest(**{part.name: getattr(self, part.name) for part in fields(PlanRequest)})
