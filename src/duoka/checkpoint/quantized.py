"""Quantized checkpoints: their formats, and the stored tensors of each weight.

The names are those of AutoGPTQ and GPTQModel, AutoAWQ, compressed-tensors, bitsandbytes, the FP8 of
DeepSeek and Qwen, FBGEMM's FP8, and OpenAI's MXFP4. `models.quantized_checkpoint` reads the values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from duoka.errors import ModelError

_KEY = "quantization_config"
METHODS = ("gptq", "awq", "compressed-tensors", "bitsandbytes", "fp8", "fbgemm_fp8", "mxfp4")
"""The supported formats, by the names that transformers calls `quant_method`."""

# How a weight "layers.0.mlp.up_proj.weight" is stored in some of the formats:
#
#   GPTQ            ….up_proj.qweight, .qzeros, .scales, perhaps .g_idx  (parts replace "weight")
#   bitsandbytes    ….up_proj.weight, .weight.absmax, .weight.quant_map, …  (parts follow it)
#   MXFP4           ….up_proj_blocks, ….up_proj_scales                     (parts with "_")
#
# So the weight that a stored tensor belongs to follows from the tensor's name alone. The quantized
# values may have the name of the weight itself, as for bitsandbytes.
_PART = re.compile(
    r"(?P<owner>.+?)(?P<part>_blocks|_scales|\.(?:qweight|qzeros|scales|g_idx|SCB"
    r"|weight_(?:packed|scale|scale_inv|scale_2|global_scale|zero_point|g_idx)"
    r"|weight\.(?:nested_)?(?:absmax|quant_map)|weight\.quant_state\.bitsandbytes__(?:nf4|fp4)))"
)
# Scales of activations and of an 8-bit KV cache, which are for other engines; facts of the headers.
_NEEDLESS = re.compile(
    r".+\.(?:(?:[kqv]|prob_output|key_cache|value_cache)_(?:scale|zero_point)"
    r"|(?:input|output|activation)(?:_global)?_(?:scale|zero_point|scale_ub)"
    r"|weight_shape|weight_format)"
)


def method_of(config: Mapping[str, Any]) -> str | None:
    """Return the name of the quantization format that a config states; None if unquantized."""
    settings = settings_of(config)
    if settings is None:
        return None
    method = str(settings["quant_method"])
    if method not in METHODS:
        raise ModelError(
            f"the checkpoint is quantized by {method[:60]!r}, which is not supported",
            hint=f"supported: {', '.join(METHODS)}; or use the 16-bit checkpoint",
        )
    return method


def settings_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the quantization settings of a config or one of its sections; None if unquantized."""
    for section in (config, *(value for value in config.values() if isinstance(value, dict))):
        settings = section.get(_KEY)
        if isinstance(settings, dict):
            # Older checkpoints of bitsandbytes have these keys instead of quant_method.
            is_old = bool({"load_in_4bit", "load_in_8bit"} & settings.keys())
            method = settings.get("quant_method", "bitsandbytes" if is_old else None)
            return {**settings, "quant_method": str(method)}
    return None


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config without its quantization settings."""
    return {
        key: without_quantization(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key != _KEY
    }


def group_parts(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the names of a checkpoint's tensors by weight, then by part; one part if unquantized.

    The part of a weight's own name is "weight". Tensors that duoka doesn't need are left out.
    """
    parts: dict[str, dict[str, str]] = {}
    for name in names:
        match = _PART.fullmatch(name)
        if match is not None:
            part = match["part"].lstrip(".")
            weight = match["owner"] + (".weight" if match["part"] != part else "")
            parts.setdefault(weight, {})[part] = name
        elif not _NEEDLESS.fullmatch(name):
            parts.setdefault(name, {})["weight"] = name
    return parts
