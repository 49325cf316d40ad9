"""Devices as torch sees them: the CUDA GPUs that are there, virtual GPUs made real, and memory.

One function serves every kind of device, through torch's own module for it. What a GPU is called
by NVML, and who else uses it, isn't known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from . import virtual
from .errors import FleetError, VirtualDeviceError
from .fleet import Device, Fleet
from .units import format_bytes

CUDA_RESERVE_BYTES = 512 * 2**20
"""Left free on each GPU: what kernels and libraries load on first use, past torch's allocator."""

_NO_CUDA = 'without a GPU, try virtual ones: --gpus "virtual:2x24GiB"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What one device's allocator says, in bytes.

    Parameters
    ----------
    allocated_bytes, reserved_bytes : int
        In use by tensors, and taken from the device, now.
    peak_allocated_bytes, peak_reserved_bytes : int
        The most since the start, or since `reset_peaks`.
    """

    allocated_bytes: int
    peak_allocated_bytes: int
    reserved_bytes: int
    peak_reserved_bytes: int


def cuda_fleet(*, reserve_bytes: int = CUDA_RESERVE_BYTES) -> Fleet:
    """The CUDA GPUs that torch sees.

    Parameters
    ----------
    reserve_bytes : int
        Subtracted from each GPU's free memory before it becomes a budget. The context of this
        process is no part of it: it exists by then, and what it takes isn't free.

    Returns
    -------
    Fleet
        In torch's order. What torch holds without using it counts as free.

    Raises
    ------
    FleetError
        If torch sees no GPU, or none has that much free memory.
    """
    if not torch.cuda.is_available():
        raise FleetError("torch sees no CUDA GPU", hint=_NO_CUDA)
    found = [_cuda_device(index, reserve_bytes) for index in range(torch.cuda.device_count())]
    devices = tuple(device for device in found if device is not None)
    if not devices:
        raise FleetError(
            f"no GPU has more than {format_bytes(reserve_bytes)} of free memory",
            hint="see with nvidia-smi who uses them",
        )
    return Fleet(devices=devices)


def _cuda_device(index: int, reserve_bytes: int) -> Device | None:
    properties = torch.cuda.get_device_properties(index)
    free_bytes, _ = torch.cuda.mem_get_info(index)
    idle_bytes = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
    budget_bytes = free_bytes + idle_bytes - reserve_bytes
    if budget_bytes <= 0:
        return None
    uuid = getattr(properties, "uuid", None)
    return Device(
        name=f"cuda:{index}",
        budget_bytes=budget_bytes,
        product=properties.name,
        uuid=f"GPU-{uuid}" if uuid else "",
    )


def materialise(fleet: Fleet, *, data: str = "cpu") -> None:
    """Make sure that the devices of a fleet exist: virtual ones are made, others looked for.

    Virtual GPUs that are there already with the same budgets stay, and what is on them too.

    Parameters
    ----------
    fleet : Fleet
    data : str
        What holds the numbers of virtual GPUs: "cpu", "meta" (nothing does) or "cuda:N".

    Raises
    ------
    FleetError
        If torch doesn't see one of the devices.
    """
    virtual_budgets: dict[int, int] = {}
    for device in fleet.devices:
        kind, index = _parse(device.name)
        if kind == "vgpu":
            virtual_budgets[index] = device.budget_bytes
        elif kind == "cuda":
            _refuse_absent(index)
        elif kind != "cpu":
            raise FleetError(
                f"{device.name} is a device that duoka doesn't know", hint="it knows cuda:N and cpu"
            )
    if virtual_budgets:
        _make_virtual(virtual_budgets, data)


def _parse(name: str) -> tuple[str, int]:
    kind, _, index = name.partition(":")
    return kind, int(index or 0)


def _refuse_absent(index: int) -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        seen = f"it sees {count}" if count else "it sees no CUDA GPU"
        raise FleetError(f"cuda:{index} is not there for torch: {seen}", hint=_NO_CUDA)


def _make_virtual(budgets_bytes: dict[int, int], data: str) -> None:
    # A fleet may name vgpu:2 alone; those before it exist then, and can hold nothing.
    capacities = [budgets_bytes.get(index, 1) for index in range(max(budgets_bytes) + 1)]
    if _virtual_now() != (capacities, data):
        virtual.set_gpus(capacities, data=data)


def _virtual_now() -> tuple[list[int | None], str] | None:
    try:
        gpus = virtual.active_world().gpus
    except VirtualDeviceError:
        return None
    return [gpu.allocator.capacity_bytes for gpu in gpus], gpus[0].data


def memory(device: str | torch.device) -> Memory | None:
    """What a device's allocator says; None for a device without one, as the CPU is."""
    backend = _backend(device)
    if not hasattr(backend, "max_memory_reserved"):
        return None
    return Memory(
        allocated_bytes=backend.memory_allocated(device),
        peak_allocated_bytes=backend.max_memory_allocated(device),
        reserved_bytes=backend.memory_reserved(device),
        peak_reserved_bytes=backend.max_memory_reserved(device),
    )


def reset_peaks(device: str | torch.device) -> None:
    """Start the peaks of a device's memory again from what is in use now."""
    backend = _backend(device)
    if hasattr(backend, "reset_peak_memory_stats"):
        backend.reset_peak_memory_stats(device)


def synchronize(device: str | torch.device) -> None:
    """Wait until a device has done all that was asked of it."""
    backend = _backend(device)
    if hasattr(backend, "synchronize"):
        backend.synchronize(device)


def _backend(device: str | torch.device) -> Any:
    kind = torch.device(device).type
    return None if kind == "meta" else torch.get_device_module(kind)
