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

from .errors import ModelError
from .headers import TensorInfo

_KEY = "quantization_config"
_SCALES = ("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale")
_ACTIVATIONS = ("input_scale", "input_zero_point", "input_global_scale", "activation_scale",
                "output_scale", "input_scale_ub")  # fmt: skip
_CACHE = re.compile(r"\.(?:[kqv]|prob_output|(?:key|value)_cache)_(?:scale|zero_point)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How checkpoints of one format name what makes up a weight, and who runs them.

    Parameters
    ----------
    name : str
        As people call it.
    suffixes : tuple of str
        What takes the place of "weight" at the end of a weight's name, or follows it.
    package : str or None
        What transformers needs to run it, as pip names it; None if transformers alone does.
    keeps : bool
        Whether transformers keeps the weights as they are stored, while it runs them.
    """

    name: str
    suffixes: tuple[str, ...]
    package: str | None
    keeps: bool = True


METHODS: Mapping[str, Method] = {
    "gptq": Method(
        name="GPTQ", suffixes=("qweight", "qzeros", "scales", "g_idx"), package="gptqmodel"
    ),
    "awq": Method(name="AWQ", suffixes=("qweight", "qzeros", "scales"), package="gptqmodel"),
    "compressed-tensors": Method(
        name="compressed-tensors",
        suffixes=("weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx",
                  *_SCALES, *_ACTIVATIONS),
        package="compressed-tensors",
        keeps=False,
    ),
    "bitsandbytes": Method(
        name="bitsandbytes",
        suffixes=("SCB", "weight_format", "weight.absmax", "weight.quant_map",
                  "weight.nested_absmax", "weight.nested_quant_map",
                  "weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4"),
        package="bitsandbytes",
    ),
    "torchao": Method(
        name="torchao",
        suffixes=("_weight_qdata", "_weight_scale", "_weight_zero_point",
                  "_weight_scale_and_zero", "_weight_per_tensor_scale", "_weight_act_pre_scale"),
        package="torchao",
    ),
    "fp8": Method(name="FP8", suffixes=(*_SCALES, *_ACTIVATIONS), package=None),
    "fbgemm_fp8": Method(
        name="FBGEMM FP8", suffixes=(*_SCALES, *_ACTIVATIONS), package="fbgemm-gpu"
    ),
    "mxfp4": Method(name="MXFP4", suffixes=("_blocks", "_scales"), package="kernels"),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A quantized checkpoint's tensors, sorted by the weights that they make up.

    Parameters
    ----------
    method : Method
    weights : dict of str to tuple of TensorInfo
        For each quantized weight, under the name that it would have unquantized, what is stored.
    plain : tuple of str
        The names of tensors that aren't quantized.
    """

    method: Method
    weights: dict[str, tuple[TensorInfo, ...]]
    plain: tuple[str, ...]


def method_of(config: Mapping[str, Any]) -> Method | None:
    """How a checkpoint was quantized, by its config; None if it wasn't.

    Raises
    ------
    ModelError
        If it was in a way that duoka doesn't know.
    """
    found = _stated(config)
    if found is None:
        return None
    stated = found.get("quant_method")
    if stated is None:
        # Older ones of bitsandbytes don't say; they have these.
        stated = "bitsandbytes" if {"load_in_4bit", "load_in_8bit"} & found.keys() else None
    method = METHODS.get(str(stated))
    if method is None:
        raise ModelError(
            f"the checkpoint is quantized by {str(stated)[:60]!r}, a way that duoka doesn't know",
            hint=f"known are {', '.join(METHODS)}; or use the 16-bit weights",
        )
    return method


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the same model, not quantized."""
    return {
        key: without_quantization(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key != _KEY
    }


def sort_tensors(method: Method, tensors: Mapping[str, TensorInfo]) -> Stored:
    """Sort a checkpoint's tensors by the weights that they make up.

    Parameters
    ----------
    method : Method
    tensors : mapping of str to TensorInfo
        From the headers.
    """
    parts: dict[str, list[TensorInfo]] = {}
    others: list[str] = []
    for name, tensor in tensors.items():
        weight = _weight_of(method, name)
        if weight is not None:
            parts.setdefault(weight, []).append(tensor)
        elif not _CACHE.search(name):
            others.append(name)
    plain = []
    for name in others:
        if name in parts:
            # Numbers under the weight's own name, with their scales beside them.
            parts[name].insert(0, tensors[name])
        else:
            plain.append(name)
    return Stored(
        method=method,
        weights={name: tuple(held) for name, held in parts.items()},
        plain=tuple(plain),
    )


def _stated(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a config, or the language model's part of it, says about quantization."""
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        found = part.get(_KEY)
        if isinstance(found, dict):
            return found
    return None


def _weight_of(method: Method, name: str) -> str | None:
    """The weight that a tensor is a part of, by its name alone; None if it may be one itself."""
    for suffix in method.suffixes:
        if suffix.startswith("_") and not suffix.startswith("_weight"):
            if name.endswith(suffix):
                return name.removesuffix(suffix)
        elif name.endswith(f".{suffix}"):
            return name.removesuffix(suffix) + "weight"
    return None
