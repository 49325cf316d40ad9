"""A checkpoint of random weights, with a tokenizer of a few words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from duoka import models
from duoka.base.units import GIB
from duoka.hardware.fleet import Fleet
from duoka.models.conversion import published_tensors

# The shape of Mistral 7B: with all 32 layers it has 7.2 billion parameters.
_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
_QUICK_SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
_NUM_WORDS = 254
_SHARD_BYTES = 2 * GIB
_SHARE_OF_GPU, _SHARE_OF_DISK = 0.6, 0.8


def write_checkpoint(directory: Path, fleet: Fleet, *, quick: bool) -> None:
    """Write a model with as many layers as fit on the smallest GPU and on the disk."""
    has_bfloat16 = all(device.has_bfloat16 is not False for device in fleet.devices)
    config = {**_CONFIG, "torch_dtype": "bfloat16" if has_bfloat16 else "float16"}
    smallest_bytes = min(device.budget_bytes for device in fleet.devices)
    disk_bytes = _SHARE_OF_DISK * shutil.disk_usage(directory).free
    config |= {"num_hidden_layers": count_layers(min(_SHARE_OF_GPU * smallest_bytes, disk_bytes))}
    write_random_weights(directory, config | (_QUICK_SHAPE if quick else {}))
    words = ["<unk>", "<eos>", *(f"word{number}" for number in range(_NUM_WORDS))]
    model = WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>"
    ).save_pretrained(directory)
    row = json.dumps({"text": " ".join(words[2:] * 4)})
    (directory / "text.jsonl").write_text(f"{row}\n" * 16)


def count_layers(most_bytes: float) -> int:
    """Return the number of layers with which the model has at most so many bytes; 1 to 32."""
    hidden, kv_size = _CONFIG["hidden_size"], _CONFIG["hidden_size"] // 4
    embeddings = 2 * _CONFIG["vocab_size"] * hidden
    layer = hidden * (2 * hidden + 2 * kv_size + 3 * _CONFIG["intermediate_size"])
    return max(1, min(32, int((most_bytes / 2 - embeddings) // layer)))


def write_random_weights(directory: Path, config: Mapping[str, Any]) -> None:
    """Write random weights under the published names, in shards; equal shapes, equal weights."""
    (directory / "config.json").write_text(json.dumps(config))
    dtype = getattr(torch, config["torch_dtype"])
    generator = torch.Generator().manual_seed(0)
    shard, weights, weight_map = dict[str, Tensor](), dict[torch.Size, Tensor](), dict[str, str]()
    tensors = published_tensors(models.build(dict(config), dtype=dtype))
    for number, (name, tensor) in enumerate(tensors.items(), 1):
        if tensor.shape not in weights:
            empty = torch.empty(tensor.shape, dtype=dtype)
            is_norm = name.endswith("norm.weight")
            weights[tensor.shape] = (
                empty.fill_(1) if is_norm else empty.normal_(std=0.02, generator=generator)
            )
        shard[name] = weights[tensor.shape].clone()
        if number == len(tensors) or sum(each.nbytes for each in shard.values()) > _SHARD_BYTES:
            file = f"model-{len({*weight_map.values()}) + 1:05}.safetensors"
            save_file(shard, directory / file)
            weight_map.update(dict.fromkeys(shard, file))
            shard.clear()
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
