"""Experts fetched from host memory: in a step of many tokens, the GPU computes them.

From as many pairs of token and expert as there are experts on, a step needs nearly all experts, and
arithmetic limits the CPU. So each expert in use is copied to the GPU once, unpacked there, and
multiplied by its tokens in tiles; meanwhile the next expert is copied. Memory on the GPU is that of
two packed experts, one unpacked, and a tile. It doesn't depend on the routing. In training every
step fetches, forward and backward; the experts are frozen, and what happens in them isn't saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .composed import is_composed
from .expert_cache import num_slots
from .routing import by_expert, reserve, routing_bytes
from .stacked import ExpertStack, Unquantized

_TILE_ROWS = 128
"""The most tokens in a product; bounds the memory of a product."""
_GATE_TENSORS = 3
"""Temporary tensors of a gate and its activation."""


def is_fetched(module: Any, index: Tensor) -> bool:
    """Return True if a step with this routing streams its experts to the GPU; see `fetch`."""
    return can_fetch(module) and index.numel() > (num_slots(module) or module.num_experts)


def is_training(hidden: Tensor) -> bool:
    """Return True if the step has a backward pass."""
    return torch.is_grad_enabled() and hidden.requires_grad


def can_fetch(module: Any) -> bool:
    """Return True if the GPU can compute a module of experts that are on the host."""
    return not module.has_post_expert_norm  # whose weights are on the host, too


def fetch(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts, [tokens, hidden]; see `experts.compute`."""
    reserve(hidden.device, fetched_bytes(module, hidden, index))
    sums = torch.zeros_like(hidden, dtype=torch.float32)
    for tile, matrices in _tiles(module, hidden, index):
        tokens = tile // index.shape[1]
        scores = weights.reshape(-1, 1).index_select(0, tile)
        states = _compute_expert(module, hidden.index_select(0, tokens), matrices)
        sums.index_add_(0, tokens, (states * scores).float())
    return sums.to(hidden.dtype)


