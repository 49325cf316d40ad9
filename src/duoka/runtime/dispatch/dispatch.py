"""Dispatch: the only place where activations change device.

A dispatched model is the same object with its parameters and buffers on the devices of the
placement, and with movers on its blocks, which bring a call's arguments to the block's device.
Outputs go back to the device of the inputs. Nothing else changes: parameter names, ties, state dict
and the model's code stay.

Offloaded modules keep their weights in the host's memory; each call streams them to the device.

This module doesn't know how a placement is found, nor how weights are read.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from duoka.models.quantization import empty_weight, is_composed
from duoka.planner.placement import Placement

from .copies import try_copies
from .install_movers import Installed, encoder_of, install, streamed_modules
from .offload import Streamer
from .place_tensors import devices_by_name, move_tensors, on_host, refuse_meta

_STATE = "_duoka_dispatch"
_AUTO_COMPILE = "_valid_auto_compile_criteria"

Model = TypeVar("Model", bound=nn.Module)


def dispatch(
    model: Model,
    placement: Placement,
    *,
    empty: bool = False,
    offloaded: Sequence[str] = (),
    has_movers: bool = False,
    outputs_stay: bool = False,
) -> Model:
    """Place a model on the devices of a placement, which replaces an earlier placement.

    Parameters
    ----------
    model : nn.Module
    placement : Placement
    empty : bool
        Allocate parameters without data (on the meta device), and don't fill them.
    offloaded : sequence of str
        Modules, in the order in which they run, whose weights stay in the host's memory: each call
        of a module copies its weights into a shared buffer on the module's device.
    has_movers : bool
        Put movers on blocks even if all are on one device and none is offloaded, for model code
        that makes arguments of blocks elsewhere. Otherwise such a model has only its own arguments
        moved to the device.
    outputs_stay : bool
        Leave outputs where they were made.

    Raises
    ------
    PlacementError, ModelError
        If the model or placement is refused, before anything has been moved.
    """
    devices = devices_by_name(model, placement)
    hosts = on_host(model, devices, offloaded)
    if not empty:
        refuse_meta(model)
    undispatch(model)
    try_copies(devices.values())
    if empty:  # offloaded weights are never filled, and stay on meta without memory
        move_tensors(model, {name: at for name, at in devices.items() if name not in hosts})
    else:
        move_tensors(model, {**devices, **hosts})
    has_movers = has_movers or bool(offloaded) or len(set(devices.values())) > 1
    installed = install(model, placement, devices, on_blocks=has_movers, outputs_stay=outputs_stay)
    if has_movers and hasattr(model, _AUTO_COMPILE):
        # With a static cache `generate` would compile the model, and movers can't be compiled.
        model.__dict__[_AUTO_COMPILE] = _never
    _mark_as_placed(model, placement, installed, stream(model, offloaded, devices))
    return model


def stream(
    model: nn.Module, offloaded: Sequence[str], devices: Mapping[str, torch.device]
) -> list[Streamer]:
    """Make the modules of `offloaded` stream their weights to their devices at each call."""
    by_device = streamed_modules(model, offloaded, devices)
    streamers = [Streamer(device, modules) for device, modules in by_device.items()]
    for streamer in streamers:
        streamer.install()
    return streamers


def undispatch(model: nn.Module) -> None:
    """Undo `dispatch`; parameters stay where they are."""
    state = model.__dict__.pop(_STATE, None)
    if state is None:
        return
    state.installed.remove(model)
    for streamer in state.streamers:
        streamer.remove()
    for module in state.marked:
        module.__dict__.pop("_hf_hook", None)
    for name in ("hf_device_map", _AUTO_COMPILE):
        model.__dict__.pop(name, None)


def without_data(model: nn.Module) -> nn.Module:
    """Copy a model without dispatch, with its parameters on meta; buffers keep their data."""
    memo: dict[int, Any] = {
        id(buffer): buffer.cpu()
        for buffer in model.buffers()
        if buffer.device.type not in ("cpu", "meta")
    }
    memo |= {
        id(parameter): nn.Parameter(_on_meta(parameter), requires_grad=parameter.requires_grad)
        for parameter in model.parameters()
    }
    with torch.no_grad():
        copied = copy.deepcopy(model, memo)
    undispatch(copied)
    return copied


def _on_meta(parameter: nn.Parameter) -> torch.Tensor:
    """Return a parameter's shape on the meta device; a quantized one stays quantized."""
    meta = torch.device("meta")
    if is_composed(parameter):
        return empty_weight(parameter, meta)
    return torch.empty_like(parameter, device=meta)


class _DispatchState(NamedTuple):
    """The additions to a dispatched model, for `undispatch` to remove."""

    installed: Installed
    marked: list[nn.Module]
    streamers: list[Streamer]


class _EncoderMark:
    """Keeps transformers' `generate` from installing a hook of accelerate on the encoder."""

    io_same_device = False


def _mark_as_placed(
    model: nn.Module, placement: Placement, installed: Installed, streamers: list[Streamer]
) -> None:
    """Mark the model as placed for transformers.

    Its Trainer then leaves the model where it is, and a static cache is allocated layer by layer.
    Devices are `torch.device` objects: transformers reads the string "cpu" as "offloaded".
    """
    marked = []
    encoder = encoder_of(model)
    if encoder is not None and "_hf_hook" not in encoder.__dict__:
        encoder.__dict__["_hf_hook"] = _EncoderMark()
        marked.append(encoder)
    model.__dict__["hf_device_map"] = {
        name: torch.device(device) for name, device in placement.entries
    }
    model.__dict__[_STATE] = _DispatchState(installed, marked, streamers)


def _never(*args: object, **kwargs: object) -> bool:
    return False
