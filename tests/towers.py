"""Tiny models of transformers' image-text families, for tests that hold duoka against all of them.

As `families` for language models: the class's own defaults, with small sizes wherever it or one of
its parts has a field of that name. What no rule can know stands in `_SPECIAL`.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import warnings
from collections.abc import Sequence
from typing import Any

import families
import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from duoka.runtime.image_inputs import ImagePrompts

IMAGE_SIZE = 56

_TOP: dict[str, Any] = {
    "projection_dim": 32,
    "mm_tokens_per_image": 4,
    "num_query_tokens": 4,
    "vision_soft_tokens_per_image": 16,
    "image_grid_pinpoints": [[56, 56], [112, 56], [56, 112]],
    "latent_query_num": 4,
    "layers": 2,
    "qformer_hidden_size": 32,
}
_VISION: dict[str, Any] = {
    **_TOP,
    "image_size": IMAGE_SIZE,
    "patch_size": 14,
    "depth": 2,
    "num_hidden_layers": 2,
    "out_hidden_size": 32,
    "mm_hidden_size": 32,
    "encoder_hidden_size": 32,
    "vision_output_dim": 32,
    "intermediate_layers_indices": [0, 1],
    "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
    "max_num_tiles": 2,
    "deepstack_visual_indexes": [0, 1],
    "text_hidden_size": 32,
    "num_queries": 4,
    "layers": 2,
}
# Rotary sections of time, height and width, for heads of 8 of which all or a half is rotated.
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_HALF_SECTIONS = {**_SECTIONS, "partial_rotary_factor": 0.5}
_WHOLE = {"text_config": {"rope_parameters": _SECTIONS}}
_HALF = {"text_config": {"rope_parameters": _HALF_SECTIONS, "head_dim": 16}}
_SPECIAL: dict[str, dict[str, Any]] = {
    "glm46v": _HALF, "glm4v": _HALF, "glm4v_moe": _HALF, "glmga": _HALF, "glm_ocr": _HALF,
    "qwen2_vl": _WHOLE, "qwen2_5_vl": _WHOLE, "paddleocr_vl": _WHOLE,
    "cosmos3_edge": {"text_config": {"rope_parameters": _SECTIONS}},
    "cohere_compass": {
        "text_config": {
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": 10000.0}
                for kind in ("full_attention", "sliding_attention")
            }
        }
    },
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"]}},
    "glm5_next": {
        "text_config": {
            "num_key_value_heads": 4,
            "qk_rope_head_dim": 0,
            "layer_types": ["linear_attention", "indexed_attention"],
        }
    },
    "molmo2": {
        "vision_config": {"image_size": [56, 56]},
        "adapter_config": {"vision_feature_layer": [-1, -2]},
    },
    "mistral_large4": {"text_config": {"num_key_value_heads": 4}},
    "mllama": {"vision_config": {"vision_output_dim": 96}},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 20, **_WHOLE},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 20},
    "florence2": {"vision_config": {"depths": [1, 1, 1, 1]}},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "ernie4_5_vl_moe": {
        "text_config": {"moe_intermediate_size": [16, 16], "rope_parameters": _SECTIONS}
    },
}  # fmt: skip

UNSERVED = {
    "a configuration that the rules above don't make, or a library that isn't there": (
        "apertus1p5", "chameleon", "dots3_note", "emu3", "fast_vlm", "gemma3n", "granite4_vision",
        "hunyuan_vl", "inkling_mm_model", "muse_spark", "nemotron_h_omni", "perception_lm",
        "pp_formulanet",
    ),
    "pictures that need torchvision, or come in a way of the family's own": (
        "deepseek_ocr2", "deepseek_vl_hybrid", "fuyu", "gemma4_unified", "idefics", "inkling2",
        "instructblipvideo", "kimi_k25", "lfm2_vl", "llama4", "minicpm_ocr", "molmo2",
        "muse_glimmer", "udop", "unlimited_ocr",
    ),
    "takes no pictures": ("diffusion_gemma", "evolla", "mistral4", "pi0"),
    "code that reads pixels, so that it can't be traced without them": (
        "gemma4", "idefics2", "idefics3", "smolvlm",
    ),
    "more settings than its configuration has": ("t5gemma2", "vision-encoder-decoder"),
}  # fmt: skip
"""Families that aren't held to be clean with pictures, by reason."""


def all_names() -> list[str]:
    """Name every family that transformers has an image-text class for."""
    return sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def build(name: str, *, seed: int = 0, causal: bool = False) -> PreTrainedModel:
    """Build a family's tiny model, in eval mode; `causal`: the class that takes text alone."""
    torch.manual_seed(seed)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        model_class, config = _model_class(name, causal=causal), configuration(name)
        if causal and model_class.config_class is config.sub_configs.get("text_config"):
            config = config.get_text_config()
        model = model_class(config)
    return model.eval()


def image_inputs(
    model: PreTrainedModel,
    sizes: Sequence[tuple[int, int]],
    *,
    batch: int = 1,
    device: torch.device | str = "cpu",
    prompt_tokens: int = 0,
) -> dict[str, torch.Tensor]:
    """Make the arguments of `forward` for prompts with images of these widths and heights."""
    return ImagePrompts(model, sizes).inputs(batch, prompt_tokens, device)


def is_composite(name: str) -> bool:
    """Whether a family's configuration has parts with configurations of their own."""
    return bool(CONFIG_MAPPING[name].sub_configs)


def configuration(name: str) -> PretrainedConfig:
    """Make a family's tiny configuration."""
    return _tiny(CONFIG_MAPPING[name], _SPECIAL.get(name, {}), vision=False)


def _tiny(
    config_class: type[PretrainedConfig], special: dict[str, Any], *, vision: bool
) -> PretrainedConfig:
    sizes = {**families._SIZES, **(_VISION if vision else _TOP)}
    special = {**families._SPECIAL.get(config_class.model_type, {}), **special}
    fields: dict[str, Any] = {}
    signature = inspect.signature(config_class.__init__).parameters
    for field, parameter in signature.items():
        if (field in sizes and not _is_list(parameter.default)) or _is_list(sizes.get(field)):
            fields[field] = sizes[field]
        elif isinstance(parameter.default, float) and field.endswith(families._NO_DROPOUT):
            fields[field] = 0.0
        elif field.endswith(("token_id", "token_index")):
            fields[field] = 3 + len([n for n in fields if "token_i" in n])
    for part, part_class in config_class.sub_configs.items():
        if part_class is AutoConfig:
            part_class = type(getattr(config_class(), part))
        own = special.get(part, {})
        if isinstance(own, dict) and part_class is not type(None):
            fields[part] = _tiny(part_class, own, vision="text" not in part).to_dict()
    fields |= {k: v for k, v in special.items() if k not in config_class.sub_configs}
    return config_class(**fields)


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple))


def _model_class(name: str, *, causal: bool) -> type[PreTrainedModel]:
    images, texts = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    chosen = texts[name] if causal else images[name]
    module = importlib.import_module("transformers")
    return getattr(module, chosen if isinstance(chosen, str) else chosen[0])
