"""Models: built on meta from a configuration, their tensors' sources, tokenizers and prompts.

This room knows nothing of planning or hardware. Nothing is registered with transformers on
import; `build` and `chatglm.register` do that on first use.
"""

from .build import build, is_served, resolve
from .quantized_checkpoint import hold_as_stored
from .remote_code import import_class
from .trainable import base_name, make_trainable

__all__ = [
    "base_name",
    "build",
    "hold_as_stored",
    "import_class",
    "is_served",
    "make_trainable",
    "resolve",
]
