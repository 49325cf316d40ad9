"""Requests to the planner, and problems: requests on a fleet.

The command line, the Python API and plan files make or contain a request. A request keeps "auto"
and names as the user wrote them; they are resolved for one model and one fleet when it is planned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Literal, get_args

from duoka.base.serialization import OMIT_DEFAULT
from duoka.forecast.costs import ReplayCache
from duoka.forecast.profile import Profile
from duoka.forecast.workload import Workload
from duoka.hardware.device import Device
from duoka.hardware.fleet import Fleet

from .constraints import Constraints
from .device_map import DeviceMap
from .search import NO_LIMITS, Objective, PlacementLimits

Largest = Literal["context", "batch"]
LARGEST: tuple[Largest, ...] = get_args(Largest)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A request for a plan, without the model and the fleet.

    - `workload`: the workload, with "auto" unresolved
    - `use_all`: True if every GPU must be used
    - `gpus`: the fleet in the form of `Fleet.parse`; empty if it was given as an object
    - `largest`: the size to maximize, in place of the workload's; None to plan the workload's sizes
    - `trust_remote_code`: True if the checkpoint's own model code may run
    - `host`: declared host memory for weights (`Fleet.with_host`); None if not declared
    - `most_new_tokens`: limit of a generation without a limit of its own; no effect on the plan
    """

    workload: Workload
    objective: Objective | Literal["auto"] = "auto"
    use_all: bool = False
    gpus: str = ""
    constraints: Constraints = field(default_factory=Constraints)
    largest: Largest | None = None
    trust_remote_code: bool = False
    host: Device | None = field(default=None, metadata=OMIT_DEFAULT)
    most_new_tokens: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanProblem(PlanRequest):
    """A request on a fleet: the problem to solve for a profile.

    The budgets of `fleet` are those after the reserves (`limits.usable`). A `device_map` fixes the
    placement (`from_device_map`). `limits` are the constraints translated for a profile, set by the
    planner. `replay_cache` is shared by all problems derived from this one. `find_profile` returns
    the profile of another workload of the same model; None for a model given as an object.
    """

    fleet: Fleet
    device_map: DeviceMap | None = None
    limits: PlacementLimits = NO_LIMITS
    replay_cache: ReplayCache = field(default_factory=ReplayCache, compare=False, repr=False)
    find_profile: Callable[[Workload], Profile] | None = field(
        default=None, compare=False, repr=False
    )

    @classmethod
    def of(
        cls, request: PlanRequest, fleet: Fleet, device_map: DeviceMap | None = None
    ) -> PlanProblem:
        """Make the problem of a request on a fleet whose budgets exclude the reserves."""
        values = {part.name: getattr(request, part.name) for part in fields(PlanRequest)}
        return cls(fleet=fleet, device_map=device_map, **values)

    @property
    def request(self) -> PlanRequest:
        """The request, without the fleet."""
        return PlanRequest(**{part.name: getattr(self, part.name) for part in fields(PlanRequest)})
