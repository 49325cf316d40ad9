"""Models of checkpoints published quantized, with weights of stored tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from duoka.checkpoint.headers import TensorInfo
from duoka.checkpoint.quantized import Stored, is_needless, is_wide, missing_parts
from duoka.errors import ModelError

from .conversion import Recipe, plan_tensors
from .quantization import StoredWeight

_MOST_NAMES = 5  # of each kind that an error tells


@dataclass(frozen=True, slots=True)
class _Held:
    """A stored tensor, or its share in a weight."""

    kind: str
    info: TensorInfo
    share: float


def hold_as_stored(model: nn.Module, stored: Stored, tensors: Mapping[str, TensorInfo]) -> None:
    """Make the quantized weights of a model consist of the checkpoint's stored tensors."""
    shapes = {name: tensors[name].shape for name in stored.plain} | dict.fromkeys(stored.weights)
    recipe = plan_tensors(model, shapes)
    parameters = {name for name, _ in model.named_parameters()}
    unscaled = [
        piece.source
        for piece in recipe.pieces
        if piece.source in shapes.keys() - stored.weights.keys()
        and piece.target in parameters
        and not is_wide(tensors[piece.source])
    ]
    _refuse_differences(recipe, stored, unscaled)
    for target, shares in _by_target(recipe, stored).items():
        parameter = model.get_parameter(target)
        weight = StoredWeight(_tensors(shares), parameter.shape, parameter.dtype)
        module = model.get_submodule(target.rpartition(".")[0])
        module.register_parameter(
            target.rpartition(".")[2], nn.Parameter(weight, requires_grad=False)
        )


def _refuse_differences(recipe: Recipe, stored: Stored, unscaled: Sequence[str]) -> None:
    """Refuse missing tensors and tensors of another model, all by name."""
    faults = [
        f"{len(names)} {text}: {', '.join(names[:_MOST_NAMES])}"
        for names, text in (
            (recipe.missing, "tensors of the model are missing"),
            (missing_parts(stored), "parts of quantized weights are missing"),
            (unscaled, "tensors are quantized and have no scales"),
            ([name for name in recipe.unexpected if not is_needless(name)],
             "tensors have no place in the model"),
            ([name for name, *_ in recipe.mismatched], "tensors have another shape"),
        )
        if names
    ]  # fmt: skip
    if faults:
        raise ModelError(
            f"the {stored.method.name} checkpoint isn't the model's: {'; '.join(faults)}",
            hint="config.json and the weights must be of the same model, and complete",
        )


def _by_target(recipe: Recipe, stored: Stored) -> dict[str, list[_Held]]:
    """Group the stored tensors by weight of the model, in the checkpoint's order."""
    by_target: dict[str, list[_Held]] = {}
    for piece in recipe.pieces:
        if piece.source in stored.weights:
            size = prod(stop - start for start, stop in piece.source_box)
            share = size / max(prod(piece.source_shape), 1)
            by_target.setdefault(piece.target, []).extend(_shares(stored, piece.source, share))
    for custom in recipe.customs:
        for source in custom.sources:
            if source in stored.weights:
                by_target.setdefault(custom.targets[0], []).extend(_shares(stored, source, 1.0))
    return by_target


def _shares(stored: Stored, weight: str, share: float) -> Iterator[_Held]:
    stem = weight.removesuffix("weight")
    for info in stored.weights[weight]:
        kind = info.name.removeprefix(stem).replace(".", "_").strip("_") or "weight"
        yield _Held(kind, info, share)


def _tensors(shares: Iterable[_Held]) -> dict[str, Tensor]:
    """Make a tensor for each kind; several of a kind become one where the model stacks them."""
    kinds: dict[str, list[_Held]] = {}
    for share in shares:
        kinds.setdefault(share.kind, []).append(share)
    return {kind: _tensor(group) for kind, group in kinds.items()}


def _tensor(group: list[_Held]) -> Tensor:
    info = group[0].info
    dtype = getattr(torch, str(info.dtype), None)
    if len(group) == 1 and group[0].share == 1 and dtype is not None and info.shape is not None:
        return torch.empty(info.shape, dtype=dtype, device="meta")
    num_bytes = sum(round((member.info.nbytes or 0) * member.share) for member in group)
    return torch.empty(num_bytes, dtype=torch.uint8, device="meta")
