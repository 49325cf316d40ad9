"""Registration of virtual GPUs with torch: once per process, on first use."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.optim import optimizer
from torch.utils import _foreach_utils, backend_registration

from duoka.errors import VirtualDeviceError
from duoka.hardware.gpu_generation import GpuGeneration

from . import (
    attention,
    autocast,
    cuda_only,
    device_module,
    factories,
    operators,
    temporaries,
    tensor,
    transfers,
)
from .device_module import give_name
from .naming import PLACE
from .world import World, arm, armed, set_process_world, use_world

_ENGINE = "_engine_run_backward"
_lock = threading.Lock()
_registered = False


def set_gpus(
    capacities_bytes: Sequence[int | None],
    *,
    data: str = "cpu",
    generation: GpuGeneration | None = None,
) -> World:
    """Configure the virtual GPUs of this process.

    Parameters
    ----------
    capacities_bytes : sequence of int or None
        The bytes that each GPU's allocator may reserve; None for no limit.
    data : str
        Where the backing tensors are: "cpu" (real values), "meta" (shapes without values), or
        "even" (as "meta", but choices by unknown scores, of experts above all, are made evenly, so
        that code can read them).
    generation : GpuGeneration, optional
        The differences between generations of GPUs: the size of the workspaces that stay allocated
        from a GPU's first matrix product on, and from the first one in backward, and the attention
        kernels. By default Ampere to Ada: 8.1 MiB, or as ``CUBLAS_WORKSPACE_CONFIG`` says. And
        whether the allocator has expandable segments; by default as ``PYTORCH_ALLOC_CONF`` says.

    Returns
    -------
    World
        The GPUs, with their memory statistics.

    Raises
    ------
    VirtualDeviceError
        If another backend holds torch's place for additional devices.

    Examples
    --------
    >>> world = set_gpus([2**30, None])
    >>> x = torch.ones(2, 3, device="vgpu:1")
    >>> (x + x).sum().item(), world.memory_allocated(1)
    (12.0, 512)
    """
    register()
    give_name()
    arm()
    world = _make_world(capacities_bytes, data, generation)
    set_process_world(world)
    return world


@contextmanager
def gpus(
    capacities_bytes: Sequence[int | None],
    *,
    data: str = "cpu",
    generation: GpuGeneration | None = None,
) -> Iterator[World]:
    """Use other virtual GPUs in this thread, inside the scope; those of the process stay.

    Examples
    --------
    >>> with gpus([None], data="meta") as world:
    ...     weights = torch.empty(2**40, dtype=torch.bfloat16, device="vgpu:0")
    >>> world.memory_allocated(0) == 2**41
    True
    """
    register()
    give_name()
    with unnamed_gpus(capacities_bytes, data=data, generation=generation) as world:
        yield world


@contextmanager
def unnamed_gpus(
    capacities_bytes: Sequence[int | None],
    *,
    data: str = "cpu",
    generation: GpuGeneration | None = None,
) -> Iterator[World]:
    """Use virtual GPUs as `gpus` does, without the name that breaks backward on CUDA: see `naming`.

    Get their devices from `virtual_device`: torch may not know the name ``vgpu`` here.
    """
    register()
    with armed(), use_world(_make_world(capacities_bytes, data, generation)) as world:
        yield world


def _make_world(
    capacities_bytes: Sequence[int | None], data: str, generation: GpuGeneration | None
) -> World:
    """Make a world of virtual GPUs, after checking the arguments."""
    if data not in ("cpu", "meta", "even"):
        raise VirtualDeviceError(
            f"virtual GPUs can't keep their data on {data!r}", hint="use cpu, meta or even"
        )
    for capacity in capacities_bytes:
        if capacity is not None and capacity <= 0:
            raise VirtualDeviceError(f"a virtual GPU can't have a capacity of {capacity} bytes")
    return World(capacities_bytes, data, generation or GpuGeneration())


def register() -> None:
    """Register virtual GPUs with torch, unless done already; `give_name` names them ``vgpu``."""
    global _registered
    with _lock:
        if not _registered:
            _register()
            _registered = True


def _register() -> None:
    """Register device module, operators and autograd's error handling with torch."""
    holder = torch._C._get_privateuse1_backend_name()
    if holder != PLACE:
        raise VirtualDeviceError(
            f"the backend {holder!r} already occupies PyTorch's only slot for additional devices",
            hint="use virtual GPUs in a process without it",
        )
    backend_registration._setup_privateuseone_for_python_backend(backend_module=device_module)
    tensor.install_operators(operators.run)
    for module in (transfers, tensor, factories, cuda_only, temporaries, attention, autocast):
        module.install()
    # Optimizers and gradient clipping then work on lists of tensors, as on CUDA, and cost the same.
    for types in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        types.append(tensor.VirtualTensor)
    vars(torch.autograd)[_ENGINE] = operators.with_failures(vars(torch.autograd)[_ENGINE])
