"""Explanation: the reasons for a plan and its rivals, as frozen data.

Everything is computed with the costs that the planner optimised: the needs of each stage with a
block less or more, those of the nearest other placements, and the bound that nothing beats. How an
explanation is shown is unknown here.

- `explain`: from a profile and a plan to the explanation
- `alternatives`: usual placements by hand and by other objectives, evaluated
- `data`: the parts of an explanation
"""

from .data import Alternative, BoundaryMove, Crossing, Explanation, Fewer, Share
from .explain import explain

__all__ = [
    "Alternative",
    "BoundaryMove",
    "Crossing",
    "Explanation",
    "Fewer",
    "Share",
    "explain",
]
