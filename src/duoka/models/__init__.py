"""Models: built on meta from a configuration, and where their tensors come from.

They know nothing of planning or hardware. Nothing is registered with transformers on import;
`build` and `chatglm.register` do that on first use.

- `build`, `meta`: any class of transformers, or code that comes with a checkpoint (`remote_code`)
- `chatglm`: ChatGLM2, ChatGLM3 and GLM-4 in their published format
- `from_checkpoint`, `quantized_checkpoint`: a checkpoint → its model, in the form of its weights
- `conversion`, `boxes`: which part of which tensor of a checkpoint fills what of the model
- `quantization`: weights in fewer bits; `trainable`: what of a model learns
- `kv_cache`: the cache, by the kind that a workload names
- `text`: tokenizers, prompts, messages and chat templates
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
