"""Experts on the host: their weights stay in host memory, and the CPU multiplies by them.

For each layer, the GPU sends its tokens and their routing to the host, waits for the sum of the
experts' outputs, and goes on. Only activations travel, and the host reads the weights of the chosen
experts alone. Steps of many tokens fetch the experts instead (`fetched_experts`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from duoka.forecast.workload import ALL_EXPERTS
from duoka.virtual import VirtualTensor

from .composed import num_bytes
from .expert_cache import CachedExperts, add_cache, cached_bytes, load_experts, num_slots
from .fetched_experts import (
    can_fetch,
    fetch,
    fetch_backward,
    fetched_bytes,
    is_fetched,
    is_training,
)
from .routing import reserve, sent_to_host
from .stacked import ExpertStack, Unquantized

IMPLEMENTATION = "duoka"
"""The name of duoka's forward pass among transformers' implementations of experts."""
USUAL = "_duoka_usual_experts"
"""The attribute of a configuration with the implementation chosen by transformers."""
ON_HOST = "_duoka_on_host"
"""The attribute of a module of experts whose weights stay in host memory."""
_STACK_DIMENSIONS = 3

AddHostWork = Callable[[Callable[..., object], Sequence[Tensor]], None]
"""Takes a function for the host, and the tensors on the GPU that are its arguments."""
_ADD_HOST_WORK: ContextVar[AddHostWork | None] = ContextVar("add_host_work", default=None)


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


def keep_on_host(model: nn.Module, names: Sequence[str], cache_bytes: int = 0) -> None:
    """Let the experts of these modules of a model without data stay on the host.

    With a cache, GPUs fetch them, and keep some of each layer; see `expert_cache`.
    """
    for name in expert_modules(model) if tuple(names) == ALL_EXPERTS else names:
        module: Any = model.get_submodule(name)
        has_cache = cache_bytes > 0 and can_fetch(module)
        for key, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, ExpertStack):
                stack = parameter if has_cache else parameter.for_cpu()
            elif parameter.ndim == _STACK_DIMENSIONS:
                stack = ExpertStack.empty(
                    *(parameter, parameter.device, Unquantized), is_transposed=module.is_transposed
                )
            else:
                continue
            stack = stack.to_fetch() if has_cache else stack
            module.register_parameter(key, nn.Parameter(stack, requires_grad=False))
        setattr(module, ON_HOST, True)
        if has_cache:
            add_cache(module, cache_bytes)
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
    if hidden.device.type != "cpu" and is_training(hidden) and can_fetch(module):
        apply: Any = _Fetched.apply
        device_type = hidden.device.type
        if torch.is_autocast_enabled(device_type):
            hidden = hidden.to(torch.get_autocast_dtype(device_type))
        result: Tensor = apply(module, hidden, index, weights)
        return result
    if is_without_data(hidden):
        recorded: Tensor = _record(module, hidden, index, weights)
        return recorded
    if hidden.device.type != "cpu" and is_fetched(module, index):
        return fetch(module, hidden, index, weights)
    if hidden.device.type != "cpu" and num_slots(module):
        reserve(hidden.device, cached_bytes(module, hidden, index))
        slots = torch.empty_like(index, memory_format=torch.contiguous_format)
        _do_on_host(partial(load_experts, module), [slots, index.contiguous()])
        return compute(CachedExperts(module), hidden, slots, weights)
    if not hidden.is_cuda:
        result = compute(module, hidden.cpu(), index.cpu(), weights.cpu())
        return result.to(hidden.device)
    outputs = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    tensors = [outputs, *(tensor.contiguous() for tensor in (hidden, index, weights))]
    _do_on_host(partial(_compute_into, compute, module), tensors)
    return outputs


def _do_on_host(work: Callable[..., object], tensors: Sequence[Tensor]) -> None:
    """Call a function of tensors on the GPU, or let replays of a CUDA graph call it."""
    add_host_work = _ADD_HOST_WORK.get()
    if add_host_work is None:
        work(*tensors)
    else:
        add_host_work(work, tensors)


def is_without_data(tensor: Tensor) -> bool:
    """Return True for a tensor of a virtual GPU without data, which only records the work."""
    return isinstance(tensor, VirtualTensor) and tensor.gpu.meta


def _record(
    module: Any, hidden: Tensor, index: Tensor, *tensors: Tensor, is_backward: bool = False
) -> Any:
    """Record the work of experts on the host; return results without values."""
    stacks = [part for part in module.parameters(recurse=False) if part.ndim > 1]
    flops = 2 * sum(part.numel() for part in stacks) // module.num_experts
    size = sum(map(num_bytes, stacks))
    fetched = fetched_bytes(module, hidden, index, is_backward=is_backward)
    cache = num_slots(module), cached_bytes(module, hidden, index)
    operators = torch.ops.duoka
    operator = operators.host_experts_backward if is_backward else operators.host_experts
    return operator(hidden, index, *tensors, *cache, size, module.num_experts, flops, fetched)


class _Fetched(torch.autograd.Function):
    """Frozen experts fetched from the host, with gradients for the tokens and their weights."""

    @staticmethod
    def forward(ctx: Any, module: Any, *tensors: Tensor) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(*tensors)
        if is_without_data(tensors[0]):
            recorded: Tensor = _record(module, *tensors)
            return recorded
        with torch.autocast(tensors[0].device.type, enabled=False):
            return fetch(module, *tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        hidden, index, weights = ctx.saved_tensors
        if is_without_data(hidden):
            sums, scores = _record(ctx.module, hidden, index, weights, *gradients, is_backward=True)
        else:
            sums, scores = fetch_backward(ctx.module, gradients[0], hidden, index, weights)
        return None, sums, None, scores


def _compute_into(
    compute: Callable[..., Tensor], module: Any, outputs: Tensor, *tensors: Tensor
) -> None:
    """Send tensors to the host, compute there, and send the result to `outputs`."""
    outputs.copy_(compute(module, *sent_to_host(tensors)).pin_memory(), non_blocking=True)


@contextmanager
def host_work_by(add_host_work: AddHostWork) -> Iterator[None]:
    """Within the scope, layers pass the host's part of their work to a function.

    Used while a CUDA graph is recorded, in which the host can't compute.
    """
    token = _ADD_HOST_WORK.set(add_host_work)
    try:
        yield
    finally:
        _ADD_HOST_WORK.reset(token)
