"""Checkpoints that were published quantized: which tensors make up which weight, and whose format.

The names are those that the formats document: of AutoGPTQ and GPTQModel, AutoAWQ,
compressed-tensors, bitsandbytes, torchao's safetensors, the block-scaled FP8 of DeepSeek and Qwen,
FBGEMM's FP8, and OpenAI's MXFP4. Nothing here knows torch, or how numbers are unpacked.
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
    """How checkpoints of one format name what makes up a weight, and who runs them.

    `suffixes` take the place of "weight" at the end of a weight's name, or follow it; a weight
    can't be without all of one of the `wholes`. `package` is what transformers needs to run it, as
    pip names it; None if transformers alone does, and `keeps` says whether it keeps the weights as
    they are stored then. If it `composes`, its weights are made of plain tensors and run where
    PyTorch does; the others bring kernels for real devices.
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
    """A quantized checkpoint's tensors, sorted by the weights that they make up.

    `weights` has for each quantized weight, under the name that it would have unquantized, what is
    stored; `plain` names the tensors that aren't quantized.
    """

    method: Method
    weights: dict[str, tuple[TensorInfo, ...]]
    plain: tuple[str, ...]


def method_of(config: Mapping[str, Any]) -> Method | None:
    """How a checkpoint was quantized, by its config; None if it wasn't."""
    statement = stated(config)
    if statement is None:
        return None
    named = statement.get("quant_method")
    if named is None:
        # Older ones of bitsandbytes don't say; they have these.
        named = "bitsandbytes" if {"load_in_4bit", "load_in_8bit"} & statement.keys() else None
    method = METHODS.get(str(named))
    if method is None:
        raise ModelError(
            f"the checkpoint is quantized by {str(named)[:60]!r}, a way that duoka doesn't know",
            hint=f"known are {', '.join(METHODS)}; or use the 16-bit weights",
        )
    return method


def stated(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a config, or a part of it, says about quantization; None if it says nothing."""
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        statement = part.get(_KEY)
        if isinstance(statement, dict):
            return statement
    return None


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the same model, not quantized."""
    return {
        key: without_quantization(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key != _KEY
    }


def sort_tensors(method: Method, tensors: Mapping[str, TensorInfo]) -> Stored:
    """Sort a checkpoint's tensors by the weights that they make up."""
    parts: dict[str, list[TensorInfo]] = {}
    unquantized: list[str] = []
    for name, tensor in tensors.items():
        weight = _weight_of(method, name)
        if weight is not None:
            parts.setdefault(weight, []).append(tensor)
        elif not _CACHE.search(name):
            unquantized.append(name)
    plain = []
    for name in unquantized:
        if name in parts:
            # Numbers under the weight's own name, with their scales beside them.
            parts[name].insert(0, tensors[name])
        else:
            plain.append(name)
    return Stored(
        method=method,
        weights={name: tuple(tensors_of) for name, tensors_of in parts.items()},
        plain=tuple(plain),
    )


def missing_parts(stored: Stored) -> list[str]:
    """The names of what weights can't be without, and the checkpoint doesn't have."""
    return [
        name
        for weight, tensors in stored.weights.items()
        for name in _missing(stored.method, weight, {tensor.name: tensor for tensor in tensors})
    ]


def is_needless(name: str) -> bool:
    """Whether a tensor that has no place in the model is of a kind that nothing needs.

    GPTQ's packers write a bias of zeros where a layer has none; scales of a cache in 8 bit are for
    engines that have one.
    """
    return name.endswith(".bias") or _CACHE.search(name) is not None


def is_wide(tensor: TensorInfo) -> bool:
    """Whether a tensor holds numbers that mean what they say; an unknown type is taken to."""
    return tensor.dtype is None or tensor.dtype in _WIDE


def _missing(method: Method, weight: str, tensors: Mapping[str, TensorInfo]) -> list[str]:
    if weight in tensors and is_wide(tensors[weight]):
        return []  # only what is multiplied with it is quantized
    wholes = [[_named(weight, suffix) for suffix in whole] for whole in method.wholes]
    likeliest = max(wholes, key=lambda whole: len(tensors.keys() & whole) / len(whole))
    scales = tensors.get(_named(weight, "weight.absmax"))
    if scales is not None and not is_wide(scales):  # quantized themselves
        likeliest = [*likeliest, *(_named(weight, suffix) for suffix in _NESTED)]
    return [name for name in likeliest if name not in tensors]


def _named(weight: str, suffix: str) -> str:
    """The name of a part of a weight; the reverse of `_weight_of`."""
    if suffix.startswith("_") and not suffix.startswith("_weight"):
        return weight + suffix
    return weight.removesuffix("weight") + suffix


def _weight_of(method: Method, name: str) -> str | None:
    """The weight that a tensor is a part of, by its name alone; None if it may be one itself."""
    for suffix in method.suffixes:
        if suffix.startswith("_") and not suffix.startswith("_weight"):
            if name.endswith(suffix):
                return name.removesuffix(suffix)
        elif name.endswith(f".{suffix}"):
            return name.removesuffix(suffix) + "weight"
    return None
