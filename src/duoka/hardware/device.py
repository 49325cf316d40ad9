"""Device and link: one place where modules can be, and the way from one to another."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from duoka.base.units import format_bytes
from duoka.errors import FleetError

from .gpu_generation import workspace_bytes

MAX_DEVICES = 64
RESERVE_BYTES = 768 * 2**20
"""Kept out of the budget of a real GPU: CUDA's context, and what kernels and libraries load on
first use, all of which lie outside torch's allocator."""
STEP_BYTES = 64 * 2**20
"""The budget of a GPU of this machine is a multiple of it: what is free differs by a few MiB from
one card to its twin, and cards of equal budgets can be exchanged when a placement is looked for."""

_MAX_TEXT = 120
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
    """One device.

    Parameters
    ----------
    name : str
        torch's name of it, in this process.
    budget_bytes : int
        What the allocator may reserve there.
    product, uuid, pci_address : str
        What NVML calls it, its identity, and where it sits; empty when unknown.
    memory_bytes : int, optional
        All that it has, used or not. None when only a budget was declared.
    reserve_bytes : int
        What was kept out of the budget (`RESERVE_BYTES`, and less than `STEP_BYTES` more for a
        GPU that is here): with the budget it is what was free, or, for a GPU that isn't here,
        what an empty one offers.
    memory_bytes_per_second, flops_per_second : float, optional
        How fast it reads its memory and computes in 16 bit. None when unknown.
    has_bfloat16 : bool, optional
        Whether it computes in bfloat16 by itself: NVIDIA's do from Ampere on. None when unknown.
    float32_flops_per_second : float, optional
        How fast it computes in 32 bit.
    launch_seconds : float, optional
        What it costs to start a kernel; None where it wasn't measured.
    host_bytes_per_second : float, optional
        How fast it copies from the host's pinned memory. None when unknown.
    workspace_bytes : int
        What a cuBLAS workspace takes of the budget there; by default that of GPUs before Hopper.
    measured : tuple of str
        The fields that `duoka bench --calibrate` measured; the others are the catalogue's, the
        driver's or declared.

    Raises
    ------
    FleetError
        If the name isn't one of torch's form, a text can't be shown, or a number isn't positive.
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
            raise FleetError(
                f"{self.name!r} is not the name of a device",
                hint="torch's names are cuda:0, cpu, vgpu:1",
            )
        for name in ("product", "uuid", "pci_address"):
            # They are shown, and a plan's file can say anything.
            text = getattr(self, name)
            if not text.isprintable() or len(text) > _MAX_TEXT:
                raise FleetError(f"the {name} of {self.name} can't be shown: {text[:40]!a}")
        for part, least in (("budget", 1), ("reserve", 0), ("workspace", 0)):
            size = getattr(self, f"{part}_bytes")
            if size < least:
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
        unknown = [name for name in self.measured if name not in (*_SPEEDS, "reserve_bytes")]
        if unknown:
            raise FleetError(f"{unknown[0][:40]!a} of {self.name} is nothing that is measured")

    @property
    def speeds(self) -> tuple[float | None, ...]:
        """How fast it computes; equal for devices that are equally fast."""
        return (
            self.memory_bytes_per_second,
            self.flops_per_second,
            self.float32_flops_per_second,
            self.launch_seconds,
            self.has_bfloat16,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """How fast bytes go from one device to another; the way back is a link of its own.

    Parameters
    ----------
    source, target : str
        Names of two devices.
    bytes_per_second, latency_seconds : float
    measured : bool
        Whether they were measured on such GPUs, or follow from what the driver or the catalogue
        says of their connectors.

    Raises
    ------
    FleetError
        If the two are one, the speed isn't positive or the latency is negative.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Devices and the links between them, before they are a fleet."""

    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
