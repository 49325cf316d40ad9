"""Tensors on virtual GPUs: each wraps a backing tensor on the CPU or on meta."""

from __future__ import annotations

import copy as copy_module
from collections.abc import Callable
from typing import Any

import torch

from duoka.errors import VirtualDeviceError

from .naming import NAME, PLACE
from .world import StorageBlock, VirtualGpu, arm, blocks_by_storage, thread

_make = torch.Tensor._make_wrapper_subclass


Runner = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def _refuse_unregistered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse operations before `install_operators`."""
    raise AssertionError("no operators installed: the backend isn't registered")


_runner: Runner = _refuse_unregistered


def install_operators(run: Runner) -> None:
    """Set the function that runs every operation; this module doesn't import the operators."""
    global _runner
    _runner = run


# A wrapper subclass (`torch.Tensor._make_wrapper_subclass`) is two tensors in one:
#
#   VirtualTensor   shape, strides, dtype, device vgpu:1, requires_grad and grad_fn; no memory
#     .backing      a plain tensor of the same geometry on the CPU or on meta, with the numbers
#     .block        the storage, shared with views: its GPU, and the bytes charged to the allocator
#
# Autograd works on the outer tensor, before `__torch_dispatch__`. So a handler sees an operator
# below autograd, computes with backing tensors, which have no autograd history, and wraps the
# result; the outer result gets its grad_fn afterwards.
class VirtualTensor(torch.Tensor):
    """A tensor on a virtual GPU.

    Operations and factories make it (``torch.empty(2, device="vgpu:0")``), not the constructor.
    `backing` has the values, or on the meta device the geometry alone; `block` is the storage,
    shared with views.
    """

    backing: torch.Tensor
    block: StorageBlock

    # Subclass handling in Python would only cost time: `__torch_dispatch__` does everything.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _runner(func, args, kwargs or {})

    @property
    def gpu(self) -> VirtualGpu:
        """The GPU of the tensor."""
        return self.block.gpu

    @property
    def storage_id(self) -> int:
        """The number of the tensor's storage, as reported to listeners."""
        return self.block.id

    @property
    def storage_bytes(self) -> int:
        """The bytes of the tensor's whole storage, not rounded."""
        return self.block.num_bytes

    @property
    def data(self) -> torch.Tensor:
        """The tensor without its autograd history, as in torch."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        assert isinstance(value, VirtualTensor), "torch accepts only its own kind of tensor"
        self.backing = value.backing.detach()
        self.block = value.block

    @property
    def is_nested(self) -> bool:  # type: ignore[override]
        """Return False, and arm this thread: torch reads the property first in backward."""
        arm()
        return False

    def new_tensor(self, data: Any, **options: Any) -> torch.Tensor:  # type: ignore[override]
        """Make a tensor of data on this tensor's device; torch's own method would use GPU 0."""
        options = {"dtype": self.dtype, "device": self.device, **options}
        return torch.tensor(data, **options)

    def __format__(self, format_spec: str) -> str:
        return format(self.item() if self.dim() == 0 else repr(self), format_spec)

    def tolist(self) -> Any:
        """Return the values as nested lists, as in torch."""
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Raise CUDA's TypeError, unless forced or settled by an arbiter; then copy to the CPU."""
        if force:
            return self.detach().cpu().resolve_conj().resolve_neg().numpy()
        error = TypeError(
            f"can't convert {self.device} device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )
        if thread.arbiter is None:
            raise error
        return thread.arbiter.bring_to_cpu(error, self).numpy()

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy()

    def data_ptr(self) -> int:
        """Return a stand-in for the address, equal for tensors that begin at the same memory."""
        address = self.block.address
        return address + int(self.storage_offset()) * self.element_size() if address else 0

    def untyped_storage(self) -> VirtualStorage:  # type: ignore[override]
        """Return the storage, with its identity and size alone."""
        return VirtualStorage(self.block)

    def storage(self) -> Any:
        """Raise VirtualDeviceError; `untyped_storage` gives identity and size."""
        raise VirtualDeviceError(
            "a virtual GPU's storage has no address in this process",
            hint="use untyped_storage() for its identity and size, or cpu() for its content",
        )

    _typed_storage = storage

    def share_memory_(self) -> VirtualTensor:
        """Do nothing, as for a tensor on CUDA."""
        return self

    def is_shared(self) -> bool:
        """Return True, as for a tensor on CUDA."""
        return True

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError(f"a tensor on {self.device} can't be exported: it has no address")

    def pin_memory(self, device: Any = None) -> torch.Tensor:
        """Raise CUDA's error: only CPU tensors can be pinned."""
        raise RuntimeError(f"cannot pin a tensor on {self.device}: only dense CPU tensors can be")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        backing = self.backing.detach()
        notes = [f"device='{self.device}'"]
        notes += ["no data"] if backing.is_meta else []
        if self.grad_fn is not None:
            notes.append(f"grad_fn=<{type(self.grad_fn).__name__}>")
        elif self.requires_grad:
            notes.append("requires_grad=True")
        text = repr(backing).replace("device='meta', ", "")
        text = f"{text[:-1]}, {', '.join(notes)})"
        is_parameter = isinstance(self, torch.nn.Parameter)
        return f"Parameter containing:\n{text}" if is_parameter else text

    # Pickled as torch pickles tensors of devices without a storage in Python: as a CPU copy and the
    # name of the device. ``weights_only`` accepts this form, and ``map_location="cpu"`` works.
    # Tensors that share memory share it in the file, too.
    def __reduce_ex__(self, proto: Any) -> Any:
        backing = self.backing.detach()
        if backing.is_meta:
            raise VirtualDeviceError(
                f"a tensor of shape {tuple(self.shape)} on {self.device} has no values to save: "
                "its GPU holds no data",
                hint='use virtual GPUs with data="cpu"',
            )
        rebuild: Any = torch._utils._rebuild_device_tensor_from_cpu_tensor
        state = (backing.cpu(), self.dtype, str(self.device), self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            inner = _Reduced(rebuild, (*state[:3], False))
            return torch._utils._rebuild_parameter, (inner, self.requires_grad, {})
        return rebuild, state

    def __copy__(self) -> VirtualTensor:
        copy = wrap(self.backing.detach(), self.block)
        copy.requires_grad_(self.requires_grad)
        vars(copy).update({**vars(self), "backing": copy.backing})
        return copy

    def __deepcopy__(self, memo: dict[int, Any]) -> VirtualTensor:
        return _deepcopy(self, memo)

    # `nn.Module.to` swaps tensors in place if they have these two methods, which keeps ties and the
    # optimizer's references, as a move to CUDA does. Code that saves tensors finds the backing
    # tensor by the first method; only compilers call the second one.
    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["backing"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any
    ) -> VirtualTensor:
        raise VirtualDeviceError(
            "torch.compile and torch.export don't support virtual GPUs",
            hint="run the model without compilation",
        )


class VirtualStorage:
    """The identity and size of a storage on a virtual GPU, for code that looks for ties."""

    def __init__(self, block: StorageBlock) -> None:
        self._block = block
        self.device = block.gpu.device

    @property
    def _cdata(self) -> int:
        return self._block.id

    def data_ptr(self) -> int:
        """Return a stand-in for the address."""
        return self._block.address

    def nbytes(self) -> int:
        """Return the size in bytes."""
        return self._block.num_bytes

    size = __len__ = nbytes


def wrap(backing: torch.Tensor, block: StorageBlock) -> VirtualTensor:
    """Wrap a backing tensor as a tensor on the GPU of a block; nothing is charged."""
    tensor: VirtualTensor = _make(
        VirtualTensor,
        backing.shape,
        strides=backing.stride(),
        storage_offset=backing.storage_offset(),
        dtype=backing.dtype,
        device=block.gpu.device,
    )
    tensor.backing = backing
    tensor.block = block
    # Conjugation and negation are flags that torch resolves lazily: the outer tensor needs them.
    if backing.is_conj():
        torch._C._set_conj(tensor, True)
    if backing.is_neg():
        torch._C._set_neg(tensor, True)
    return tensor


def place(backing: torch.Tensor, gpu: VirtualGpu) -> VirtualTensor:
    """Wrap a backing tensor as a tensor on a GPU, and charge its storage if new there."""
    if backing.layout is not torch.strided or backing.is_quantized:
        raise VirtualDeviceError(
            f"virtual GPUs hold dense tensors, not {backing.layout} of {backing.dtype}",
            hint="keep sparse and quantized tensors on the CPU",
        )
    # A storage that has a block already belongs to a view or an argument itself, even where the
    # schema doesn't say so (`_unsafe_view`): nothing is charged.
    storage = backing.untyped_storage()
    existing = blocks_by_storage.get(storage._cdata)
    block = existing() if existing is not None else None
    if block is None or block.gpu is not gpu:
        block = StorageBlock(gpu, storage)
    return wrap(backing, block)


def resync(tensor: VirtualTensor) -> None:
    """Update a tensor and its charge after its backing tensor was resized in place."""
    # The outer tensor's sizes and strides can't be assigned, but `.data` takes another tensor's.
    tensor.block.recharge()
    torch.Tensor.data.__set__(tensor, wrap(tensor.backing, tensor.block))  # type: ignore[attr-defined]


def _deepcopy(tensor: VirtualTensor, memo: dict[int, Any]) -> VirtualTensor:
    """Copy a tensor, its gradient and attributes; copies of views share one copied storage."""
    if id(tensor) in memo:
        existing: VirtualTensor = memo[id(tensor)]
        return existing
    if not tensor.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
            "protocol at the moment."
        )
    block: StorageBlock | None = memo.get(id(tensor.block))
    if block is None:
        block = StorageBlock(tensor.gpu, tensor.block.storage.clone())
        memo[id(tensor.block)] = block
    data = torch.empty(0, dtype=tensor.dtype, device=tensor.backing.device)
    data.set_(block.storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    copy = wrap(data, block)
    memo[id(tensor)] = copy
    copy.requires_grad_(tensor.requires_grad)
    if tensor.grad is not None:
        copy.grad = copy_module.deepcopy(tensor.grad, memo)
    for name, value in vars(tensor).items():
        if name not in ("backing", "block"):
            setattr(copy, name, copy_module.deepcopy(value, memo))
    return copy


def _refuse_to_restore(storage: Any, location: str) -> None:
    """Refuse a virtual GPU as `map_location`; return None for locations of other devices."""
    if location.startswith((NAME, PLACE)):
        raise VirtualDeviceError(
            f"torch.load can't read into the memory of {location}",
            hint='load with map_location="cpu", then copy',
        )


def install() -> None:
    """Make `torch.load` refuse ``map_location="vgpu:0"``."""
    torch.serialization.register_package(5, lambda storage: None, _refuse_to_restore)


class _Reduced:
    """An object that is pickled as a call of a function."""

    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call
