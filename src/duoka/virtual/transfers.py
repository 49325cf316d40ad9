"""Operators that may change device: copies, and factories like another tensor."""

from __future__ import annotations

from typing import Any

import torch

from duoka.errors import VirtualDeviceError

from . import known_values, op_call
from .naming import is_virtual
from .operators import handlers
from .tensor import VirtualTensor, place, resync
from .world import VirtualGpu, active_world, thread

_aten = torch.ops.aten
_CONSTANT = frozenset(
    getattr(_aten, name).default
    for name in ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
)
_RANDOM_OR_EMPTY = ("empty_like", "rand_like", "randn_like", "randint_like", "new_empty")
_LIKE = (
    *(*_CONSTANT, _aten.randint_like.low_dtype, _aten.new_empty_strided.default),
    *(getattr(_aten, name).default for name in _RANDOM_OR_EMPTY),
)


def gpu_of(device: torch.device | None, near: VirtualGpu | None = None) -> VirtualGpu:
    """Find the GPU of a device in the world of `near`, or in the active world without `near`.

    Without a device `near` itself is meant, or this thread's current GPU.
    """
    world = active_world() if near is None else near.world
    if device is None:
        return world.gpu(thread.current_index) if near is None else near
    return world.gpu(thread.current_index if device.index is None else device.index)


def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy a tensor to a device or dtype; unknown values raise UnknownValueError on the way out."""
    tensor: VirtualTensor = args[0]
    plain, gpu = op_call.unwrap(func, args, kwargs)
    backing = plain.args[0]
    device, options = _split_options(kwargs)
    if device is not None and not is_virtual(device):
        if backing.is_meta and device.type != "meta":
            raise known_values.unknown_value(f"a copy of {tuple(tensor.shape)} to {device}")
        return func(backing, device=device, **options)
    return place(func(backing, **options), gpu_of(device, gpu))


def _split_options(kwargs: dict[str, Any]) -> tuple[torch.device | None, dict[str, Any]]:
    """Split options into the device, None by default, and the options of the backing tensor."""
    options = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
    return kwargs.get("device"), options


# from \ to    known                    unknown          GPU with real data
# known        copied                   shape alone      copied
# unknown      target becomes unknown   shape alone      error: no data
#
# A copy of unknown values to the CPU is a read, and raises UnknownValueError.
def _copy_into(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `copy_`, between any two devices, as on CUDA; the target keeps its dtype."""
    target, source = args[0], args[1]
    target_backing, source_backing = _backing(target), _backing(source)
    if isinstance(target, VirtualTensor):
        if source_backing.is_meta and not target.gpu.meta:
            raise NotImplementedError("Cannot copy out of meta tensor; no data!")
        if source_backing.is_meta and not target_backing.is_meta:
            known_values.forget(target)
            target_backing = target.backing
        if target_backing.is_meta and not source_backing.is_meta:
            source_backing = known_values.without_values(source_backing)
    elif source_backing.is_meta and not target_backing.is_meta:
        raise known_values.unknown_value(f"a copy of {tuple(source.shape)} to {target.device}")
    func(target_backing, source_backing, *args[2:], **kwargs)
    return target


def _backing(tensor: torch.Tensor) -> torch.Tensor:
    """Return a virtual tensor's backing tensor, and any other tensor itself."""
    if not isinstance(tensor, VirtualTensor):
        return tensor
    return tensor.backing if tensor.block.unknown is None else known_values.current(tensor)


def _make_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a factory like `zeros_like` or `new_full`; on meta, small results keep their values."""
    plain, gpu = op_call.unwrap(func, args, kwargs)
    device, options = _split_options(kwargs)
    if device is not None and not is_virtual(device):
        return func(*plain.args, device=device, **options)
    target = gpu_of(device, gpu)
    if not target.meta:
        return place(func(*plain.args, device=target.data_device, **options), target)
    no_generator = {key: value for key, value in options.items() if key != "generator"}
    shaped = func(*plain.args, device="meta", **no_generator)
    keeps = known_values.keeps_constant if func in _CONSTANT else known_values.keeps_values
    if keeps(shaped.dtype, shaped.numel()):
        return place(func(*plain.args, device="cpu", **options), target)
    return place(shaped, target)


def _set_storage(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `set_`: the target gets the storage and geometry of another virtual tensor."""
    target, source = args[0], args[1] if len(args) > 1 else None
    if not isinstance(target, VirtualTensor) or not isinstance(source, VirtualTensor):
        raise VirtualDeviceError(
            "set_ on a virtual GPU takes another virtual tensor, not a storage",
            hint="assign .data, or copy_ into the tensor",
        )
    func(target.backing, source.backing, *args[2:], **kwargs)
    target.block = source.block
    resync(target)
    return target


def _read_number(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Read a number, as `item` does; see `unknown_numbers_as` for unknown ones."""
    backing = _backing(args[0])
    if backing.is_meta:
        if thread.unknown_number is not None and backing.is_floating_point():
            return thread.unknown_number
        raise known_values.unknown_value("a read of a value")
    return func(backing)


def install() -> None:
    """Register the handlers of this module."""
    handlers[_aten._to_copy.default] = _to_copy
    handlers[_aten.copy_.default] = _copy_into
    for operator in _LIKE:
        handlers[operator] = _make_like
    for source in ("source_Tensor", "source_Storage"):
        for overload in (source, f"{source}_storage_offset"):
            handlers[getattr(_aten.set_, overload)] = _set_storage
    handlers[_aten._local_scalar_dense.default] = _read_number
    handlers[_aten.is_pinned.default] = lambda *_: False
    handlers[_aten.record_stream.default] = lambda *_: None
