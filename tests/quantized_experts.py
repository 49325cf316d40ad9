"""Quantized stacks of experts turned back, to hold quantized models against plain ones."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from duoka.models.quantization import ExpertStack, Scheme, has_interface
from duoka.models.quantization.experts import IMPLEMENTATION
from duoka.models.quantization.stacked import quantize_stack

_STACK_DIMENSIONS = 3
_MARK = "@use_experts_implementation"
_SIZE = dict.fromkeys(("hidden_size", "moe_hidden_size", "moe_intermediate_size"), 64)
_COUNT = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8)
_CONFIG = {
    **_SIZE, **_COUNT, "moe_num_experts": 8, "intermediate_size": 64,
    "hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh", "mlp_hidden_act": "relu2",
    "swiglu_limit": 1.0, "swiglu_alpha": 1.7, "mlp_gate_softcap": 4.0, "mlp_up_softcap": 4.0,
    "post_norm_eps": 1e-6, "moe_latent_size": None, "_experts_implementation": "eager",
}  # fmt: skip


def dequantize(stack: ExpertStack) -> Tensor:
    """Return the weights of all experts on the CPU, in the shape of the stack."""
    rows, columns = stack.sizes
    weights = torch.empty(len(stack), rows, columns, dtype=stack.dtype)
    for number in range(len(stack)):
        expert: Any = stack.expert(number)
        if hasattr(expert, "unpacked"):
            weights[number] = expert.unpacked(stack.dtype).cpu()
        else:
            unit = torch.eye(columns, dtype=stack.dtype, device=stack.device)
            weights[number] = F.linear(unit, expert).t().cpu()
    return weights.mT.contiguous() if stack.is_transposed else weights


def quantize_experts(model: nn.Module, scheme: Scheme) -> None:
    """Quantize the experts of a model in place, on their device."""
    for module in cast(Iterable[Any], model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.ndim == _STACK_DIMENSIONS and has_interface(module):
                stack = quantize_stack(
                    parameter.detach(), scheme, is_transposed=module.is_transposed
                )
                module.register_parameter(name, nn.Parameter(stack, requires_grad=False))
                module.config._experts_implementation = IMPLEMENTATION


def with_dequantized_experts(model: Any) -> Any:
    """Copy a model, with plain stacks and transformers' own eager forward pass."""
    plain = copy.deepcopy(model)
    for module in plain.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, ExpertStack):
                weights = dequantize(parameter).to(parameter.device)
                module.register_parameter(name, nn.Parameter(weights, requires_grad=False))
                module.config._experts_implementation = "eager"
    return plain


def distance(result: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference relative to the norm of the expected tensor."""
    expected = expected.cpu().float()
    return float((result.cpu().float() - expected).norm() / expected.norm())


def modules_with_experts() -> Iterator[tuple[str, str]]:
    """Yield the name of each model of transformers with experts, and the name of its module."""
    root = Path(transformers.__file__).parent / "models"
    for path in sorted(root.rglob("modeling_*.py")):
        if _MARK in path.read_text(encoding="utf-8"):
            yield path.parent.name, f"transformers.models.{path.parent.name}.{path.stem}"


def expert_classes(module_name: str) -> list[type[nn.Module]]:
    """Return the classes of experts in a module of transformers."""
    module = importlib.import_module(module_name)
    classes = (cls for _, cls in inspect.getmembers(module, inspect.isclass))
    return [cls for cls in classes if cls.__module__ == module_name and hasattr(cls, "_apply_gate")]


def build_experts(experts_class: Any, dtype: torch.dtype) -> Any:
    """Build eight experts of 64 x 64 with random weights."""
    torch.manual_seed(0)
    experts = experts_class(SimpleNamespace(**_CONFIG)).to(dtype)
    assert has_interface(experts)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.2)
    return experts
