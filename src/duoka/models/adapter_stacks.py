"""Stacked LoRA adapters: each token of a step has the adapter that its request has chosen.

The A and B of all adapters of a linear layer are stacked along their ranks. For adapters of ranks 2
and 3, and tokens that have chosen adapter 2, none and adapter 1:

    adapter of each rank      1 1 2 2 2      A [5, inputs], B [5, outputs]
    h = x Aᵀ        token 0   0 0 h h h
                    token 1   0 0 0 0 0
                    token 2   h h 0 0 0
    y = x Wᵀ + h B

The parts of h that belong to other adapters are set to zero. So a layer makes the same three
launches in any company, without sorted or gathered rows, and a CUDA graph can replay them. A token
costs the products with all ranks, which are few beside W: for a W [4096, 4096], 4 adapters of rank
16 add 3 %. Gathering each token's own matrices (Chen et al., "Punica", 2023) without a kernel for
it would write a copy of them per token; it pays with hundreds of adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from duoka.base.text import containing
from duoka.errors import LoadError, ModelError

from .lora import LoraAdapter, refuse_other_model, sizes_of
from .quantization import computes_in

STACKS = ("lora_down", "lora_up")
"""The names of an adapted module's buffers, [ranks, inputs] and [ranks, outputs]."""
_RANKS, _COLUMNS = "_duoka_adapter_ranks", "_duoka_adapter_columns"
_MERGE = "merge it into the weights: --adapter DIR, without a name"


@dataclass(slots=True)
class AdapterRanks:
    """The ranks of a model's stacked adapters, shared by its adapted modules and their layers.

    Parameters
    ----------
    owners : list of int
        The number of the adapter of each rank, from 1.
    uncalled : set of str
        The adapted modules that haven't been called yet in a step over pages.
    is_foreign : Tensor or None
        [tokens, ranks]: True for the ranks of other adapters than the token's. None outside of a
        layer's call in a step over pages.
    """

    owners: list[int]
    uncalled: set[str]
    is_foreign: Tensor | None = None

    def refuse_uncalled(self) -> None:
        """Raise ModelError if the model's first step hasn't called all adapted modules."""
        if self.uncalled:
            raise ModelError(
                f"an adapter changes {min(self.uncalled)}, which isn't called in steps over a "
                "paged KV cache",
                hint=_MERGE,
            )


def ranks_of(model: nn.Module) -> AdapterRanks:
    """Return the ranks of a model's stacked adapters; none for a model without stacks."""
    return model.__dict__.get(_RANKS) or AdapterRanks([], set())


# Adapter 1 of rank 2 changes q_proj, adapter 2 of rank 3 q_proj and v_proj, adapter 3 of rank 1
# q_proj. The owners are 1 1 2 2 2 3; q_proj has columns 0 to 6, v_proj 2 to 5.
def add_stacks(model: nn.Module, adapters: Mapping[str, LoraAdapter]) -> None:
    """Add stacks for adapters in native form to a model, as buffers without data.

    `adapters` are by name, in the order of their numbers.

    Raises
    ------
    LoadError
        If an adapter doesn't match the model, or changes other than linear modules of layers.
    """
    layers: dict[str, str] = {}
    for title, adapter in adapters.items():
        refuse_other_model(model, adapter, f"adapter {title!r}")
        layers |= {name: _layer_of(model, name, title) for name in adapter.layers}
    sizes = [max(part.rank for part in adapter.layers.values()) for adapter in adapters.values()]
    owners = [number for number, size in enumerate(sizes, 1) for _ in range(size)]
    ranks = AdapterRanks(owners, set(layers))
    model.__dict__[_RANKS] = ranks
    for layer in set(map(model.get_submodule, layers.values())):
        layer.__dict__[_RANKS] = ranks
        layer.__class__ = _with_forward(cast(Any, type(layer)), _run_layer)
    for name in layers:
        module: Any = model.get_submodule(name)
        users = [at for at, adapter in enumerate(adapters.values()) if name in adapter.layers]
        first, stop = sum(sizes[: users[0]]), sum(sizes[: users[-1] + 1])
        for stack, width in zip(STACKS, sizes_of(module) or (), strict=True):
            shape, dtype = (stop - first, width), computes_in(module.weight)
            empty = torch.empty(shape, dtype=dtype, device="meta")
            module.register_buffer(stack, empty, persistent=False)
        module.__dict__[_COLUMNS] = name, ranks, first, stop
        module.__class__ = _with_forward(cast(Any, type(module)), _run_module)


