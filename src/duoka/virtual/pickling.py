"""What a virtual tensor looks like outside: printed, and in a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from duoka.errors import VirtualDeviceError

if TYPE_CHECKING:
    from .tensor import VirtualTensor


def reduce_tensor(tensor: VirtualTensor) -> Any:
    """Pickle a tensor as its CPU copy and the name of its device.

    The form is torch's own for devices that Python can't give a storage to; ``weights_only`` lets
    it pass, and ``map_location`` works. Tensors that share memory share it in the file.
    """
    backing = tensor.backing.detach()
    if backing.is_meta:
        raise VirtualDeviceError(
            f"a tensor of shape {tuple(tensor.shape)} on {tensor.device} has no numbers to save: "
            "its GPU holds meta data",
            hint='use virtual GPUs with data="cpu"',
        )
    rebuild: Any = torch._utils._rebuild_device_tensor_from_cpu_tensor
    state = (backing.cpu(), tensor.dtype, str(tensor.device), tensor.requires_grad)
    if isinstance(tensor, torch.nn.Parameter):
        inner = _Reduced(rebuild, (*state[:3], False))
        return torch._utils._rebuild_parameter, (inner, tensor.requires_grad, {})
    return rebuild, state


class RestoredStorage(torch.UntypedStorage):
    """A storage from a file that is to become memory of a virtual GPU.

    It still lies on the host, says the device that it is meant for, and is taken over when torch
    makes a tensor of it (``aten::set_``, in `transfers`).
    """

    meant_for: torch.device

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device that the storage is meant for."""
        return self.meant_for


def _restore(storage: Any, location: str) -> Any:
    if not location.startswith("vgpu"):
        return None
    # The class is exchanged, not the object: the bytes aren't copied.
    storage.__class__ = RestoredStorage
    assert isinstance(storage, RestoredStorage)
    storage.meant_for = torch.device(location)
    return storage


def install() -> None:
    """Teach `torch.load` what ``map_location="vgpu:0"`` means."""
    torch.serialization.register_package(5, lambda storage: None, _restore)


class _Reduced:
    """An object that pickles as a call."""

    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def text_of(tensor: VirtualTensor) -> str:
    """Print a tensor as torch prints one on a device."""
    backing = tensor.backing.detach()
    notes = [f"device='{tensor.device}'"]
    if backing.is_meta:
        notes.append("no data")
    if tensor.grad_fn is not None:
        notes.append(f"grad_fn=<{type(tensor.grad_fn).__name__}>")
    elif tensor.requires_grad:
        notes.append("requires_grad=True")
    text = repr(backing.cpu() if backing.is_cuda else backing).replace("device='meta', ", "")
    text = f"{text[:-1]}, {', '.join(notes)})"
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return f"Parameter containing:\n{text}" if is_parameter else text
