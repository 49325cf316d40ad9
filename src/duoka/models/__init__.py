"""Models: built on meta from a configuration, and the origins of their tensors.

They know nothing of planning or hardware. Nothing is registered with transformers on import;
`build` and `chatglm.register` do that on first use.

- `build`, `meta`: any class of transformers, or code that comes with a checkpoint
- `remote_code`, `transformers4`: importing such code, and the names of transformers 4 for it
- `flash_attention`: a stand-in for flash_attn, for such code
- `chatglm`: ChatGLM2, ChatGLM3 and GLM-4 in their published format
- `glm4v`, `eva_clip`, `image_tokens`: GLM-4V, its vision tower, and pictures in its prompts
- `from_checkpoint`, `quantized_checkpoint`: a checkpoint → its model, in the form of its weights
- `conversion`, `boxes`: the boxes of a checkpoint's tensors that fill each parameter
- `quantization`: weights in fewer bits; `lora`: adapters
- `trainable`, `chunked_loss`: trainable parameters, and the loss in chunks of tokens
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
