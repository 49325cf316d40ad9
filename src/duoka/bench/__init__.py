"""Bench: what only running on the machine's own GPUs can tell.

Virtual GPUs go through the same code; what is measured on them says how fast the processor is, and
is kept nowhere.
"""

from .calibrating import Calibrated, calibrate

__all__ = ["Calibrated", "calibrate"]
