"""Choosing the weights of a model to quantize, with the reasons for which others stay.

The weights of linear layers are quantized. Exceptions are modules that transformers' own quantizers
leave out (the head, and tied modules); routers, where small errors select other experts; weights
that the architecture keeps in 32 bit; and shapes that the kernels don't take. Stacks of experts are
no linear layers: no kernel for several experts at once takes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer

from .composed import empty_on, is_composed, num_bytes
from .weights import BLOCK, GROUPS, ROWS, Scheme, computes_in, let_compute_in, quantize, require

_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
_LEAST_STACK = 3  # dimensions of a stack of experts


def quantize_model(model: PreTrainedModel, scheme: Scheme) -> None:
    """Quantize the linear layers of a model without weights."""
    require(scheme)
    excluded = frozenset(HfQuantizer.get_modules_to_not_convert(model))
    # Without data, weights of one shape become equal: quantizing a single one is enough.
    templates: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}
    for name, module, key in _matrices(model):
        parameter = module.get_parameter(key)
        if _reason(model, scheme, name, excluded) is not None:
            continue
        shape = parameter.shape, parameter.dtype
        if parameter.is_meta and shape in templates:
            tensor = empty_on(templates[shape], parameter.device)
        else:
            tensor = quantize(parameter.detach(), scheme)
        templates.setdefault(shape, tensor)
        weight = nn.Parameter(tensor, requires_grad=False)
        # The layout for tensor cores is always bfloat16; the processor's has the model's type.
        let_compute_in(weight, parameter.dtype)
        module.register_parameter(key, weight)


def notes(model: PreTrainedModel, scheme: Scheme) -> tuple[str, ...]:
    """Return notes for people on a quantized model."""
    excluded = frozenset(HfQuantizer.get_modules_to_not_convert(model))
    original_bytes = quantized_bytes = count = 0
    reasons: Counter[str] = Counter()
    for name, module, key in _matrices(model):
        parameter = module.get_parameter(key)
        if is_composed(parameter):
            count += 1
            original_bytes += parameter.numel() * computes_in(parameter).itemsize
            quantized_bytes += num_bytes(parameter)
        else:
            reasons[_reason(model, scheme, name, excluded) or "others"] += 1
    unquantized = "; ".join(f"{reason} ({number})" for reason, number in reasons.items())
    if not count:
        return (f"No weight is quantized to {scheme}: {unquantized}.",)
    return (
        f"{count} weights of linear layers are quantized to {scheme} during loading: to "
        f"{quantized_bytes / original_bytes:.0%} of their size, including scales and padding.",
        *([f"Not quantized: {unquantized}."] if unquantized else []),
        f"`duoka bench --quality FILE MODEL --quantize {scheme}` measures the effect on your text.",
    )


def _matrices(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield parameters of two dimensions or more: their name, module, and name in the module."""
    for prefix, module in model.named_modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            if parameter.ndim > 1:
                yield f"{prefix}.{key}" if prefix else key, module, key


def _reason(
    model: PreTrainedModel, scheme: Scheme, name: str, excluded: Collection[str]
) -> str | None:
    """Return the reason against quantizing a parameter, or None."""
    owner = name.rpartition(".")[0]
    module, parameter = model.get_submodule(owner), model.get_parameter(name)
    if not isinstance(module, nn.Linear):
        if parameter.ndim >= _LEAST_STACK and "expert" in name:
            return "stacked experts"
        return "embeddings" if isinstance(module, nn.Embedding) else "other layers"
    if owner in excluded:
        return "the head and tied weights"
    if not _ROUTERS.isdisjoint(owner.split(".")[-2:]):  # or a layer of one
        return "routers"
    if parameter.dtype != model.dtype and parameter.dtype == torch.float32:
        return "weights that the architecture keeps in float32"
    rows, columns = parameter.shape
    if scheme == "int4" and (rows % ROWS or columns % GROUPS[-1]):
        return f"shapes unsupported by int4 (rows in {ROWS}s, columns in {GROUPS[-1]}s)"
    if scheme == "nf4" and columns % BLOCK:
        return f"shapes unsupported by nf4 (columns in {BLOCK}s)"
    return None
