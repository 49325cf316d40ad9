"""Devices in torch: creates virtual GPUs, checks real GPUs, and queries the memory of both.

Each function serves every type of device, through torch's module for that type. This module doesn't
detect a machine's GPUs or the processes on them: `Fleet.detect` queries the driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from duoka import virtual
from duoka.errors import FleetError, VirtualDeviceError
from duoka.forecast.allocator import refuse_options
from duoka.hardware import cuda_driver
from duoka.hardware.device import Device
from duoka.hardware.fleet import Fleet
from duoka.hardware.gpu_generation import GpuGeneration
from duoka.report.measured import PeakBytes

_NO_CUDA = 'without a GPU, use virtual ones: --gpus "virtual:2x24GiB"'


def materialise(fleet: Fleet, *, data: str = "cpu") -> None:
    """Create the virtual GPUs of a fleet, and check that torch has its other devices.

    Virtual GPUs that exist with the same budgets stay, with the tensors on them.
    """
    virtual_budgets: dict[int, int] = {}
    if any(name.startswith("cuda") for name in fleet.names):
        refuse_options()
    for device in fleet.devices:
        kind, index = _parse(device.name)
        if kind == "vgpu":
            virtual_budgets[index] = device.budget_bytes
        elif kind == "cuda":
            _refuse_absent(index)
            _refuse_changed(device, index)
        elif kind != "cpu":
            raise FleetError(
                f"{device.name} is not a supported device", hint="torch supports cuda:N and cpu"
            )
    if virtual_budgets:
        _make_virtual(virtual_budgets, data, fleet.gpu_generation)


def give_back() -> None:
    """Release the reserved but unallocated memory of CUDA's allocator to the driver.

    Do nothing without CUDA, and before CUDA has started.
    """
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _parse(name: str) -> tuple[str, int]:
    """Split a device's name into its type and its index, 0 by default."""
    kind, _, index = name.partition(":")
    return kind, int(index or 0)


def _refuse_absent(index: int) -> None:
    """Raise FleetError if torch has no CUDA GPU with this index."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        gpus = f"it sees {count}" if count else "it sees no CUDA GPU"
        raise FleetError(f"torch has no cuda:{index}: {gpus}", hint=_NO_CUDA)


def _refuse_changed(device: Device, index: int) -> None:
    """Raise FleetError if torch's GPU has another UUID than the plan's: CUDA's indices change."""
    if not device.uuid:
        return  # a declared device: any GPU may serve
    properties = torch.cuda.get_device_properties(index)
    if device.uuid.lower().startswith("mig-"):
        # torch may report the UUID of the whole GPU; the driver reports that of the instance.
        visible = cuda_driver.visible_uuids()
        uuid_here = f"MIG-{visible[index]}" if index < len(visible) else ""
    else:
        uuid_here = f"GPU-{properties.uuid}"
    if uuid_here.lower() != device.uuid.lower():
        raise FleetError(
            f"{device.name} is a different GPU in torch: torch has {properties.name} "
            f"({uuid_here}), the plan has {device.product} ({device.uuid})",
            hint="detect the GPUs in the process that uses them, and don't change "
            "CUDA_VISIBLE_DEVICES after CUDA has started",
        )


def _make_virtual(budgets_bytes: dict[int, int], data: str, generation: GpuGeneration) -> None:
    """Create virtual GPUs, unless they exist with the same capacities, data and generation."""
    # A fleet may name vgpu:2 alone; vgpu:0 and vgpu:1 then exist with a capacity of one byte.
    capacities = [budgets_bytes.get(index, 1) for index in range(max(budgets_bytes) + 1)]
    if _current_virtual_gpus() != (capacities, data, generation):
        virtual.set_gpus(capacities, data=data, generation=generation)


