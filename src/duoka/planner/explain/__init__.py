"""Explanation: why a plan is as it is, as frozen data.

What is told is computed with the very costs that the planner optimised: what each stage would need
with a block less or more, what the nearest other placements need, and the bound that nothing beats.
It knows nothing of how that is shown.
"""

from .data import Alternative, Change, Crossing, Explanation, Fewer, Share
from .explain import explain

__all__ = [
    "Alternative",
    "Change",
    "Crossing",
    "Explanation",
    "Fewer",
    "Share",
    "explain",
]
