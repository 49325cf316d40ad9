"""Experts on the host: their weights stay in host memory, and the CPU multiplies by them.

For each layer, the GPU sends its tokens and their routing to the host, waits for the sum of the
experts' outputs, and goes on. Only activations travel, and the host reads the weights of the chosen
experts alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from duoka.forecast.workload import ALL_EXPERTS
from duoka.virtual import VirtualTensor

from .composed import num_bytes
from .stacked import ExpertStack, Unquantized

IMPLEMENTATION = "duoka"
"""The name of duoka's forward pass among transformers' implementations of experts."""
USUAL = "_duoka_usual_experts"
"""The attribute of a configuration with the implementation chosen by transformers."""
ON_HOST = "_duoka_on_host"
"""The attribute of a module of experts whose weights stay in host memory."""
_STACK_DIMENSIONS = 3


def has_interface(module: nn.Module) -> bool:
    """Return True if a module is one of transformers' experts, whose forward can be replaced."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate")


def expert_modules(model: nn.Module) -> list[str]:
    """Return the names of a model's modules of experts that can stay on the host."""
    return [name for name, module in model.named_modules() if has_interface(module)]


def use_implementation(module: Any) -> None:
    """Let the layers of a module's configuration compute their experts by duoka's forward pass."""
    config = module.config
    if config._experts_implementation != IMPLEMENTATION:
        setattr(config, USUAL, config._experts_implementation)
        config._experts_implementation = IMPLEMENTATION


def keep_on_host(model: nn.Module, names: Sequence[str]) -> None:
    """Let the experts of these modules of a model without data stay on the host."""
    for name in expert_modules(model) if tuple(names) == ALL_EXPERTS else names:
        module: Any = model.get_submodule(name)
        for key, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, ExpertStack):
                stack = parameter.for_cpu()
            elif parameter.ndim == _STACK_DIMENSIONS:
                stack = ExpertStack.empty(
                    *(parameter, parameter.device, Unquantized), is_transposed=module.is_transposed
                )
            else:
                continue
            module.register_parameter(key, nn.Parameter(stack, requires_grad=False))
        setattr(module, ON_HOST, True)
        use_implementation(module)


def on_host(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of experts that stay on the host, with their names."""
    for name, module in model.named_modules():
        if getattr(module, ON_HOST, False):
            yield name, module


def computing_devices(model: nn.Module) -> set[torch.device]:
    """Return the devices of a model's parameters, without experts on the host."""
    hosted = {id(part) for _, module in on_host(model) for part in module.parameters()}
    return {part.device for part in model.parameters() if id(part) not in hosted}


def compute_on_host(
    compute: Callable[..., Tensor], module: Any, hidden: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """Compute a layer's experts on the host; the result is on the device of `hidden`.

    On a virtual GPU without data only the work is recorded.
    """
    if isinstance(hidden, VirtualTensor) and hidden.gpu.meta:
        stacks = [part for part in module.parameters(recurse=False) if part.ndim > 1]
        flops = 2 * sum(part.numel() for part in stacks) // module.num_experts
        size = sum(map(num_bytes, stacks))
        outputs: Tensor = torch.ops.duoka.host_experts(
            hidden, index, weights, size, module.num_experts, flops
        )
        return outputs
    if not hidden.is_cuda:
        result = compute(module, hidden.cpu(), index.cpu(), weights.cpu())
        return result.to(hidden.device)
    # Pinned memory lets all three copies go before the only wait.
    sent = [
        torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
        for tensor in (hidden, index, weights)
    ]
    torch.cuda.current_stream(hidden.device).synchronize()
    result = compute(module, *sent)
    return result.pin_memory().to(hidden.device, non_blocking=True)
