"""Quantization: quantized weights, the choice of weights to quantize, and loading by rows.

- `choose`: choose the weights of a model to quantize, with reasons for the exceptions
- `weights`: int8, int4 and nf4 weights of torchao and bitsandbytes
- `composed`: weights made of several tensors
- `stacked`: the quantized weights of a layer's experts in one parameter
- `experts`: the forward pass of experts with such weights
- `host_experts`: experts whose weights stay in host memory, where the CPU computes
- `expert_cache`: experts on the host that the GPU fetches and keeps
- `fetched_experts`: the GPU computes experts on the host in steps of many tokens
- `routing`: which tokens each expert has
- `frozen`: linear layers with frozen quantized weights for training
- `scaled`: 8-bit and MXFP4 weights of published checkpoints
- `stored`: rows of published checkpoints, and weights that hold such rows
- `rows`: quantize into an existing weight some rows at a time
"""

from . import experts  # noqa: F401 (registers the forward pass and its operators)
from .choose import notes, quantize_model
from .composed import is_composed, num_bytes, parts
from .frozen import freeze_quantized
from .host_experts import (
    computing_devices,
    expert_modules,
    has_interface,
    keep_on_host,
    on_host,
    use_implementation,
)
from .rows import fill_rows, takes_rows
from .stacked import ExpertStack
from .stored import StoredRows, empty_stored
from .weights import Scheme, computes_in, empty_weight, let_compute_in, move_weight, quantize

__all__ = [
    "ExpertStack",
    "Scheme",
    "StoredRows",
    "computes_in",
    "computing_devices",
    "empty_stored",
    "empty_weight",
    "expert_modules",
    "fill_rows",
    "freeze_quantized",
    "has_interface",
    "is_composed",
    "keep_on_host",
    "let_compute_in",
    "move_weight",
    "notes",
    "num_bytes",
    "on_host",
    "parts",
    "quantize",
    "quantize_model",
    "takes_rows",
    "use_implementation",
]
