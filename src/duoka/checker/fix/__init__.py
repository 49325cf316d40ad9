"""The repair: the smallest changes of source that cure a report's faults, proved by checking again.

It reads source as syntax trees that keep every blank and comment, and never runs what it only
guesses: which of several ways cures a fault is decided by the check.
"""

from .fix import repair
from .patch import Patch, Repairs
from .write import OUTPUT, apply, apply_in_place

__all__ = ["OUTPUT", "Patch", "Repairs", "apply", "apply_in_place", "repair"]
