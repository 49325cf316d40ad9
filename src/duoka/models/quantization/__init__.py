"""Quantization: which weights of a model become smaller, in which form, and how they are filled."""

from .choose import notes, quantize_model
from .composed import StoredWeight, is_composed, num_bytes, parts
from .rows import fill_rows, takes_rows
from .weights import Scheme, computes_in, empty_weight, moved, quantize

__all__ = [
    "Scheme",
    "StoredWeight",
    "computes_in",
    "empty_weight",
    "fill_rows",
    "is_composed",
    "moved",
    "notes",
    "num_bytes",
    "parts",
    "quantize",
    "quantize_model",
    "takes_rows",
]
