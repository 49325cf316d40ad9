"""Quantized checkpoints: formats, and the tensors of each weight.

The names are those documented for AutoGPTQ and GPTQModel, AutoAWQ, compressed-tensors,
bitsandbytes, torchao's safetensors, the block-scaled FP8 of DeepSeek and Qwen, FBGEMM's FP8, and
OpenAI's MXFP4. Values are not unpacked here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from duoka.errors import ModelError

from .headers import TensorInfo

_KEY = "quantization_config"
_SCALES = ("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale")
_ACTIVATIONS = ("input_scale", "input_zero_point", "input_global_scale", "activation_scale",
                "output_scale", "input_scale_ub")  # fmt: skip
_CACHE = re.compile(r"\.(?:[kqv]|prob_output|(?:key|value)_cache)_(?:scale|zero_point)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A quantization format: the names of a weight's stored tensors, and the package to run it.

    The name of a stored tensor is the weight's name with one of `suffixes`, in place of "weight" or
    after it. A weight is complete with all suffixes of one of the `wholes`. `package` is pip's name
    of the package that transformers needs for the format, None if it needs none. `keeps` is True if
    weights stay quantized in memory. `composes` is True if a quantized weight consists of plain
    tensors, so that it runs on any device of PyTorch; other formats need kernels for real GPUs.
    """

    name: str
    suffixes: tuple[str, ...]
    wholes: tuple[tuple[str, ...], ...]
    package: str | None
    keeps: bool = True
    composes: bool = False


_NF4 = ("weight", "weight.absmax", "weight.quant_map", "weight.quant_state.bitsandbytes__nf4")
_FP4 = (*_NF4[:3], "weight.quant_state.bitsandbytes__fp4")
_NESTED = ("weight.nested_absmax", "weight.nested_quant_map")
_PACKED = ("qweight", "qzeros", "scales")

# How a weight "layers.0.mlp.up_proj.weight" is stored in some of the formats:
#
#   GPTQ            ….up_proj.qweight, .qzeros, .scales, perhaps .g_idx  (suffixes replace "weight")
#   bitsandbytes    ….up_proj.weight, .weight.absmax, .weight.quant_map, …  (suffixes follow it)
#   MXFP4           ….up_proj_blocks, ….up_proj_scales                     (suffixes with "_")
#
# So the weight that a stored tensor belongs to follows from the tensor's name alone. The quantized
# values may have the name of the weight itself, as for bitsandbytes.
METHODS: Mapping[str, Method] = {
    "gptq": Method(
        name="GPTQ", suffixes=(*_PACKED, "g_idx"), wholes=(_PACKED,), package="gptqmodel"
    ),
    "awq": Method(name="AWQ", suffixes=_PACKED, wholes=(_PACKED,), package="gptqmodel"),
    "compressed-tensors": Method(
        name="compressed-tensors",
        suffixes=("weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx",
                  *_SCALES, *_ACTIVATIONS),
        wholes=(("weight", "weight_scale"), ("weight_packed", "weight_scale")),
        package="compressed-tensors",
        keeps=False,
    ),
    "bitsandbytes": Method(
        name="bitsandbytes",
        suffixes=("SCB", "weight_format", *_NF4[1:], _FP4[-1], *_NESTED),
        wholes=(_NF4, _FP4, ("weight", "SCB")),
        package="bitsandbytes",
    ),
    "torchao": Method(
        name="torchao",
        suffixes=("_weight_qdata", "_weight_scale", "_weight_zero_point",
                  "_weight_scale_and_zero", "_weight_per_tensor_scale", "_weight_act_pre_scale"),
        wholes=(("_weight_qdata", "_weight_scale"), ("_weight_qdata", "_weight_scale_and_zero")),
        package="torchao",
        composes=True,
    ),
    "fp8": Method(
        name="FP8",
        suffixes=(*_SCALES, *_ACTIVATIONS),
        wholes=(("weight", "weight_scale_inv"), ("weight", "weight_scale")),
        package=None,
    ),
    "fbgemm_fp8": Method(
        name="FBGEMM FP8",
        suffixes=(*_SCALES, *_ACTIVATIONS),
        wholes=(("weight", "weight_scale"),),
        package="fbgemm-gpu",
    ),
    "mxfp4": Method(
        name="MXFP4",
        suffixes=("_blocks", "_scales"),
        wholes=(("_blocks", "_scales"),),
        package="kernels",
    ),
}  # fmt: skip
_WIDE = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A quantized checkpoint's tensors, grouped by weight.

    `weights` maps the unquantized name of each weight to its stored tensors; `plain` names the
    tensors that aren't quantized.
    """

    method: Method
    weights: dict[str, tuple[TensorInfo, ...]]
    plain: tuple[str, ...]


def method_of(config: Mapping[str, Any]) -> Method | None:
    """Return the quantization format that a config states; None if unquantized."""
    statement = stated(config)
    if statement is None:
        return None
    quant_method = statement.get("quant_method")
    # Older checkpoints of bitsandbytes have these keys instead of quant_method.
    if quant_method is None and {"load_in_4bit", "load_in_8bit"} & statement.keys():
        quant_method = "bitsandbytes"
    method = METHODS.get(str(quant_method))
    if method is None:
        raise ModelError(
            f"the checkpoint is quantized by {str(quant_method)[:60]!r}, which is not supported",
            hint=f"supported: {', '.join(METHODS)}; or use the 16-bit checkpoint",
        )
    return method


def stated(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the quantization settings of a config or one of its sections; None if unquantized."""
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        statement = part.get(_KEY)
        if isinstance(statement, dict):
            return statement
    return None


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config without its quantization settings."""
    return {
        key: without_quantization(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key != _KEY
    }


def sort_tensors(method: Method, tensors: Mapping[str, TensorInfo]) -> Stored:
    """Group a checkpoint's tensors by the weight that they belong to."""
    parts: dict[str, list[TensorInfo]] = {}
    unquantized: list[str] = []
    for name, tensor in tensors.items():
        weight = _weight_of(method, name)
        if weight is not None:
            parts.setdefault(weight, []).append(tensor)
        elif not _CACHE.search(name):
            unquantized.append(name)
    for name in parts.keys() & unquantized:
        # The tensor with the weight's own name holds the quantized values.
        parts[name].insert(0, tensors[name])
    return Stored(
        method=method,
        weights={name: tuple(tensors_of) for name, tensors_of in parts.items()},
        plain=tuple(name for name in unquantized if name not in parts),
    )


