"""Assembling a profile: the blocks of a model, with the trace of each block in every regime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from duoka.base.text import is_within
from duoka.forecast.profile import AllocationTrace, BlockKind, Profile, ProfileBlock, Regime
from duoka.forecast.tensor_names import NamedTensor
from duoka.forecast.workload import Conditions
from duoka.models.quantization import expert_modules, is_composed, num_bytes, on_host, parts
from duoka.runtime.dispatch.place_tensors import empty_modules

from .blocks import ModuleGroup, find_containers
from .published_names import by_block

CALLER = ModuleGroup(names=(), owners=())
"""The caller's work on the outputs of the model: `generate` samples from the logits of a step."""

RegimeTraces = tuple[Regime, list[AllocationTrace]]
"""A regime, and the trace of each block in it."""

_NOTES = {
    "meta": (),
    "even": ("the model's code reads the routing of experts: the forecast assumes even routing",),
    "cpu": ("the model's code reads tensor values: the forecast assumes random weights",),
}
"""Notes for users of a profile, by the `data` of the virtual GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpec:
    """Identity of a traced model, and the conditions of its run.

    `published` are the tensor names in the checkpoint, or None if unknown. `data` is the storage
    behind tensors of the virtual GPU: "meta", "even" or "cpu" (see `virtual.set_gpus`).
    """

    fingerprint: str
    max_context_tokens: int | None = None
    published: tuple[str, ...] | None = None
    conditions: Conditions = field(default_factory=Conditions)
    data: str = "meta"


def as_profile(
    model: nn.Module,
    groups: Sequence[ModuleGroup],
    spec: TraceSpec,
    regimes: Sequence[RegimeTraces],
    tensor_names_: Sequence[NamedTensor],
    *,
    caller_at: int = 0,
) -> Profile:
    """Build the profile of a model's blocks in the recorded regimes.

    `caller_at` is the block whose device the caller uses: the first block, where the caller creates
    the inputs, or the last one, where it samples tokens.
    """
    weights, ties = weights_and_ties(model, groups)
    kinds: dict[BlockKind, int] = {}
    blocks = []
    containers = find_containers(model, groups)
    host_bytes = _host_bytes(model)
    # Quantized weights can't be streamed: their packages load them on the device that computes.
    may_stream = not any(map(is_composed, model.parameters()))
    for index, group in enumerate(groups):
        kind = BlockKind(
            weight_bytes=weights[index],
            expert_bytes=sum(host_bytes.get(name, 0) for name in group.owners),
            traces=tuple(traces[index] for _, traces in regimes),
        )
        number = kinds.setdefault(kind, len(kinds))
        caller_block = ties.get(caller_at, caller_at)
        tied_to = caller_block if group == CALLER else ties.get(index, group.returns_to)
        blocks.append(
            ProfileBlock(
                modules=group.names,
                kind=number,
                tied_to=tied_to,
                inside=containers[index],
                streams=group.streams and may_stream,
                experts=tuple(name for name in expert_modules(model) if name in group.owners),
            )
        )
    return Profile(
        fingerprint=spec.fingerprint,
        model=type(model).__name__,
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        blocks=tuple(blocks),
        kinds=tuple(kinds),
        regimes=tuple(regime for regime, _ in regimes),
        max_context_tokens=spec.max_context_tokens,
        tensor_names=by_block(tensor_names_, [block.modules for block in blocks]),
        conditions=spec.conditions,
        notes=_NOTES[spec.data],
        empty_modules=tuple(empty_modules(model)),
    )


def _host_bytes(model: nn.Module) -> dict[str, int]:
    """Return the bytes of the weights of each module whose experts stay on the host."""
    return {name: sum(map(num_bytes, module.parameters())) for name, module in on_host(model)}


def weights_and_ties(
    model: nn.Module, groups: Sequence[ModuleGroup]
) -> tuple[list[tuple[int, ...]], dict[int, int]]:
    """Return the tensor bytes of each block, and for each tied block the first block of its tie."""
    block_of = {owner: index for index, group in enumerate(groups) for owner in group.owners}
    sizes: list[list[int]] = [[] for _ in groups]
    first_of = list(range(len(groups)))
    block_by_tensor: dict[int, int] = {}
    hosts = [name for name, _ in on_host(model)]
    for name, module in model.named_modules():
        if name not in block_of:  # its first buffer was registered after the blocks were found
            continue
        weights = [*module.parameters(recurse=False)]
        if any(is_within(name, hosted) for hosted in hosts):
            weights = []
        for tensor in (*weights, *module.buffers(recurse=False)):
            block = block_of[name]
            if id(tensor) not in block_by_tensor:
                block_by_tensor[id(tensor)] = block
                sizes[block].extend(part.nbytes for part in parts(tensor).values())
                continue
            # Ties are transitive: a head may share its weight and its bias with different blocks.
            first_root, root = first_of[block_by_tensor[id(tensor)]], first_of[block]
            low, high = min(first_root, root), max(first_root, root)
            first_of = [low if partner == high else partner for partner in first_of]
    ties = {block: partner for block, partner in enumerate(first_of) if partner != block}
    return [tuple(item) for item in sizes], ties
