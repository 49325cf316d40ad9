"""Models of checkpoints published quantized: their weights hold the stored tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor, nn

from duoka.checkpoint.headers import TensorInfo
from duoka.checkpoint.quantized import Stored, is_needless, is_wide, missing_parts
from duoka.errors import ModelError

from .conversion import Recipe, plan_tensors
from .quantization import StoredWeight

_MOST_NAMES = 5  # number of tensors that an error lists for each problem


# A stored tensor, and the fraction of its bytes that belongs to a weight of the model.
_Share = tuple[TensorInfo, float]


def hold_as_stored(model: nn.Module, stored: Stored, tensors: Mapping[str, TensorInfo]) -> None:
    """Replace the quantized weights of a model by `StoredWeight`s of the checkpoint's tensors."""
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
    for target, kinds in _group_by_target(recipe, stored).items():
        parameter = model.get_parameter(target)
        tensors_by_kind = {kind: _tensor(group) for kind, group in kinds.items()}
        weight = StoredWeight(tensors_by_kind, parameter.shape, parameter.dtype)
        owner, _, leaf = target.rpartition(".")
        stored_parameter = nn.Parameter(weight, requires_grad=False)
        model.get_submodule(owner).register_parameter(leaf, stored_parameter)


def _refuse_differences(recipe: Recipe, stored: Stored, unscaled: Sequence[str]) -> None:
    """Raise ModelError for missing tensors and for tensors of another model or shape, by name."""
    faults = [
        f"{len(names)} {text}: {', '.join(names[:_MOST_NAMES])}"
        for names, text in (
            (recipe.missing, "tensors of the model are missing"),
            (missing_parts(stored), "parts of quantized weights are missing"),
            (unscaled, "quantized tensors have no scales"),
            ([name for name in recipe.unexpected if not is_needless(name)],
             "tensors don't belong to the model"),
            ([name for name, *_ in recipe.mismatched], "tensors have a different shape"),
        )
        if names
    ]  # fmt: skip
    if faults:
        raise ModelError(
            f"the {stored.method.name} checkpoint doesn't match the model: {'; '.join(faults)}",
            hint="use config.json and complete weights of the same model",
        )


# A weight of the model may be a part of a stored weight, or made of several. If the query has 6 of
# 10 rows of a fused query_key_value, q_proj holds 60 % of the bytes of each stored tensor (packed
# values, scales). A stack of 8 experts holds the stored tensors of all 8, grouped by kind.
def _group_by_target(recipe: Recipe, stored: Stored) -> dict[str, dict[str, list[_Share]]]:
    """Group stored tensors by the model's weight and by kind (packed values, scales)."""
    sources = []
    for piece in recipe.pieces:
        size = prod(stop - start for start, stop in piece.source_box)
        sources.append((piece.target, piece.source, size / max(prod(piece.source_shape), 1)))
    for custom in recipe.customs:
        sources += [(custom.targets[0], name, 1.0) for name in custom.sources]
    by_target: dict[str, dict[str, list[_Share]]] = {}
    for target, weight, share in sources:
        for info in stored.weights.get(weight, ()):
            part = info.name.removeprefix(weight.removesuffix("weight"))
            kind = part.replace(".", "_").strip("_") or "weight"
            by_target.setdefault(target, {}).setdefault(kind, []).append((info, share))
    return by_target


def _tensor(group: list[_Share]) -> Tensor:
    """Return a tensor on the meta device with the bytes of a group of stored tensors.

    A single, whole stored tensor keeps its shape and dtype; otherwise the result is uint8.
    """
    info, share = group[0]
    dtype = getattr(torch, str(info.dtype), None)
    if len(group) == 1 and share == 1 and dtype is not None and info.shape is not None:
        return torch.empty(info.shape, dtype=dtype, device="meta")
    num_bytes = sum(round((info.nbytes or 0) * share) for info, share in group)
    return torch.empty(num_bytes, dtype=torch.uint8, device="meta")
