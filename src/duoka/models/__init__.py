"""Models: build them on the meta device, and map the tensors of checkpoints to their parameters.

This package knows nothing of planning or hardware. Nothing is registered with transformers on
import; `build` and `chatglm.register` do that on first use.

- `build`, `meta`: models of any class of transformers, or of a checkpoint's remote code
- `remote_code`, `transformers4`: import remote code, and provide transformers 4's interface to it
- `flash_attention`: a replacement of flash_attn, for remote code
- `chatglm`: ChatGLM2, ChatGLM3 and GLM-4 in their published format
- `glm4v`, `eva_clip`, `image_tokens`: GLM-4V, its vision tower, and image tokens in prompts
- `from_checkpoint`, `quantized_checkpoint`: a checkpoint → its model, with weights as stored
- `conversion`, `boxes`: the boxes of a checkpoint's tensors that fill each parameter
- `quantization`: quantized weights; `lora`, `adapter_stacks`: adapters, several side by side
- `trainable`, `chunked_loss`: trainable parameters, and the loss in chunks of tokens
- `kv_cache`: KV caches, by the kind that a workload names
- `cache_argument`: the cache argument of models, by transformers' old and new name
- `text`: tokenizers, prompts, messages and chat templates
"""

from .build import build, resolve
from .quantized_checkpoint import hold_as_stored, stored_weights
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
    "stored_weights",
]
