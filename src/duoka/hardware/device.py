"""Device and link: the properties of one device, and the speed of copies between two."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from duoka.base.units import format_bytes
from duoka.errors import FleetError

from .gpu_generation import workspace_bytes

MAX_DEVICES = 64
RESERVE_BYTES = 768 * 2**20
"""Memory of a real GPU to keep out of the budget of torch's allocator: for CUDA's context, for
kernels and libraries that are loaded at first use, and for `GRAPHS_BYTES`."""
GRAPHS_BYTES = 112 * 2**20
"""Memory of a real GPU for the CUDA graphs themselves, beside the pool of their tensors: 4 MiB for
each of at most 28 of a stage (`Capacity.graph_steps`). Declared, not measured on a GPU yet."""
STEP_BYTES = 64 * 2**20
"""Budgets of this machine's GPUs are multiples of this size: the free memory of identical cards
differs by a few MiB, but the search is faster for cards with equal budgets."""

_NAME = re.compile(r"[a-z]+(:(0|[1-9][0-9]{0,3}))?", re.ASCII)
_SPEEDS = (
    "memory_bytes_per_second",
    "flops_per_second",
    "float32_flops_per_second",
    "launch_seconds",
    "host_bytes_per_second",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device of torch: a GPU, a virtual GPU or the processor.

    Parameters
    ----------
    name : str
        torch's name in this process.
    budget_bytes : int
        Limit of the bytes reserved by the allocator.
    product : str
        NVML's name of the GPU; empty if unknown.
    uuid : str
        NVML's identity of the GPU; empty if unknown.
    pci_address : str
        Address on the PCI bus; empty if unknown.
    memory_bytes : int, optional
        The total memory. None if only a budget was declared.
    reserve_bytes : int
        Bytes outside the budget (`RESERVE_BYTES`, plus less than `STEP_BYTES` for a GPU of this
        machine). Budget and reserve add up to the free memory, or, for a declared GPU, to the
        memory offered by an empty one.
    memory_bytes_per_second : float, optional
        Bandwidth of the memory. None if unknown.
    flops_per_second : float, optional
        Rate of dense matrix products in 16 bit. None if unknown.
    has_bfloat16 : bool, optional
        True if the device computes in bfloat16, as NVIDIA GPUs from Ampere on. None if unknown.
    float32_flops_per_second : float, optional
        Rate of dense matrix products in 32 bit.
    launch_seconds : float, optional
        Time to launch a kernel; None if not measured.
    host_bytes_per_second : float, optional
        Rate of copies from the host's pinned memory. None if unknown.
    workspace_bytes : int
        Size of a cuBLAS workspace in the budget; by default that of GPUs before Hopper.
    measured : tuple of str
        Fields measured by `duoka bench --calibrate`; the others are from the catalogue, from the
        driver, or declared.

    Raises
    ------
    FleetError
        If the name isn't in torch's form, or a number isn't positive.
    """

    name: str
    budget_bytes: int
    product: str = ""
    uuid: str = ""
    pci_address: str = ""
    memory_bytes: int | None = None
    reserve_bytes: int = 0
    memory_bytes_per_second: float | None = None
    flops_per_second: float | None = None
    has_bfloat16: bool | None = None
    float32_flops_per_second: float | None = None
    launch_seconds: float | None = None
    host_bytes_per_second: float | None = None
    workspace_bytes: int = field(default_factory=workspace_bytes)
    measured: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            hint = "use names such as cuda:0, cpu or vgpu:1"
            raise FleetError(f"{self.name!r} is not a device name", hint=hint)
        for part, minimum in (("budget", 1), ("reserve", 0), ("workspace", 0)):
            size = getattr(self, f"{part}_bytes")
            if size < minimum:
                raise FleetError(f"the {part} of {self.name} is {size} bytes")
        offered = self.budget_bytes + self.reserve_bytes
        if self.memory_bytes is not None and self.memory_bytes < offered:
            raise FleetError(
                f"{self.name} has {format_bytes(self.memory_bytes)} of memory, and a budget and "
                f"reserve of {format_bytes(offered)}"
            )
        for name in _SPEEDS:
            speed = getattr(self, name)
            if speed is not None and not speed > 0:
                raise FleetError(f"{name} of {self.name} is {speed}; it must be positive")

    @property
    def speeds(self) -> tuple[float | None, ...]:
        """All properties that the speed of computing depends on; equal for equally fast devices."""
        return (
            self.memory_bytes_per_second,
            self.flops_per_second,
            self.float32_flops_per_second,
            self.launch_seconds,
            self.has_bfloat16,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Speed of copies from one device to another; the opposite direction is a separate link.

    Parameters
    ----------
    source : str
        Name of the device that is read.
    target : str
        Name of the device that is written.
    bytes_per_second : float
        Speed of a large copy.
    latency_seconds : float
        Time of an empty copy.
    measured : bool
        True if the figures are measured; otherwise they are estimates from the connectors that the
        driver or the catalogue reports.

    Raises
    ------
    FleetError
        If source and target are equal, the speed isn't positive or the latency is negative.
    """

    source: str
    target: str
    bytes_per_second: float
    latency_seconds: float
    measured: bool = False

    def __post_init__(self) -> None:
        if self.source == self.target:
            raise FleetError(f"a link from {self.source} to itself")
        if not self.bytes_per_second > 0 or not self.latency_seconds >= 0:
            raise FleetError(
                f"the link from {self.source} to {self.target} has {self.bytes_per_second} bytes "
                f"per second and {self.latency_seconds} seconds of latency"
            )


FleetParts = tuple[tuple[Device, ...], tuple[Link, ...]]
"""The devices and links to make a `Fleet` of."""
