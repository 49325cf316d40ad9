"""Search: the best cut of a model's blocks into stages, and the best device for each stage.

Blocks run in order, so a placement is a cut of that order into stages and an assignment of
stages to devices. A dynamic programme over (block, devices used so far, device of the next stage)
finds the optimum over all cuts, all subsets and all orders of devices. Only the number of used
devices of each group of exchangeable devices is part of the state.

Exact memory takes long to compute, so the programme runs on lower bounds. The bounds of its
optimum's stages are replaced by exact bytes, and the programme runs again, until an optimum has
exact stages only. A bound never exceeds the exact bytes, so no other placement can be better. The
search doesn't assume that a longer stage needs more memory than a part of it.

The search is independent of models and of how costs are computed.

- `solve`: the entry points, and the solution that they return
- `problem`: one search, which replaces bounds by exact bytes until an optimum is exact
- `dynamic_programme`: the optimum over cuts and orders of devices, for given costs
- `known_bytes`: lower bounds and exact bytes of stages
- `device_groups`: exchangeable devices, and the transfer times between devices
- `limits`: the device of each pinned block, and the number of devices
"""

from .device_groups import exchangeable
from .dynamic_programme import BlockRange, UnsearchableError
from .known_bytes import KnownBytes
from .limits import NO_LIMITS, PlacementLimits
from .problem import OBJECTIVES, NoPlacement, Objective
from .solve import Solution, is_conceivable, min_devices, resolve_objective, search

__all__ = [
    "NO_LIMITS",
    "OBJECTIVES",
    "BlockRange",
    "KnownBytes",
    "NoPlacement",
    "Objective",
    "PlacementLimits",
    "Solution",
    "UnsearchableError",
    "exchangeable",
    "is_conceivable",
    "min_devices",
    "resolve_objective",
    "search",
]
