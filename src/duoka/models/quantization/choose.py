"""Choose the weights of a model to quantize, with the reasons for exceptions.

The weights of linear layers are quantized. Exceptions are modules that transformers' own quantizers
skip (the head, and tied modules); routers, where small errors select other experts; weights that
the architecture keeps in float32; and shapes that the kernels don't support. Stacked experts are
quantized where their forward pass can be replaced, as in all classes that use transformers' own
interface for experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer

from .composed import empty_on, is_composed, num_bytes
from .host_experts import has_interface, use_implementation
from .stacked import quantize_stack, refused_shape
from .weights import BLOCK, GROUPS, ROWS, Scheme, computes_in, let_compute_in, quantize, require

_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
_STACK_DIMENSIONS = 3


def quantize_model(model: PreTrainedModel, scheme: Scheme, *, trains: bool = False) -> None:
    """Quantize the linear layers and the experts of a model in place, usually on the meta device.

    With `trains` the layouts have a gradient for their inputs.
    """
    require(scheme)
    excluded = frozenset(HfQuantizer.get_modules_to_not_convert(model))
    # On the meta device all weights of one shape and dtype give the same result: quantize one.
    templates: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}
    for name, module, key in _matrices(model):
        parameter = module.get_parameter(key)
        if _reason(model, scheme, name, excluded) is not None:
            continue
        owner: Any = module
        if _is_stack(owner, parameter):
            stack = quantize_stack(
                parameter.detach(), scheme, trains=trains, is_transposed=owner.is_transposed
            )
            module.register_parameter(key, nn.Parameter(stack, requires_grad=False))
            use_implementation(owner)
            continue
        shape = parameter.shape, parameter.dtype
        if parameter.is_meta and shape in templates:
            tensor = empty_on(templates[shape], parameter.device)
        else:
            tensor = quantize(parameter.detach(), scheme)
        templates.setdefault(shape, tensor)
        weight = nn.Parameter(tensor, requires_grad=False)
        # Record the original dtype: int4's layout for tensor cores is always bfloat16.
        let_compute_in(weight, parameter.dtype)
        module.register_parameter(key, weight)


def notes(model: PreTrainedModel, scheme: Scheme) -> tuple[str, ...]:
    """Return notes for the user about the quantized weights of a model, and the others."""
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
        f"{count} weights are quantized to {scheme} during loading: to "
        f"{quantized_bytes / original_bytes:.0%} of their size, including scales and padding.",
        *([f"Not quantized: {unquantized}."] if unquantized else []),
        f"`duoka bench --quality FILE MODEL --quantize {scheme}` measures the effect on your text.",
    )


def _matrices(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield parameters of two or more dimensions: the name, the module, and the name there."""
    for prefix, module in model.named_modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            if parameter.ndim > 1:
                yield f"{prefix}.{key}" if prefix else key, module, key


def _is_stack(module: Any, parameter: torch.Tensor) -> bool:
    """Return True for the stacked weights of experts whose forward pass can be replaced."""
    return parameter.ndim == _STACK_DIMENSIONS and has_interface(module)


def _reason(
    model: PreTrainedModel, scheme: Scheme, name: str, excluded: Collection[str]
) -> str | None:
    """Return the reason not to quantize a parameter; None for a parameter to quantize."""
    owner = name.rpartition(".")[0]
    module, parameter = model.get_submodule(owner), model.get_parameter(name)
    if _is_stack(module, parameter):
        # The forward pass takes quantized stacks only, so one refused stack refuses all.
        stacks = [stack for stack in module.parameters(recurse=False) if _is_stack(module, stack)]
        shapes = [s.shape[:0:-1] if module.is_transposed else s.shape[1:] for s in stacks]
        return next(filter(None, (refused_shape(scheme, *shape) for shape in shapes)), None)
    if type(module).forward is not nn.Linear.forward:
        if parameter.ndim >= _STACK_DIMENSIONS and "expert" in name:
            return "stacked experts with a forward pass of their own"
        return "embeddings" if isinstance(module, nn.Embedding) else "other layers"
    if owner in excluded:
        return "the head and tied weights"
    if not _ROUTERS.isdisjoint(owner.split(".")[-2:]):  # or a layer of a router
        return "routers"
    if hasattr(model.get_submodule(owner.rpartition(".")[0]), "expand_kv") and (
        owner.endswith(".kv_b_proj")
    ):
        return "expansions of latents"
    if parameter.dtype != model.dtype and parameter.dtype == torch.float32:
        return "weights that the architecture keeps in float32"
    rows, columns = parameter.shape
    if scheme == "int4" and (rows % ROWS or columns % GROUPS[-1]):
        return f"shapes unsupported by int4 (rows in {ROWS}s, columns in {GROUPS[-1]}s)"
    if scheme == "nf4" and columns % BLOCK:
        return f"shapes unsupported by nf4 (columns in {BLOCK}s)"
    return None
