"""The repair: the smallest changes of source that cure a report's faults, proved by checking again.

It reads source as syntax trees that keep every blank and comment, and never runs what it only
guesses: which of several candidates cures a fault is decided by the check.

- `fix`: from a report to patches; `patch`: what they are; `write`: copies of files, or the files
- `search`: rounds of patching and checking; `live_code`: live functions that run patched code
- `candidates`: changes that may cure a fault, by what `device_exprs` (where to), `containers` and
  `factories` know
- `sources`, `syntax`, `edits`: files, their trees, and changes of these
- `verify`: on several devices the patched code computes what the original computes on one
"""

from .fix import repair
from .patch import Patch, Repairs
from .write import OUTPUT, apply, apply_in_place

__all__ = ["OUTPUT", "Patch", "Repairs", "apply", "apply_in_place", "repair"]
