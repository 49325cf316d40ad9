"""The forward pass of a layer's experts with quantized stacks (`stacked`).

For one token, the packed rows of its experts are selected on the device into one weight, which is
multiplied by a single kernel. For a few tokens this is repeated token by token. From as many pairs
of token and expert as there are experts on, each expert is read once: the pairs are sorted by
expert, which needs one wait for the routing, and an expert's tokens are multiplied in tiles. So no
weight is dequantized beyond a single expert, and the memory doesn't depend on the routing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from duoka.virtual import add_operator

from .host_experts import IMPLEMENTATION, ON_HOST, USUAL, compute_on_host
from .routing import by_expert, reserve, routing_bytes
from .scaled import Mxfp4Weight, ScaledWeight
from .stacked import (
    ExpertStack,
    Int4Rows,
    Int4Tiles,
    Int8Rows,
    Int8Tiles,
    Unquantized,
    slot_bytes,
    unpacked_bytes,
)
from .weights import Nf4Weight

_CLASSES: dict[str, Any] = {
    cls.__name__: cls for cls in (Int4Tiles, Int8Tiles, Int4Rows, Int8Rows, Nf4Weight, Unquantized)
}
_CLASSES |= {cls.__name__: cls for cls in (ScaledWeight, Mxfp4Weight)}
_TILE_ROWS = 64
"""The most tokens in a product on a GPU; bounds the memory of a product."""


def forward(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Compute a layer's experts, on the host if their weights stay there; see `compute`."""
    if getattr(module, ON_HOST, False):
        return compute_on_host(compute, module, hidden, index, weights)
    if any(isinstance(weight, ExpertStack) for weight in module.parameters(recurse=False)):
        return compute(module, hidden, index, weights)
    # The experts of another layer are on the host or quantized, and all share a configuration.
    eager = type(module).forward.__wrapped__
    name = getattr(module.config, USUAL, None) or "eager"
    usual = ALL_EXPERTS_FUNCTIONS.get_interface(name, eager)
    result: Tensor = usual(module, hidden, index, weights)
    return result


