"""duoka puts a large language model on the GPUs that a person has.

It plans where every module goes, proves the plan before a weight is read, loads it, and runs it.
Each name is imported on first use, so that the program starts at once, and planning from a cached
profile never waits for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import errors

if TYPE_CHECKING:
    from .api import dispatch, load, plan, plan_replicas
    from .checkpoint import Checkpoint
    from .checks import check
    from .comparison import compare
    from .constraints import Constraints
    from .explanation import explain
    from .exports import export
    from .fleet import Device, Fleet, Link
    from .forecast import Forecast
    from .placement import Placement
    from .plans import Plan
    from .repairs.repair import repair
    from .workload import Training, Workload

__version__ = "0.1.0"
__all__ = [
    "Checkpoint",
    "Constraints",
    "Device",
    "Fleet",
    "Forecast",
    "Link",
    "Placement",
    "Plan",
    "Training",
    "Workload",
    "check",
    "compare",
    "dispatch",
    "errors",
    "explain",
    "export",
    "load",
    "plan",
    "plan_replicas",
    "repair",
]

_ROOMS = {
    "Checkpoint": "checkpoint",
    "Constraints": "constraints",
    "Device": "fleet",
    "Fleet": "fleet",
    "Forecast": "forecast",
    "Link": "fleet",
    "Placement": "placement",
    "Plan": "plans",
    "Training": "workload",
    "Workload": "workload",
    "check": "checks",
    "compare": "comparison",
    "dispatch": "api",
    "explain": "explanation",
    "export": "exports",
    "load": "api",
    "plan": "api",
    "plan_replicas": "api",
    "repair": "repairs",
}


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return getattr(import_module(f".{_ROOMS[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
