"""Load a model's weights onto the devices of a placement, completely or not at all.

After a load the temporary memory of conversions is released on the devices; after a failed load all
of its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from duoka.base.garbage import free_locals
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import LoadError
from duoka.models import stored_weights
from duoka.models.conversion import Recipe, initialize_derived, plan_tensors
from duoka.planner.placement import Placement

from ..dispatch.offload import pin_experts
from ..dispatch.place_tensors import (
    TensorSnapshot,
    devices_by_name,
    move_tensors,
    on_host,
    tensor_names,
)
from .fill import Filler, Progress
from .sources import Source, list_sources

_NOWHERE = torch.device("meta")


def load_weights(
    model: nn.Module,
    checkpoint: Checkpoint,
    placement: Placement,
    *,
    progress: Progress | None = None,
    offloaded: Sequence[str] = (),
    only: torch.device | None = None,
) -> None:
    """Fill a model that was built without weights, each tensor on its device.

    Memory is allocated once for every parameter, in the order of the placement; then every tensor
    is read once from its file and copied into its place. After a failure or an interrupt the model
    is as it was before, and no memory on the devices stays allocated.

    Parameters
    ----------
    model : nn.Module
    checkpoint : Checkpoint
    placement : Placement
    progress : callable, optional
        See `Progress`.
    offloaded : sequence of str
        Modules whose weights stay in the host's memory.
    only : torch.device, optional
        Read and allocate only the tensors on this device; the others stay on meta.
    """
    assert all(p.is_meta for p in model.parameters()), "a model is loaded once"
    devices = devices_by_name(model, placement)
    devices |= on_host(model, devices, offloaded)
    if only is not None:
        devices = {name: at if at == only else _NOWHERE for name, at in devices.items()}
    generation = _generation_config(checkpoint)
    sources, recipe = _match(model, checkpoint)
    with nothing_left(devices.values(), TensorSnapshot(model).restore):
        _fill_model(model, devices, recipe, sources, progress)
    pin_experts(model, devices.values())
    if generation is not None and hasattr(model, "generation_config"):
        model.__dict__["generation_config"] = generation
    model.eval()


def refuse_differences(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Raise LoadError if a checkpoint's tensors don't match the model; only headers are read."""
    _match(model, checkpoint)


def _match(model: nn.Module, checkpoint: Checkpoint) -> tuple[dict[str, Source], Recipe]:
    """Match a checkpoint's tensors with the model's; raise LoadError with all differences."""
    sources = list_sources(checkpoint)
    stored = stored_weights(model)
    recipe = plan_tensors(model, stored.shapes_in(sources))
    tensors = dict(tensor_names(model))
    uncast = [
        f"{piece.target} ({tensors[piece.target].dtype} from {sources[piece.source].dtype})"
        for piece in recipe.pieces
        if piece.source not in stored.parts
        and not _can_cast(sources[piece.source].dtype, tensors[piece.target].dtype)
    ]
    mismatched = [
        f"{name} ({list(stored)} in the file, {list(built)} in the model)"
        for name, stored, built in recipe.mismatched
    ]
    # GPTQ's packers write a bias of zeros for layers without a bias.
    unexpected = [n for n in recipe.unexpected if not (stored.parts and n.endswith(".bias"))]
    faults = list_faults(
        (recipe.missing, "tensors of the model are missing from it"),
        (unexpected, "tensors in it don't belong to the model"),
        (mismatched, "tensors have a different shape"),
        (uncast, "tensors can't be converted to the model's dtype"),
    )
    if faults:
        raise LoadError(
            f"the checkpoint doesn't match the model: {faults}",
            hint="use config.json and weights of the same model, including the head",
        )
    return sources, recipe


def list_faults(*kinds: tuple[Sequence[str], str], most_names: int | None = None) -> str:
    """Format names by kind of fault, with their number: "2 tensors are missing: a, b; 1 …"."""
    return "; ".join(
        f"{len(names)} {text}: {', '.join(names[:most_names])}" for names, text in kinds if names
    )


def _generation_config(checkpoint: Checkpoint) -> GenerationConfig | None:
    """Return the checkpoint's generation settings; None if it has none."""
    if checkpoint.generation_config is None:
        return None
    try:
        return GenerationConfig.from_dict(checkpoint.generation_config)
    except Exception as error:  # unexpected values may raise anything
        raise LoadError(
            f"{checkpoint.path / 'generation_config.json'} is not valid: {str(error)[:200]}",
            hint="download it again, or delete it",
        ) from error


def _can_cast(source: torch.dtype, target: torch.dtype) -> bool:
    """Return True if a plain cast between two dtypes keeps the values; 8-bit floats need scales."""
    if source == target:
        return True
    if source.is_floating_point and target.is_floating_point:
        return source.itemsize > 1
    return not (
        source.is_floating_point or target.is_floating_point or torch.bool in (source, target)
    )


def _fill_model(
    model: nn.Module,
    devices: Mapping[str, torch.device],
    recipe: Recipe,
    sources: Mapping[str, Source],
    progress: Progress | None,
) -> None:
    """Allocate the model's tensors, fill them, and check that each is filled exactly once."""
    move_tensors(model, devices)
    recipe = recipe.limited({name for name, at in devices.items() if at != _NOWHERE})
    filler = Filler(dict(tensor_names(model)), sources, progress, stored_weights(model))
    with torch.no_grad():
        filler.fill(recipe)
    initialize_derived(model, recipe)
    gaps = [
        f"{name} ({filler.filled.get(name, 0)} of {tensor.numel()} elements)"
        for name, tensor in _tensors_to_fill(model, recipe).items()
        if filler.filled.get(name, 0) != tensor.numel()
    ]
    if gaps:
        raise LoadError(f"{len(gaps)} tensors were not filled exactly once: {', '.join(gaps)}")


def _tensors_to_fill(model: nn.Module, recipe: Recipe) -> dict[str, Tensor]:
    """Return the parameters and buffers that must be filled, under their first names."""
    filled, stated = recipe.targets, model.state_dict(keep_vars=True)
    buffers = {n: b for n, b in model.named_buffers() if n in stated and n in filled}
    tensors = {**dict(model.named_parameters()), **buffers}
    return {n: t for n, t in tensors.items() if n not in recipe.derived and not t.is_meta}


@contextmanager
def nothing_left(
    devices: Collection[torch.device], undo: Callable[[], None] | None = None
) -> Iterator[None]:
    """Call `undo` and free the memory of the body if the body fails or is interrupted.

    After success, only release unused memory that the devices' allocators have reserved.
    """
    try:
        yield
    except BaseException as error:  # an interrupt must not leave half a model on the devices
        if undo is not None:
            undo()
        free_locals(error)
        _empty_caches(devices)
        if isinstance(error, torch.OutOfMemoryError):
            raise LoadError(
                f"the weights don't fit: {error}", hint="free the memory that other programs use"
            ) from error
        raise
    _empty_caches(devices)


def _empty_caches(devices: Collection[torch.device]) -> None:
    """Release the unused memory that the devices' allocators have reserved."""
    for kind in sorted({device.type for device in devices} - {"cpu", "meta"}):
        backend: Any = torch.get_device_module(kind)
        backend.empty_cache()
