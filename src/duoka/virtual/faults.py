"""Calls with tensors of several devices: CUDA's exceptions, and its errors otherwise.

This is the one place that judges devices. Operators come here only when not every tensor of a call
is on one and the same GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .tensor import VirtualTensor


class MixedDevicesError(RuntimeError):
    """An operation on tensors of several devices, where CUDA refuses.

    `tensors` are those of the call that must be on one device, `written` the one that it writes
    into, `for_cpu` the one that it takes from the CPU alone.
    """

    for_cpu: torch.Tensor | None = None

    def __init__(
        self,
        message: str,
        func: Any,
        tensors: list[torch.Tensor],
        written: torch.Tensor | None = None,
    ) -> None:
        super().__init__(message)
        self.func = func
        self.tensors = tensors
        self.written = written


_INDEXING = frozenset({"index", "_unsafe_index", "_unsafe_index_put"})
_INDEXING |= {"index_put", "index_put_", "_index_put_impl_"}
_TWO_DEVICES = frozenset({"cat", "stack", "where", "mse_loss", "smooth_l1_loss", "huber_loss"})
# Arguments that CUDA's operators take from the CPU.
_ON_CPU = {
    "_pack_padded_sequence": "lengths",
    "_pack_padded_sequence_backward": "batch_sizes",
    "_pad_packed_sequence": "batch_sizes",
}
# CUDA's embedding is a selection of rows, and its error says so.
_SPOKEN = {"embedding": ("index_select", {"indices": "index"})}
# Their `value` is read, as `item` reads it, wherever it is.
_READS_VALUE = frozenset({"fill", "fill_", "masked_fill", "masked_fill_"})
_READS_VALUE |= {"index_fill", "index_fill_"}
_OWN_WORDS = {
    **dict.fromkeys(("masked_fill", "masked_fill_", "masked_select"), "mask"),
    **dict.fromkeys(("index_fill", "index_fill_"), "index"),
    **dict.fromkeys(("index_add", "index_add_"), "source"),
}


# The tensors of a call are compared with the first of them, but for those that CUDA accepts:
#
#   x + c                       c on the CPU, 0 dims: read as a number (pointwise operators)
#   torch.where(m, x, c)        c anywhere, 0 dims: moved
#   x.masked_fill(m, c)         c anywhere, 0 dims: read as `item` reads it
#   x[i]                        i on the CPU: copied; on another GPU: refused
#   x[i] = c                    c anywhere, 0 dims
#   pack_padded_sequence(x, n)  n on the CPU: required
def check_devices(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let a call pass whose tensors are on several devices if CUDA would; raise as CUDA does."""
    name = func._schema.name.removeprefix("aten::")
    tensors = list(_named_tensors(func, args, kwargs))
    arguments = [part for part in func._schema.arguments if part.alias_info is not None]
    written = {argument.name for argument in arguments if argument.alias_info.is_write}
    if name in _INDEXING:
        _check_indexing(func, tensors, written)
        return
    scalars_pass = torch.Tag.pointwise in func.tags or name.startswith("_foreach")
    checked_tensors = [
        (argument, tensor)
        for argument, tensor in tensors
        if not (_ON_CPU.get(name) == argument and tensor.device.type == "cpu")
        and not (name in _READS_VALUE and argument == "value" and tensor.dim() == 0)
        and not (
            (tensor.dim() == 0 and argument not in written)
            and (name == "where" or (scalars_pass and tensor.device.type == "cpu"))
        )
    ]
    for argument, tensor in checked_tensors[1:]:
        _, base = checked_tensors[0]
        if not _on_same_device(base, tensor):
            text = _text(func, name, argument, base, tensor)
            raise _mixed(text, func, checked_tensors, written)


def _mixed(
    text: str, func: Any, tensors: list[tuple[str, torch.Tensor]], written: set[str]
) -> MixedDevicesError:
    target = next((tensor for argument, tensor in tensors if argument in written), None)
    return MixedDevicesError(text, func, [tensor for _, tensor in tensors], target)


def _check_indexing(func: Any, tensors: list[tuple[str, torch.Tensor]], written: set[str]) -> None:
    _, self = tensors[0]
    for argument, tensor in tensors[1:]:
        if _on_same_device(self, tensor):
            continue
        if argument == "indices" and tensor.device.type != "cpu":
            text = "indices should be either on cpu or on the same device as the indexed tensor "
            raise _mixed(f"{text}({self.device})", func, tensors, written)
        if argument != "indices" and tensor.dim() > 0:
            raise _mixed(_two_devices(self, tensor), func, tensors, written)


def _text(func: Any, name: str, argument: str, base: torch.Tensor, tensor: torch.Tensor) -> str:
    if argument == _OWN_WORDS.get(name):
        return (
            f"{name}: expected self and {argument} to be on the same device, but got {argument} "
            f"on {tensor.device} and self on {base.device}"
        )
    if torch.Tag.pointwise in func.tags or name in _TWO_DEVICES:
        return _two_devices(base, tensor)
    name, spoken = _SPOKEN.get(name, (name, {}))
    argument = spoken.get(argument, argument)
    return (
        f"Expected all tensors to be on the same device, but got {argument} is on "
        f"{tensor.device}{_world_note(base, tensor)}, different from other tensors on "
        f"{base.device} (when checking argument in method wrapper_vgpu_{name})"
    )


def _two_devices(base: torch.Tensor, tensor: torch.Tensor) -> str:
    return (
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{base.device} and {tensor.device}{_world_note(base, tensor)}!"
    )


def _world_note(base: torch.Tensor, tensor: torch.Tensor) -> str:
    return " (of another world)" if base.device == tensor.device else ""


def _on_same_device(base: torch.Tensor, tensor: torch.Tensor) -> bool:
    if isinstance(base, VirtualTensor) and isinstance(tensor, VirtualTensor):
        return base.gpu is tensor.gpu
    return base.device == tensor.device


def _named_tensors(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    names = (argument.name for argument in func._schema.arguments)
    for name, value in (*zip(names, args, strict=False), *kwargs.items()):
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, torch.Tensor):
                yield name, item