def missing_parts(stored: Stored) -> list[str]:
    """Return the names of tensors without which quantized weights are incomplete."""
    return [
        name
        for weight, tensors in stored.weights.items()
        for name in _missing(stored.method, weight, {tensor.name: tensor for tensor in tensors})
    ]


def is_needless(name: str) -> bool:
    """Return True for a tensor to ignore if the model has no parameter of its name.

    GPTQ's packers write a bias of zeros for layers without a bias; scales of an 8-bit KV cache are
    for other engines.
    """
    return name.endswith(".bias") or _CACHE.search(name) is not None


def is_wide(tensor: TensorInfo) -> bool:
    """Return True for a tensor of unquantized floating-point values, or of unknown dtype."""
    return tensor.dtype is None or tensor.dtype in _WIDE


def _missing(method: Method, weight: str, tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Return the names of the missing tensors of one weight."""
    if weight in tensors and is_wide(tensors[weight]):
        return []  # only activations are quantized
    # Any of several sets of parts completes a weight. The set with the largest share present is
    # assumed: `weight`, `absmax` and `quant_map` of bitsandbytes are 3 of NF4's 4 parts and 1 of
    # int8's 2, so the quant_state of NF4 is missing, not int8's SCB.
    wholes = [[_part_name(weight, suffix) for suffix in suffixes] for suffixes in method.wholes]
    likeliest = max(wholes, key=lambda names: len(tensors.keys() & names) / len(names))
    scales = tensors.get(_part_name(weight, "weight.absmax"))
    if scales is not None and not is_wide(scales):  # the scales are quantized themselves
        likeliest = [*likeliest, *(_part_name(weight, suffix) for suffix in _NESTED)]
    return [name for name in likeliest if name not in tensors]


def _part_name(weight: str, suffix: str) -> str:
    """Return the name of a part of a weight; the inverse of `_weight_of`."""
    if suffix.startswith("_") and not suffix.startswith("_weight"):
        return weight + suffix
    return weight.removesuffix("weight") + suffix


def _weight_of(method: Method, name: str) -> str | None:
    """Return the weight that a part belongs to by its name; None if the name has no suffix."""
    for suffix in method.suffixes:
        if suffix.startswith("_") and not suffix.startswith("_weight"):
            if name.endswith(suffix):
                return name.removesuffix(suffix)
        elif name.endswith(f".{suffix}"):
            return name.removesuffix(suffix) + "weight"
    return None
