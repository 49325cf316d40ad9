"""Load: tensors go from the files straight to their devices, each once.

- `load`: fills a placed model from a checkpoint; the tensors of both must match
- `sources`, `pickles`: the tensors in files; a pickle with other objects is refused
- `read_ahead`, `fill`: read files in stretches, and copy or quantize these into the model
- `adapter`: reads LoRA adapters from peft's files
"""

from .fill import Progress
from .load import load_weights, refuse_differences

__all__ = ["Progress", "load_weights", "refuse_differences"]