def fetch_backward(
    module: Any, gradient: Tensor, hidden: Tensor, index: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `hidden` and `weights` for a gradient of the result of `fetch`."""
    reserve(hidden.device, fetched_bytes(module, hidden, index, is_backward=True))
    sums = torch.zeros_like(hidden, dtype=torch.float32)
    of_weights = torch.empty_like(weights).view(-1, 1)
    for tile, matrices in _tiles(module, hidden, index):
        tokens = tile // index.shape[1]
        inputs = hidden.index_select(0, tokens).requires_grad_()
        scores = weights.reshape(-1, 1).index_select(0, tile).requires_grad_()
        with torch.enable_grad():
            outputs = _compute_expert(module, inputs, matrices) * scores
        received = gradient.index_select(0, tokens).to(outputs.dtype)
        of_inputs, of_scores = torch.autograd.grad(outputs, (inputs, scores), received)
        sums.index_add_(0, tokens, of_inputs.float())
        of_weights.index_copy_(0, tile, of_scores)
    return sums.to(hidden.dtype), of_weights.view_as(weights)


def _tiles(
    module: Any, hidden: Tensor, index: Tensor
) -> Iterator[tuple[Tensor, list[tuple[Tensor, Tensor | None]]]]:
    """Yield the pairs of each tile, and weight and bias of both projections of its expert."""
    experts = by_expert(index, module.num_experts)
    sources = [_tensors_of(module, number) for number, _ in experts]
    for (_, pairs), tensors in zip(experts, _copied(sources, hidden.device), strict=True):
        matrices = _unpacked(module, tensors, hidden.dtype)
        for tile in pairs.split(_TILE_ROWS):
            yield tile, matrices


def _projections(module: Any) -> list[tuple[ExpertStack, Tensor | None]]:
    """Return the stacks of a module, the first projection first, with their biases."""
    names = "gate_up_proj" if module.has_gate else "up_proj", "down_proj"
    return [
        (getattr(module, name), getattr(module, f"{name}_bias") if module.has_bias else None)
        for name in names
    ]


def _tensors_of(module: Any, number: int) -> list[Tensor]:
    """Return the tensors of an expert; views."""
    tensors: list[Tensor] = []
    for stack, bias in _projections(module):
        tensors += [tensor[number] for tensor in stack.tensors.values()]
        tensors += [] if bias is None else [bias[number]]
    return tensors


def _unpacked(
    module: Any, tensors: Sequence[Tensor], dtype: torch.dtype
) -> list[tuple[Tensor, Tensor | None]]:
    """Return weight and bias of an expert's projections, in a dtype."""
    parts, matrices = iter(tensors), []
    for stack, bias in _projections(module):
        packed = {name: next(parts) for name in stack.tensors}
        weight = stack.weight_class(packed, torch.Size(stack.sizes), stack.dtype)
        if not _is_tiled(stack):
            weight = weight.unpacked(dtype)
        matrices.append((weight, None if bias is None else next(parts).to(dtype)))
    return matrices


def _compute_expert(
    module: Any, inputs: Tensor, matrices: Sequence[tuple[Tensor, Tensor | None]]
) -> Tensor:
    """Return an expert's outputs of its tokens, [tokens, hidden]."""
    first, last = matrices
    states = _multiply(inputs, *first)
    states = module._apply_gate(states) if module.has_gate else module.act_fn(states)
    return _multiply(states, *last)


def _is_tiled(stack: ExpertStack) -> bool:
    """Return True if a kernel multiplies by an expert's packed weight."""
    return hasattr(stack.weight_class, "multiply_packed")


def _multiply(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return inputs times a weight, which may be composed, plus its bias."""
    if not is_composed(weight):
        return F.linear(inputs, weight, bias)
    outputs = F.linear(inputs, weight)
    return outputs if bias is None else outputs + bias


def _copied(sources: Sequence[Sequence[Tensor]], device: torch.device) -> Iterator[list[Tensor]]:
    """Yield each expert's tensors on a device, where they hold until the next is taken."""
    if device.type != "cuda" or not sources:
        yield from ([tensor.to(device) for tensor in tensors] for tensors in sources)
        return
    computing, copying = torch.cuda.current_stream(device), _copy_stream(device)
    slots = [[torch.empty_like(part, device=device) for part in sources[0]] for _ in range(2)]

    def copy(place: int) -> torch.cuda.Event:
        copying.wait_stream(computing)  # for the products that read this slot
        with torch.cuda.stream(copying):
            for part, source in zip(slots[place % 2], sources[place], strict=True):
                part.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(copying)
        return event

    copied = copy(0)
    for place in range(len(sources)):
        computing.wait_event(copied)
        if place + 1 < len(sources):
            copied = copy(place + 1)  # only waits for the products of the expert before
        yield slots[place % 2]


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which a device gets experts."""
    return torch.cuda.Stream(device)


def fetched_bytes(
    module: Any, hidden: Tensor, index: Tensor, *, is_backward: bool = False
) -> list[int]:
    """Return the sizes of the tensors that `fetch` or `fetch_backward` makes, at most."""
    if not can_fetch(module):
        return []
    size, columns = hidden.element_size(), hidden.shape[1]
    (first, _), (last, _) = _projections(module)
    copies = [tensor.nbytes for tensor in _tensors_of(module, 0)]
    unpacked = [
        num_bytes * prod(stack.sizes)
        for stack in (first, last)
        for num_bytes in (size, getattr(stack.weight_class, "scratch_bytes", 0))
        if stack.weight_class is not Unquantized and not _is_tiled(stack)
    ]
    for stack in (first, last):
        if _is_tiled(stack):
            states = torch.empty(_TILE_ROWS, stack.sizes[1], dtype=hidden.dtype, device="meta")
            unpacked += stack.weight_class.input_bytes(_TILE_ROWS, states)
            unpacked += [_TILE_ROWS * stack.sizes[0] * (2 + size)]  # a cast, and with the bias
    widths = [columns, first.sizes[0], *[last.sizes[1]] * _GATE_TENSORS, columns]
    tile = [_TILE_ROWS * size * width for width in widths] * (3 if is_backward else 1)
    sums = 4 * hidden.numel()
    return [
        *(sums, *routing_bytes(index)[:2], *copies, *copies, *unpacked, *tile),
        *[4 * _TILE_ROWS * columns] * 2,
    ]
