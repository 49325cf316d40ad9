"""Explanation: why a plan is as it is, as frozen data.

What is told is computed with the very costs that the planner optimised: what each stage would need
with a block less or more, what the nearest other placements need, and the bound that nothing beats.
It knows nothing of how that is shown.

- `explain`: from a profile and a plan to the explanation
- `alternatives`: the placements that people would try, tried
- `data`: what an explanation holds
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
