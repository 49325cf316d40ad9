"""Small models whose last layers read the keys and values of earlier ones: Gemma 3n and 4."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    PreTrainedModel,
)

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "vocab_size_per_layer_input": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 3,
    "sliding_window": 16,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 2,
    "max_position_embeddings": 512,
}
NAMES = ("gemma4", "gemma3n")


def build(name: str) -> PreTrainedModel:
    """Build a model with random weights, in eval mode; layers 5 to 7 read what 3 and 4 made."""
    torch.manual_seed(0)
    if name == "gemma4":
        wide = {"3": {"head_dim": 32}, "7": {"head_dim": 32}}
        return Gemma4ForCausalLM(Gemma4TextConfig(**SIZES, per_layer_config=wide)).eval()
    own = {"laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 8}
    return Gemma3nForCausalLM(Gemma3nTextConfig(**SIZES, **own)).eval()


def device_map(model: PreTrainedModel, device_of: dict[int, int]) -> dict[str, int]:
    """Place each layer where it says, with all that is used behind the layers; the rest on 0."""
    placed = {f"model.layers.{layer}": device for layer, device in device_of.items()}
    for name, _ in [*model.named_parameters(), *model.named_buffers()]:
        if ".layers." not in name:
            owner = name.rpartition(".")[0]
            placed[name if owner == "model" else ".".join(owner.split(".")[:2])] = 0
    behind = {name: device_of[7] for name in placed if "unembed" in name}
    return placed | behind | {"lm_head": 0}
