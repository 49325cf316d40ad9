"""Loader: tensors go from the files straight to their devices, each once.

This room knows nothing of how a placement was found, and leaves movers to `dispatch`.
"""

from .fill import Progress
from .load import load_weights, refuse_differences
from .quantized import load_published, refuse_unloadable
from .weight_cache import Keeping

__all__ = [
    "Keeping",
    "Progress",
    "load_published",
    "load_weights",
    "refuse_differences",
    "refuse_unloadable",
]
