"""Device checks: CUDA's errors for mixed devices, and the mixes that CUDA accepts.

This is the only module that checks devices. A call is checked only if its tensors aren't all on
the same GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .tensor import VirtualTensor


class MixedDevicesError(RuntimeError):
    """Raised for an operation on tensors of several devices where CUDA refuses.

    `tensors` are the tensors of the call that must be on one device, and `written` is the tensor
    among them that the call writes to, None if it writes to none. `for_cpu` is the tensor that must
    be on the CPU, None for most calls.
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
# Operators with the error text of pointwise ones.
_TWO_DEVICES = frozenset({"cat", "stack", "where", "mse_loss", "smooth_l1_loss", "huber_loss"})
# Arguments that must be on the CPU.
_ON_CPU = {
    "_pack_padded_sequence": "lengths",
    "_pack_padded_sequence_backward": "batch_sizes",
    "_pad_packed_sequence": "batch_sizes",
}
# The names in CUDA's error, where they differ: its embedding is a selection of rows.
_REPORTED_NAMES = {"embedding": ("index_select", {"indices": "index"})}
# A single number as `value` may be on any device: it is read, as `item` reads it.
_READS_VALUE = frozenset({"fill", "fill_", "masked_fill", "masked_fill_"})
_READS_VALUE |= {"index_fill", "index_fill_"}
# Operators with an error text of their own, and the argument named in it.
_OWN_TEXTS = {
    **dict.fromkeys(("masked_fill", "masked_fill_", "masked_select"), "mask"),
    **dict.fromkeys(("index_fill", "index_fill_"), "index"),
    **dict.fromkeys(("index_add", "index_add_"), "source"),
}


# Every tensor of a call must be on the device of the first, except where CUDA accepts another:
#
#   x + c                       c on the CPU, 0 dims: read as a number (pointwise operators)
#   torch.where(m, x, c)        c anywhere, 0 dims: moved
#   x.masked_fill(m, c)         c anywhere, 0 dims: read as `item` reads it
#   x[i]                        i on the CPU: copied; on another GPU: refused
#   x[i] = c                    c anywhere, 0 dims
#   pack_padded_sequence(x, n)  n on the CPU: required
def check_devices(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise CUDA's error if CUDA would refuse a call for the devices of its tensors."""
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
            text = _message(func, name, argument, base, tensor)
            raise _mixed_devices_error(text, func, checked_tensors, written)


def _mixed_devices_error(
    text: str, func: Any, tensors: list[tuple[str, torch.Tensor]], written: set[str]
) -> MixedDevicesError:
    """Make the error; `tensors` have the names of their arguments, `written` is a set of names."""
    target = next((tensor for argument, tensor in tensors if argument in written), None)
    return MixedDevicesError(text, func, [tensor for _, tensor in tensors], target)


def _check_indexing(func: Any, tensors: list[tuple[str, torch.Tensor]], written: set[str]) -> None:
    """Check a call that indexes: indices may be on the CPU, and a written number anywhere."""
    _, self = tensors[0]
    for argument, tensor in tensors[1:]:
        if _on_same_device(self, tensor):
            continue
        if argument == "indices" and tensor.device.type != "cpu":
            text = "indices should be either on cpu or on the same device as the indexed tensor "
            raise _mixed_devices_error(f"{text}({self.device})", func, tensors, written)
        if argument != "indices" and tensor.dim() > 0:
            raise _mixed_devices_error(_two_devices_text(self, tensor), func, tensors, written)


def _message(func: Any, name: str, argument: str, base: torch.Tensor, tensor: torch.Tensor) -> str:
    """Return CUDA's text for a call whose argument isn't on the base tensor's device."""
    if argument == _OWN_TEXTS.get(name):
        return (
            f"{name}: expected self and {argument} to be on the same device, but got {argument} "
            f"on {tensor.device} and self on {base.device}"
        )
    if torch.Tag.pointwise in func.tags or name in _TWO_DEVICES:
        return _two_devices_text(base, tensor)
    name, arguments = _REPORTED_NAMES.get(name, (name, {}))
    argument = arguments.get(argument, argument)
    return (
        f"Expected all tensors to be on the same device, but got {argument} is on "
        f"{tensor.device}{_world_note(base, tensor)}, different from other tensors on "
        f"{base.device} (when checking argument in method wrapper_vgpu_{name})"
    )


def _two_devices_text(base: torch.Tensor, tensor: torch.Tensor) -> str:
    """Return CUDA's text for a pointwise operator on two devices."""
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
    """Yield the tensors of a call, each with the name of its argument."""
    names = (argument.name for argument in func._schema.arguments)
    for name, value in (*zip(names, args, strict=False), *kwargs.items()):
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, torch.Tensor):
                yield name, item
