"""A ChatGLM3 checkpoint of random weights, with the demo's tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from duoka import models
from duoka.hardware.fleet import Fleet
from duoka.models.conversion import published_tensors
from duoka.tools.demo.checkpoint import CONFIG, write_frame

# ChatGLM3-6B has 28 of these layers, and embeddings for 65,024 tokens.
_SHAPE = {
    "hidden_size": 4096, "ffn_hidden_size": 13696, "num_attention_heads": 32, "kv_channels": 128,
    "multi_query_group_num": 2, "padded_vocab_size": 65024,
}  # fmt: skip
_LAYER_BYTES, _EMBEDDING_BYTES, _MOST_LAYERS = 407_421_952, 2 * 65024 * 4096 * 2, 28
_SHARE = 0.6


def write_checkpoint(directory: Path, fleet: Fleet, *, quick: bool) -> None:
    """Write a model whose weights fill at most 60 % of the smallest GPU, and a line of text."""
    most_bytes = _SHARE * min(device.budget_bytes for device in fleet.devices)
    num_layers = int((most_bytes - _EMBEDDING_BYTES) / _LAYER_BYTES)
    shape = {**_SHAPE, "num_layers": max(1, min(_MOST_LAYERS, num_layers))}
    is_older = any(device.has_bfloat16 is False for device in fleet.devices)
    dtype = {"torch_dtype": "float16" if is_older else "bfloat16"}
    config = {**CONFIG, **({"kv_channels": 64} if quick else shape), **dtype}
    write_frame(directory, config)
    write_random_weights(directory, config)
    (directory / "text.jsonl").write_text(json.dumps({"text": "duoka " * 1500}) + "\n")


def write_random_weights(directory: Path, config: Mapping[str, Any]) -> None:
    """Write weights under the published names, a file each; those of equal shapes are equal."""
    dtype = getattr(torch, config["torch_dtype"])
    tensors = published_tensors(models.build(dict(config), dtype=dtype))
    shapes = {tensor.shape for tensor in tensors.values()}
    weights = {shape: 0.02 * torch.randn(shape, dtype=dtype) for shape in shapes}
    files = {name: f"{name}.safetensors" for name in tensors}
    for name, tensor in tensors.items():
        save_file({name: weights[tensor.shape]}, directory / files[name])
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