def _current_virtual_gpus() -> tuple[list[int | None], str, GpuGeneration] | None:
    """Return capacities, data and generation of the virtual GPUs; None without virtual GPUs."""
    try:
        world = virtual.active_world()
    except VirtualDeviceError:
        return None
    capacities = [gpu.allocator.capacity_bytes for gpu in world.gpus]
    return capacities, world.gpus[0].data, world.generation


def peak_bytes(device: str | torch.device) -> PeakBytes | None:
    """Return a device's memory peaks since `reset_peaks`; None without statistics (the CPU)."""
    backend = _backend(device)
    if not hasattr(backend, "max_memory_reserved"):
        return None
    return PeakBytes(
        device=str(device),
        allocated_bytes=backend.max_memory_allocated(device),
        reserved_bytes=backend.max_memory_reserved(device),
    )


def memory_now(device: str | torch.device) -> tuple[int, int]:
    """Return a device's allocated and reserved bytes now; 0 without statistics (the CPU)."""
    backend = _backend(device)
    if not hasattr(backend, "memory_reserved"):
        return 0, 0
    return backend.memory_allocated(device), backend.memory_reserved(device)


def free_bytes(device: str | torch.device) -> int:
    """Return the free bytes of a real or virtual GPU."""
    free: int = _backend(device).mem_get_info(device)[0]
    return free


def uuid(device: str | torch.device) -> str:
    """Return a CUDA GPU's UUID, as NVML writes it; empty for other devices."""
    device = torch.device(device)
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else ""


def reset_peaks(device: str | torch.device) -> None:
    """Reset the peaks of a device's memory to the bytes in use now."""
    backend = _backend(device)
    if hasattr(backend, "reset_peak_memory_stats"):
        backend.reset_peak_memory_stats(device)


def make_current(device: str | torch.device) -> None:
    """Make a device the current device of its type."""
    backend = _backend(device)
    if hasattr(backend, "set_device"):
        backend.set_device(device)


def can_pin(device: str | torch.device) -> bool:
    """Return True if copies to a device are faster from pinned host memory."""
    return torch.device(device).type == "cuda"


def pinned(tensor: Tensor, device: str | torch.device) -> Tensor:
    """Return a CPU tensor in pinned memory if its copy to a device can then be asynchronous."""
    return tensor.pin_memory() if can_pin(device) else tensor


def send(tensor: Tensor, device: str | torch.device) -> Tensor:
    """Copy a CPU tensor to a device; the host doesn't wait for the device."""
    return pinned(tensor, device).to(device, non_blocking=True)


def empty_host(sizes: Sequence[int], dtype: torch.dtype, device: str | torch.device) -> Tensor:
    """Return an uninitialized CPU tensor for copies from and to a device: pinned for CUDA."""
    return torch.empty(sizes, dtype=dtype, device="cpu", pin_memory=can_pin(device))


def record_event(device: str | torch.device) -> torch.cuda.Event | None:
    """Record an event after all work queued on the device's current stream.

    Returns None if the device works synchronously, as the CPU and virtual GPUs do.
    """
    if torch.device(device).type != "cuda":
        return None
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event


def has_ended(event: torch.cuda.Event | None) -> bool:
    """Return True if the work before an event of `record_event` has ended."""
    return event is None or event.query()


def wait(event: torch.cuda.Event | None) -> None:
    """Wait for an event of `record_event`, without using the processor."""
    if event is not None:
        event.synchronize()


def enter_copy_thread(device: str | torch.device) -> None:
    """Give this thread a stream of its own on the device, for copies beside the computation."""
    make_current(device)  # otherwise an event may start CUDA on GPU 0, which takes memory there
    if torch.device(device).type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(device))


def synchronize(device: str | torch.device) -> None:
    """Wait until a device has finished all work."""
    backend = _backend(device)
    if hasattr(backend, "synchronize"):
        backend.synchronize(device)


def _backend(device: str | torch.device) -> Any:
    """Return torch's module for a device's type, as `torch.cuda`; None for meta."""
    kind = torch.device(device).type
    return None if kind == "meta" else torch.get_device_module(kind)
