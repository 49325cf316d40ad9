"""Dispatch: the one place where activations change device.

A dispatched model is the same object with its parameters and buffers where the placement says, and
with forward pre-hooks ("movers") on its blocks. Outputs stay where they are made. Nothing else
changes: parameter names, ties, state dict and the model's code are what they were.

This room doesn't know how a placement is found, nor how weights are read.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from duoka.placement import Placement

from .movers import install
from .placing import devices_by_name, move_tensors, place, refuse_meta, tensor_names

__all__ = ["dispatch", "install_movers", "place", "tensor_names", "undispatch"]

_STATE = "_duoka_dispatch"

Model = TypeVar("Model", bound=nn.Module)


def dispatch(model: Model, placement: Placement, *, empty: bool = False) -> Model:
    """Spread a model over the devices of a placement.

    Dispatching a dispatched model again replaces the earlier placement.

    Parameters
    ----------
    model : nn.Module
        Any module; it is changed in place.
    placement : Placement
        A device for every parameter and buffer. A tied parameter has one device under all its
        names.
    empty : bool
        Allow parameters without data (on the meta device); they are allocated, not filled.

    Returns
    -------
    nn.Module
        The same model.

    Raises
    ------
    PlacementError
        If the placement doesn't name exactly one device for every parameter and buffer; nothing
        has been moved then.
    ModelError
        If parameters have no data and `empty` wasn't asked for; nothing has been moved then.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    >>> dispatch(model, Placement(entries=(("", "cpu"),))) is model
    True
    """
    devices = devices_by_name(model, placement)
    if not empty:
        refuse_meta(model)
    undispatch(model)
    move_tensors(model, devices)
    handles = install(model, placement, devices) if len(set(devices.values())) > 1 else []
    _adopt(model, placement, handles)
    return model


def undispatch(model: nn.Module) -> None:
    """Remove what `dispatch` added to the model; parameters stay where they are."""
    state = model.__dict__.pop(_STATE, None)
    if state is None:
        return
    for handle in state.handles:
        handle.remove()
    for module in state.marked:
        module.__dict__.pop("_hf_hook", None)
    model.__dict__.pop("hf_device_map", None)


def install_movers(model: Model, placement: Placement) -> Model:
    """Put movers on every block of the placement, on one device too, and move no parameter.

    `dispatch` does this when there are several devices. On one device it serves to measure what
    the movers themselves cost.
    """
    undispatch(model)
    handles = install(model, placement, devices_by_name(model, placement))
    _adopt(model, placement, handles)
    return model


class _State:
    """What `dispatch` left on a model, for `undispatch` to remove."""

    def __init__(self, handles: list[RemovableHandle], marked: list[nn.Module]) -> None:
        self.handles = handles
        self.marked = marked


class _EncoderMark:
    """Tells transformers' `generate` that the encoder needs no hook of accelerate's."""

    io_same_device = False


def _adopt(model: nn.Module, placement: Placement, handles: list[RemovableHandle]) -> None:
    """Tell transformers that the model is placed.

    Its Trainer then leaves the model where it is, and a static cache is made layer by layer.
    Devices are objects and not text: "cpu" as text means "offloaded" there.
    """
    marked = []
    encoder = _encoder(model)
    if encoder is not None and "_hf_hook" not in encoder.__dict__:
        encoder.__dict__["_hf_hook"] = _EncoderMark()
        marked.append(encoder)
    model.__dict__["hf_device_map"] = {
        name: torch.device(device) for name, device in placement.entries
    }
    model.__dict__[_STATE] = _State(handles, marked)


def _encoder(model: nn.Module) -> nn.Module | None:
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None
    get_encoder = getattr(model, "get_encoder", None)
    encoder = get_encoder() if get_encoder is not None else None
    return encoder if isinstance(encoder, nn.Module) else None
