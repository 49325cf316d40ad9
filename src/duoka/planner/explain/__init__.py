"""Explanation: the reasons for a plan, compared with other placements, as frozen data.

Everything is computed with the costs that the planner optimizes: the bytes of each stage with one
block less or more, the value of alternative placements, and the bound that no placement exceeds.
`report` formats an explanation.

- `explain`: an explanation from a profile and a plan
- `alternatives`: placements for other objectives and with equal numbers of layers, evaluated
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
