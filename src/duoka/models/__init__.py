"""Models: built on meta from a configuration, and where their tensors come from.

They know nothing of planning or hardware. Nothing is registered with transformers on import;
`build` and `chatglm.register` do that on first use.

- `build`, `meta`: any class of transformers, or code that comes with a checkpoint
- `remote_code`, `transformers4`: that code's import, and what transformers 4 gave to such code
- `flash_attention`: what such code finds in the place of flash_attn where that isn't installed
- `chatglm`: ChatGLM2, ChatGLM3 and GLM-4 in their published format
- `glm4v`, `eva_clip`, `image_tokens`: GLM-4V, its vision tower, and pictures in its prompts
- `from_checkpoint`, `quantized_checkpoint`: a checkpoint → its model, in the form of its weights
- `conversion`, `boxes`: which part of which tensor of a checkpoint fills what of the model
- `quantization`: weights in fewer bits; `lora`: adapters
- `trainable`, `chunked_loss`: what of a model learns, and its loss, some tokens at a time
- `kv_cache`: the cache, by the kind that a workload names
- `cache_argument`: the argument that takes the cache, by transformers' old and new name
- `text`: tokenizers, prompts, messages and chat templates
"""

from .build import build, resolve
from .quantized_checkpoint import hold_as_stored
from .remote_code import RemoteCode
from .trainable import base_name, initialize_adapters, make_trainable

__all__ = [
    "RemoteCode",
    "base_name",
    "build",
    "hold_as_stored",
    "initialize_adapters",
    "make_trainable",
    "resolve",
]
