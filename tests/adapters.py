"""LoRA adapters with random weights, in peft's files."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM


def sizes_of(checkpoint: Path, *targets: str) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the linear modules whose names end with one of the targets."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint))
    return {
        name: (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if name.endswith(targets) and isinstance(module, torch.nn.Linear)
    }


def write_adapter(
    directory: Path, sizes: Mapping[str, tuple[int, int]], *, rank: int = 4, std: float = 0.3
) -> Path:
    """An adapter of these modules, by name with inputs and outputs; it changes answers."""
    generator = torch.Generator().manual_seed(zlib.crc32(directory.name.encode()))
    tensors = {}
    for name, (inputs, outputs) in sizes.items():
        for side, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            values = torch.empty(shape).normal_(std=std, generator=generator)
            tensors[f"base_model.model.{name}.lora_{side}.weight"] = values
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 3 * rank, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
