"""Fixes: the smallest source changes that remove a report's faults, verified by another check.

Edits are made in the text, at positions from its syntax tree, so that whitespace and comments stay.
The check decides which of several candidates is correct.

- `fix`: from a report to patches; `patch`: the patches; `write`: writes patches to files
- `search`: rounds of patching and checking; `candidates`: changes that may fix a fault
- `device_exprs`, `factories`, `containers`, `edits`: parts of candidates
- `syntax`, `sources`: syntax trees and files
- `verify`, `live_code`: the proof, and running patched code in a live model
"""

from .fix import repair
from .patch import Patch, Repairs
from .write import OUTPUT, apply, apply_in_place

__all__ = ["OUTPUT", "Patch", "Repairs", "apply", "apply_in_place", "repair"]
