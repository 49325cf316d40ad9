"""Explanation: the reasons for a plan, compared with other placements, as frozen data.

Everything is computed with the costs that the planner optimizes: the bytes of each stage with one
block less or more, and the bound that no placement exceeds.
`report` formats an explanation.

- `explain`: an explanation from a profile and a plan
- `trial`: other placements, evaluated with the planner's costs
- `data`: the parts of an explanation
"""

from .data import BoundaryMove, Explanation, Fewer, Share
from .explain import explain

__all__ = ["BoundaryMove", "Explanation", "Fewer", "Share", "explain"]