@torch.no_grad()
def fill_stacks(model: nn.Module, adapters: Mapping[str, LoraAdapter]) -> None:
    """Copy the adapters of `add_stacks` into a model's stacks, except stacks on the meta device."""
    for name, module in model.named_modules():
        _, ranks, first, _ = module.__dict__.get(_COLUMNS, (name, None, 0, 0))
        if ranks is None or module.get_buffer(STACKS[0]).is_meta:
            continue
        down, up = (module.get_buffer(stack).zero_() for stack in STACKS)
        for number, adapter in enumerate(adapters.values(), 1):
            if part := adapter.layers.get(name):
                start = ranks.owners.index(number) - first
                rows, scaled = slice(start, start + part.rank), part.up.float() * part.scaling
                down[rows].copy_(part.down.to(down.dtype))
                up[rows].copy_(scaled.t().to(up.dtype).contiguous())


def _layer_of(model: nn.Module, name: str, title: str) -> str:
    """Return the layer around a linear module; raise LoadError for any other module."""
    parents = {owner: owner.rpartition(".")[0] for owner in containing(name)}
    layers = [o for o, at in parents.items() if isinstance(model.get_submodule(at), nn.ModuleList)]
    if layers and isinstance(model.get_submodule(name), nn.Linear | Conv1D):
        return layers[-1]
    raise LoadError(
        f"adapter {title!r} changes {name}, and requests can choose only adapters of linear "
        "modules within layers",
        hint=_MERGE,
    )


# ── calls ──

# A layer's call has the step's table among its arguments, on the device of the layer (see
# `runtime.call.paged_step`). It tells the adapter of each token to the modules inside.
_Forward = Callable[..., Any]


@cache
def _with_forward(base: Any, run: _Forward) -> Any:
    """Return a subclass of a module's class, of the same name, with `run` around its `forward`."""
    inherited: _Forward = base.forward

    @wraps(inherited)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(self, inherited, *args, **kwargs)

    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "forward": forward}
    return type(base.__name__, (base,), names)


def _run_layer(layer: nn.Module, inherited: _Forward, *args: Any, **kwargs: Any) -> Any:
    """Call a layer; in a step over pages its modules add the adapters of the step's tokens."""
    ranks, step = layer.__dict__[_RANKS], kwargs.get("step")
    ranks.is_foreign = None if step is None else step.foreign_ranks(kwargs["step_table"])
    try:
        return inherited(layer, *args, **kwargs)
    finally:
        ranks.is_foreign = None


def _run_module(module: Any, inherited: _Forward, inputs: Tensor) -> Tensor:
    """Call a linear module, and add the outputs of the adapters of the tokens."""
    outputs: Tensor = inherited(module, inputs)
    name, ranks, first, stop = module.__dict__[_COLUMNS]
    if ranks.is_foreign is None:
        return outputs
    rows = inputs.reshape(-1, inputs.shape[-1])
    if len(rows) != len(ranks.is_foreign):
        raise ModelError(
            f"an adapter changes {name}, which gets {len(rows)} rows of a step of "
            f"{len(ranks.is_foreign)} tokens: only modules that get every token can have one",
            hint=_MERGE,
        )
    ranks.uncalled.discard(name)
    hidden = (rows @ module.lora_down.t()).masked_fill_(ranks.is_foreign[:, first:stop], 0)
    outputs.view(-1, outputs.shape[-1]).addmm_(hidden, module.lora_up)
    return outputs
