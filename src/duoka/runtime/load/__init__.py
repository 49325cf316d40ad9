"""Load: tensors go from the files straight to their devices, each once.

- `load`: a checkpoint into a placed model; the loaded tensors must be the expected ones
- `sources`, `pickles`: the tensors of files; a pickle with anything else is refused
- `read_ahead`, `fill`: files read in stretches, copied or quantized into the model
- `quantized`: checkpoints that were published quantized, loaded by transformers
- `adapter`: LoRA adapters in peft's files
"""

from .fill import Progress
from .load import load_weights, refuse_differences
from .quantized import load_published, refuse_unloadable

__all__ = [
    "Progress",
    "load_published",
    "load_weights",
    "refuse_differences",
    "refuse_unloadable",
]
