"""Caches of experts that the GPU fetches: each layer keeps the experts used last on its GPU.

All experts of the layer are in host memory, in the layout of the GPU, and the cache has slots for
some of them. In a step of few tokens the host waits for the routing, copies each chosen expert that
is missing over the one used longest ago, and sends the slot of each pair of token and expert. Then
the GPU computes as if the slots were all experts of the layer (`experts.compute`). A step that may
need more experts than there are slots streams them through instead (`fetched_experts`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from .composed import num_bytes
from .routing import sent_to_host
from .stacked import ExpertStack, slot_bytes

_PREFIX = "cached_"
_USUAL_TOP_K = 8
"""Experts of a token, if the configuration has another name for their number."""
_GATE_TENSORS = 3
"""Temporary tensors of a gate and its activation."""
_OUTPUTS = 3
"""Tensors of outputs in the model's dtype: of the product, with the bias, and of a cast."""

COUNTS: Counter[str] = Counter()
"""Experts that this process found in caches ("hits") or fetched ("misses"), of all its models."""


class CachedExperts:
    """A module of experts on the host, with the tensors of its cache in the place of its own."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        cached = self._module._buffers.get(f"{_PREFIX}{name}")
        return getattr(self._module, name) if cached is None else cached


def add_cache(module: Any, cache_bytes: int) -> None:
    """Add a cache of a size to a module of experts without data, as buffers.

    It has slots for the experts of one token at least, and for all at most.
    """
    expert_bytes = sum(map(num_bytes, module.parameters())) // module.num_experts
    least = getattr(module.config, "num_experts_per_tok", None) or _USUAL_TOP_K
    least = max(least) if isinstance(least, (list, tuple)) else least  # of each layer
    slots = min(max(cache_bytes // expert_bytes, least), module.num_experts)
    for name, parameter in list(module.named_parameters(recurse=False)):
        shape = slots, *parameter.shape[1:]
        if isinstance(parameter, ExpertStack):
            parts = {
                key: part.new_empty((slots, *part.shape[1:]))
                for key, part in parameter.tensors.items()
            }
            cached: Tensor = ExpertStack.make(
                *(parts, torch.Size(shape), parameter.dtype, parameter.weight_class),
                parameter.is_transposed,
            )
        else:
            cached = parameter.detach().new_empty(shape)
        module.register_buffer(f"{_PREFIX}{name}", cached, persistent=False)


def num_slots(module: nn.Module) -> int:
    """Return the slots of a module's cache; 0 without one."""
    caches = (b for name, b in module.named_buffers(recurse=False) if name.startswith(_PREFIX))
    return len(next(caches, ()))


def load_experts(module: nn.Module, slots: Tensor, index: Tensor) -> None:
    """Fetch the experts of a step that are missing, and write the slot of each pair to `slots`.

    `index` are the experts, [tokens, top_k], for which the host waits.
    """
    caches = {n: b for n, b in module.named_buffers(recurse=False) if n.startswith(_PREFIX)}
    first: Any = next(iter(caches.values()))
    # Experts with their slots, the one used longest ago first. New memory has a new cache.
    slot_of: OrderedDict[int, int] = first.__dict__.setdefault("slot_of", OrderedDict())
    chosen = sent_to_host([index])[0].flatten().tolist()
    missing = []
    for number in dict.fromkeys(chosen):
        if number in slot_of:
            slot_of.move_to_end(number)
        else:
            missing.append(number)
    free = [*{*range(len(first))}.difference(slot_of.values())]
    for number in missing:
        slot = free.pop() if free else slot_of.popitem(last=False)[1]
        for name, cache in caches.items():
            source = getattr(module, name.removeprefix(_PREFIX))
            for target, part in zip(_tensors(cache), _tensors(source), strict=True):
                target[slot].copy_(part[number], non_blocking=True)
        slot_of[number] = slot
    COUNTS.update(misses=len(missing), hits=len(set(chosen)) - len(missing))
    places = torch.tensor([slot_of[number] for number in chosen], pin_memory=index.is_cuda)
    slots.copy_(places.view_as(slots), non_blocking=True)


def _tensors(weight: Tensor) -> list[Tensor]:
    """Return the tensors of a stack, or a bias."""
    return [*weight.tensors.values()] if isinstance(weight, ExpertStack) else [weight]


def cached_bytes(module: Any, hidden: Tensor, index: Tensor) -> list[int]:
    """Return the sizes of the tensors of a step with the cache, at most; empty without a cache."""
    slots, size = num_slots(module), hidden.element_size()
    if not slots:
        return []
    first = module.gate_up_proj if module.has_gate else module.up_proj
    last, one = module.down_proj, index[:1]
    (rows, columns), width = first.sizes, last.sizes[1]
    outputs = [rows, rows, *[width] * _GATE_TENSORS, *[columns] * _OUTPUTS, 2 * columns]
    inputs = hidden[:1], torch.empty(index.shape[1], width, dtype=hidden.dtype, device="meta")
    products = [
        part
        for stack, states in zip((first, last), inputs, strict=True)
        for part in slot_bytes(
            *(states, one, list(stack.tensors.values()), stack.weight_class, stack.sizes[0])
        )
    ]
    return [8 * slots, *(slots * size * wide for wide in outputs), *products]
