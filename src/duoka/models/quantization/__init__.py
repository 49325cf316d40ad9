"""Quantization: weights in fewer bits, their forms, and filling them.

- `choose`: the weights to quantize, and the reasons for which others stay
- `weights`: int8, int4 and nf4, as torchao and bitsandbytes make and multiply them
- `composed`: tensors that consist of several; weights with known bytes and unknown numbers
- `frozen`: layers that gradients pass
- `rows`: filling a weight some rows at a time
"""

from .choose import notes, quantize_model
from .composed import StoredWeight, is_composed, num_bytes, parts
from .frozen import freeze_quantized
from .rows import fill_rows, takes_rows
from .weights import Scheme, computes_in, empty_weight, move_weight, quantize

__all__ = [
    "Scheme",
    "StoredWeight",
    "computes_in",
    "empty_weight",
    "fill_rows",
    "freeze_quantized",
    "is_composed",
    "move_weight",
    "notes",
    "num_bytes",
    "parts",
    "quantize",
    "quantize_model",
    "takes_rows",
]
