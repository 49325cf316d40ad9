"""Search: the best cut of a model's blocks into stages, and the best device for each stage.

Blocks run in order, so a placement is a cut of that order into stages and an assignment of
stages to devices. The optimum over all of them, all subsets and all orders of devices is found
by a dynamic programme over (block, devices used so far, first device of the rest). Identical
devices are counted, not told apart.

Exact memory is dear to compute, so the programme runs on lower bounds. The optimum's entries are
made exact, and it runs again until its optimum consists of exact entries alone. A bound never
exceeds the exact value, so nothing else can be better. No rule that a longer stage needs more
memory than a part of it is assumed.

It knows nothing of models, workloads or how costs come about.

- `solve`: what the planner asks, and the answers
- `problem`: one search, whose bounds are made exact until one wins
- `dynamic_programme`: the optimum over cuts and orders of devices, under costs as they are known
- `known_bytes`: what it knows of the bytes of stages so far
- `device_groups`: devices that can be exchanged for each other, and the links between them
- `limits`: which blocks must be on which device
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
