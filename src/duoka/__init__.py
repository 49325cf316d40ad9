"""duoka puts a large language model on the GPUs that a person has.

It plans where every module goes, proves the plan before a weight is read, loads it, and runs it.
What needs torch is imported on first use, so that planning from a cached profile starts at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import errors
from .checkpoint import Checkpoint
from .fleet import Device, Fleet, Link
from .forecast import Forecast
from .placement import Placement
from .plans import Plan
from .workload import Workload

if TYPE_CHECKING:
    from .api import dispatch, load, plan

__version__ = "0.1.0"
__all__ = [
    "Checkpoint",
    "Device",
    "Fleet",
    "Forecast",
    "Link",
    "Placement",
    "Plan",
    "Workload",
    "dispatch",
    "errors",
    "load",
    "plan",
]

_NEED_TORCH = frozenset({"dispatch", "load", "plan"})


def __getattr__(name: str) -> Any:
    if name in _NEED_TORCH:
        from . import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