def compute(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts, [tokens, hidden].

    Parameters
    ----------
    module : nn.Module
        One of transformers' modules of experts, with an `ExpertStack` for each projection.
    hidden : Tensor
        [tokens, hidden].
    index, weights : Tensor
        [tokens, experts per token]: the experts of each token, and their weights.
    """
    tokens, top_k = index.shape
    first = "gate_up_proj" if module.has_gate else "up_proj"
    states = _project(module, first, hidden, index)
    states = module._apply_gate(states) if module.has_gate else module.act_fn(states)
    states = _project(module, "down_proj", states, index)
    if module.has_post_expert_norm:
        states = module.post_expert_norm(states)
    weighted = states * weights.reshape(-1, 1)
    return weighted.view(tokens, top_k, -1).sum(dim=1).to(hidden.dtype)


def _project(module: Any, name: str, inputs: Tensor, index: Tensor) -> Tensor:
    """Return a projection for each pair of token and expert, with its bias."""
    outputs = linear(inputs, getattr(module, name), index)
    if module.has_bias:
        outputs = outputs + getattr(module, f"{name}_bias")[index.reshape(-1)]
    return outputs


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, forward)


def linear(inputs: Tensor, stack: ExpertStack, experts: Tensor) -> Tensor:
    """Multiply each token by the weights of its experts.

    Parameters
    ----------
    inputs : Tensor
        [tokens, columns], or [tokens x top_k, columns] with an own input for each expert.
    stack : ExpertStack
    experts : Tensor
        [tokens, top_k].

    Returns
    -------
    Tensor
        [tokens x top_k, rows].
    """
    device_type = inputs.device.type
    if torch.is_autocast_enabled(device_type):
        inputs = inputs.to(torch.get_autocast_dtype(device_type))
    kind, rows = stack.weight_class, stack.sizes[0]
    tensors = list(stack.tensors.values())
    if torch.is_grad_enabled() and inputs.requires_grad:
        product: Any = _Product
        result: Tensor = product.apply(inputs, experts, tensors, kind.__name__, rows)
        return result
    if len(experts) == 1 and device_type != "cpu" and kind is not Int8Rows:
        return _multiply_slots(inputs, experts[0], tensors, kind, rows).to(inputs.dtype)
    outputs: Tensor = torch.ops.duoka.experts_linear(inputs, experts, tensors, kind.__name__, rows)
    return outputs


# The k selected weights are one weight of k x rows rows. Its product with the k inputs has all
# pairs of an input and an expert, [k, k, rows], of which the diagonal is wanted. The kernel reads
# the weight once, and computes tiles of 16 inputs anyway.
def _multiply_slots(
    inputs: Tensor, experts: Tensor, tensors: Sequence[Tensor], kind: Any, rows: int
) -> Tensor:
    """Multiply one token by the weights of its experts: [1 or top_k, columns] to [top_k, rows]."""
    top_k = len(experts)
    if not hasattr(kind, "multiply_packed"):
        # As bytes, because CUDA selects no tensors in FP8.
        chosen = [tensor.view(torch.uint8).index_select(0, experts) for tensor in tensors]
        selected = [part.view(tensor.dtype) for part, tensor in zip(chosen, tensors, strict=True)]
        size = torch.Size((rows, inputs.shape[1]))
        outputs = inputs.new_empty(top_k, rows)
        for number in range(top_k):
            weight = _weight_of(kind, [part[number] for part in selected], size, inputs.dtype)
            outputs[number] = F.linear(inputs[number % len(inputs)][None], weight)[0]
        return outputs
    packed, scales = tensors
    packed = packed.index_select(0, experts).flatten(0, 1)
    scales = scales.movedim(0, 1).index_select(1, experts).flatten(1, 2)
    products: Tensor = kind.multiply_packed(inputs, packed, scales)
    if len(inputs) == 1:
        return products.view(top_k, rows)
    return products.view(top_k, top_k, rows).diagonal().t()


def _weight_of(kind: Any, tensors: Sequence[Tensor], size: torch.Size, dtype: torch.dtype) -> Any:
    """Return a weight [rows, columns] of its tensors, which are in the order of `tensor_shapes`."""
    return kind(dict(zip(kind.tensor_shapes(*size, dtype), tensors, strict=True)), size, dtype)


def _experts_linear(
    inputs: Tensor, experts: Tensor, tensors: Sequence[Tensor], name: str, rows: int
) -> Tensor:
    """Compute `linear` for several tokens, or on the CPU."""
    kind = _CLASSES[name]
    top_k, is_gpu = experts.shape[1], inputs.device.type != "cpu"
    outputs = inputs.new_empty(experts.numel(), rows)
    shared = len(inputs) == len(experts)
    if is_gpu and kind is not Int8Rows and experts.numel() <= len(tensors[0]):
        for token, chosen in enumerate(experts):
            first, stop = token * top_k, (token + 1) * top_k
            states = inputs[token : token + 1] if shared else inputs[first:stop]
            outputs[first:stop] = _multiply_slots(states, chosen, tensors, kind, rows)
        return outputs
    is_half = inputs.dtype == tensors[-1].dtype == torch.bfloat16
    if len(experts) == 1 and not is_gpu and is_half and hasattr(kind, "multiply_tensors"):
        # Of one token, Python's time for sorting and for weights would be that of the products.
        for pair, number in enumerate(experts[0].tolist()):
            states = inputs if shared else inputs[pair : pair + 1]
            expert = (tensor[number] for tensor in tensors)
            outputs[pair : pair + 1] = kind.multiply_tensors(states, *expert)
        return outputs
    if is_gpu:
        reserve(inputs.device, _tile_bytes(inputs, tensors, kind, rows))
    size = torch.Size((rows, inputs.shape[1]))
    for number, all_pairs in by_expert(experts, len(tensors[0])):
        weight = _weight_of(kind, [tensor[number] for tensor in tensors], size, inputs.dtype)
        for pairs in all_pairs.split(_TILE_ROWS) if is_gpu else [all_pairs]:
            rows_of = pairs // top_k if shared else pairs
            # No tensor of a tile has a name, which would keep it during the next tile.
            outputs.index_copy_(0, pairs, F.linear(inputs.index_select(0, rows_of), weight))
    return outputs


def _experts_backward(
    gradient: Tensor, experts: Tensor, tensors: Sequence[Tensor], name: str, columns: int
) -> Tensor:
    """Return the gradient of each pair's input, [pairs, columns]; one expert is unpacked."""
    kind, size = _CLASSES[name], torch.Size((gradient.shape[1], columns))
    outputs, is_gpu = gradient.new_empty(len(gradient), columns), gradient.device.type != "cpu"
    if is_gpu:
        reserve(gradient.device, _backward_bytes(gradient, columns))
    for number, all_pairs in by_expert(experts, len(tensors[0])):
        weight = _weight_of(kind, [tensor[number] for tensor in tensors], size, gradient.dtype)
        for pairs in all_pairs.split(_TILE_ROWS) if is_gpu else [all_pairs]:
            outputs.index_copy_(
                0, pairs, gradient.index_select(0, pairs) @ weight.unpacked(gradient.dtype)
            )
    return outputs


def _tile_bytes(inputs: Tensor, tensors: Sequence[Tensor], kind: Any, rows: int) -> list[int]:
    """Return the sizes of the tensors made for the largest tile of an expert's tokens."""
    columns, size = inputs.shape[1], inputs.element_size()
    states = [_TILE_ROWS * columns * size, _TILE_ROWS * rows * size]
    if hasattr(kind, "input_bytes"):
        cast = [] if inputs.dtype == torch.bfloat16 else [2 * _TILE_ROWS * rows]
        return [*states, *cast, *kind.input_bytes(_TILE_ROWS, inputs)]
    return [*states, unpacked_bytes(kind, rows, inputs)]


def _backward_bytes(gradient: Tensor, columns: int) -> list[int]:
    """Return the sizes of the tensors made for the largest tile of an expert's gradients."""
    rows, size = gradient.shape[1], gradient.element_size()
    return [rows * columns * size, _TILE_ROWS * rows * size, _TILE_ROWS * columns * size]


def _buffers(
    inputs: Tensor, experts: Tensor, tensors: Sequence[Tensor], name: str, rows: int
) -> Iterator[list[int]]:
    """Yield the sizes of the buffers of `experts_linear` that exist together on a GPU."""
    # Whether tokens are computed one by one or sorted depends on their number, but rules of a
    # profile can't: the buffers of both ways are counted.
    kind = _CLASSES[name]
    yield routing_bytes(experts)
    if kind is not Int8Rows:
        yield slot_bytes(inputs, experts, tensors, kind, rows)
    yield [*routing_bytes(experts)[:2], *_tile_bytes(inputs, tensors, kind, rows)]


def _backward_buffers(
    gradient: Tensor, experts: Tensor, tensors: Sequence[Tensor], name: str, columns: int
) -> Iterator[list[int]]:
    """Yield the sizes of the buffers of `experts_backward` that exist together on a GPU."""
    yield routing_bytes(experts)
    yield [*routing_bytes(experts)[:2], *_backward_bytes(gradient, columns)]


def _empty(inputs: Tensor, experts: Tensor, tensors: Any, name: str, width: int) -> Tensor:
    """Return a result without values, for the meta device."""
    return inputs.new_empty(experts.numel(), width)


_library = torch.library.Library("duoka", "DEF")
for _name, _compute, _sizes in (
    ("experts_linear", _experts_linear, _buffers),
    ("experts_backward", _experts_backward, _backward_buffers),
):
    _library.define(f"{_name}(Tensor x, Tensor experts, Tensor[] t, str kind, int width) -> Tensor")
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _compute, _key)
    _library.impl(_name, _empty, "Meta")
    add_operator(getattr(torch.ops.duoka, _name).default, _sizes)


