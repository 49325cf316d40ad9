"""Whole models with quantized experts compute the logits of those with dequantized ones."""

from __future__ import annotations

import copy
import statistics
import warnings
from typing import Any

import families
import pytest
import torch
from quantized_experts import (
    distance,
    modules_with_experts,
    quantize_experts,
    with_dequantized_experts,
)
from torch import Tensor
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name

from duoka import virtual
from duoka.models.quantization import ExpertStack, Scheme, quantize_model

SCHEMES: tuple[Scheme, ...] = ("int8", "int4", "nf4")
SIZES = {
    "hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 64, "num_experts": 8,
    "shared_expert_intermediate_size": 64, "num_local_experts": 8, "n_routed_experts": 8,
}  # fmt: skip
QUICK = ("glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss", "nemotron_h", "qwen3_moe")
UNBUILT = {
    "towers at their full size": ("dots3_note", "gemma4", "qwen3_5_moe", "qwen4_exp"),
    "a configuration that the rules of `families` don't make": ("gemma4_text", "granitemoehybrid"),
    "no experts in two layers": ("beam", "flint"),
}
NOT_BUILT = {name for names in UNBUILT.values() for name in names}
OWN_PRODUCTS = ("jamba",)
"""Families whose code multiplies by weights of linear layers in ways that int8 doesn't know."""
_WITH_EXPERTS = dict(modules_with_experts())
OTHERS = [
    name
    for name in families.all_names()
    if model_type_to_module_name(name) in _WITH_EXPERTS and name not in NOT_BUILT
]
_TEXT: dict[str, Any] = {
    **SIZES, "vocab_size": 99, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "pad_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
PICTURES: dict[str, dict[str, Any]] = {
    "glm4v_moe": {"rope_parameters": {**_SECTIONS, "partial_rotary_factor": 0.5}},
    "glm5_next": {"num_hidden_layers": 4, "mlp_layer_types": ["dense", *["sparse"] * 3]},
}


@pytest.mark.parametrize("name", families.by_turn(QUICK, QUICK, OTHERS))
def test_logits_of_text_models(name: str) -> None:
    hold(families.build(name, sizes=SIZES))


@pytest.mark.parametrize("name", PICTURES)
def test_logits_of_glm_models_with_pictures(name: str) -> None:
    torch.manual_seed(0)
    tower = {"depth": 1, "hidden_size": 64, "num_heads": 4, "out_hidden_size": 64}
    config = CONFIG_MAPPING[name](
        text_config={**_TEXT, **PICTURES[name]}, vision_config={**tower, "intermediate_size": 64}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = AutoModelForImageTextToText.from_config(config)
    families._spread(model)
    hold(model.eval())


def hold(model: Any) -> None:
    """Compare logits in each scheme: of all weights on the CPU, of experts on a virtual GPU."""
    with virtual.gpus([None], data="cpu"):
        for scheme in SCHEMES:
            on_cpu = copy.deepcopy(model)
            if model.config.model_type in OWN_PRODUCTS:
                quantize_experts(on_cpu, scheme)
            else:
                quantize_model(on_cpu, scheme)
            hold_logits(on_cpu, 1e-3)
            on_gpu = copy.deepcopy(model).to("vgpu:0")
            quantize_experts(on_gpu, scheme)
            # Tensor cores compute in bfloat16.
            hold_logits(on_gpu, 1e-3 if scheme == "nf4" else 3e-2)


def hold_logits(model: Any, rounding: float) -> None:
    assert any(isinstance(parameter, ExpertStack) for parameter in model.parameters())
    pairs = zip(logits(model), logits(with_dequantized_experts(model)), strict=True)
    # A rounded router may choose another expert for a token, and for no other.
    assert statistics.median(distance(*rows) for rows in pairs) < rounding


def logits(model: Any) -> list[Tensor]:
    """Return the logits of each token of a prompt, and of two tokens after it, one by one."""
    tokens = torch.randint(3, 99, (1, 12), generator=torch.Generator().manual_seed(1))
    tokens = tokens.to(next(model.parameters()).device)
    with torch.no_grad():
        output = model(input_ids=tokens[:, :-2], use_cache=True)
        rows = list(output.logits[0].cpu())
        for place in (-2, -1):
            output = model(input_ids=tokens[:, place, None], past_key_values=output.past_key_values)
            rows += output.logits[0].cpu()
    return rows
