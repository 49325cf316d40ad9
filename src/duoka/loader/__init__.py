"""Loader: tensors go from the files straight to their devices, each once.

This room knows nothing of how a placement was found, and leaves movers to `dispatch`.
"""

from .filling import Progress
from .keeping import Keeping
from .load import load_weights, refuse_differences
from .published import load_published, refuse_unloadable

__all__ = [
    "Keeping",
    "Progress",
    "load_published",
    "load_weights",
    "refuse_differences",
    "refuse_unloadable",
]