def _empty_like(hidden: Tensor, *_: Any) -> Tensor:
    """Return a result without values, for experts on the host."""
    return torch.empty_like(hidden)


def _empty_gradients(hidden: Tensor, _index: Tensor, weights: Tensor, *_: Any) -> list[Tensor]:
    """Return the gradients of experts on the host without values."""
    return [torch.empty_like(hidden), torch.empty_like(weights)]


_COSTS = "int slots, int[] cached, int bytes, int experts, int flops, int[] fetched"
for _name, _tensors, _results, _meta in (
    ("host_experts", "", "Tensor", _empty_like),
    ("host_experts_backward", " Tensor gradient,", "Tensor[]", _empty_gradients),
):
    _library.define(
        f"{_name}(Tensor x, Tensor index, Tensor weights,{_tensors} {_COSTS}) -> {_results}"
    )
    _library.impl(_name, _meta, "Meta")


def _host_buffers(_hidden: Tensor, index: Tensor, *arguments: Any) -> Iterator[list[int]]:
    """Yield the sizes of the buffers of fetched experts that exist together on a GPU."""
    *_, cached, _, _, _, fetched = arguments
    if fetched:
        yield routing_bytes(index)
        yield fetched
        yield cached


add_operator(torch.ops.duoka.host_experts.default, _host_buffers)
add_operator(torch.ops.duoka.host_experts_backward.default, _host_buffers)


class _Product(torch.autograd.Function):
    """`linear` with a gradient for its inputs only."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, experts: Tensor, tensors: Any, name: str, rows: int
    ) -> Tensor:
        ctx.save_for_backward(experts)
        ctx.tensors, ctx.name = tensors, name
        ctx.shape = inputs.shape
        outputs: Tensor = torch.ops.duoka.experts_linear(inputs, experts, tensors, name, rows)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        (experts,), (count, columns) = ctx.saved_tensors, ctx.shape
        inputs: Tensor = torch.ops.duoka.experts_backward(
            *(gradients[0], experts, ctx.tensors, ctx.name, columns)
        )
        if count == len(experts):  # the experts of a token share its input
            inputs = inputs.view(count, -1, columns).sum(dim=1)
        return inputs, None, None, None, None
