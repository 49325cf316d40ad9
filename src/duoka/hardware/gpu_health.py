"""The health of this machine's GPUs: what NVML knows beyond what planning needs.

With `nvml`, whose session it uses, this is all that calls NVML.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pynvml

from .nvml import _ask, _session

# Bits of NVML's clock event reasons that mean that something is wrong, or is in the way. Those for
# idleness, applications' clocks and displays are left out.
_SLOWDOWNS = {
    0x04: "its power limit",
    0x08: "the board's protection",
    0x20: "its temperature (the driver's limit)",
    0x40: "its temperature (the hardware's limit)",
    0x80: "the power supply",
}
POWER_LIMIT = _SLOWDOWNS[0x04]
_REACH = {
    0: "",
    1: "the chipset doesn't support it",
    2: "the GPU doesn't support it",
    3: "the I/O hub's topology doesn't support it",
    4: "it is switched off in the driver",
    5: "it is not supported",
}
_READ = 0  # NVML_P2P_CAPS_INDEX_READ, which some versions of the bindings have as a tuple
_LINK_DOWN, _LINKS_UP = 0, (1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHealth:
    """How one GPU is; None for what the card or the driver doesn't tell.

    `slowdowns` is what holds its clocks back now. `uncorrected_errors` are those of its memory
    since the driver was loaded; `awaits_reset`: parts of it are to be replaced at the next reset,
    `is_worn`: there is nothing left to replace them by. `peers` says by index why it can't reach
    another GPU's memory directly; where it can, the text is empty.
    """

    slowdowns: tuple[str, ...] = ()
    uncorrected_errors: int | None = None
    awaits_reset: bool = False
    is_worn: bool = False
    power_limit_watts: float | None = None
    default_power_limit_watts: float | None = None
    is_persistent: bool | None = None
    links_up: int = 0
    links_down: int = 0
    peers: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineHealth:
    """The newest CUDA that the driver knows, and each GPU that answers, by its index."""

    cuda_version: tuple[int, int] | None
    gpus: Mapping[int, GpuHealth]


def read_health() -> MachineHealth:
    """Ask the driver how all GPUs are."""
    with _session():
        version = _ask(pynvml.nvmlSystemGetCudaDriverVersion)
        handles = {}
        for index in range(_ask(pynvml.nvmlDeviceGetCount) or 0):
            try:
                handles[index] = pynvml.nvmlDeviceGetHandleByIndex(index)
            except pynvml.NVMLError:  # `nvml.read` tells of it
                continue
        gpus = {}
        for index, handle in handles.items():
            try:
                gpus[index] = _health(handle, {i: h for i, h in handles.items() if i != index})
            except pynvml.NVMLError:
                continue
    cuda = None if version is None else (version // 1000, version % 1000 // 10)
    return MachineHealth(cuda_version=cuda, gpus=gpus)


def _health(handle: Any, peers: Mapping[int, Any]) -> GpuHealth:
    reasons = _ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
    remapped = _ask(pynvml.nvmlDeviceGetRemappedRows, handle) or (0, 0, 0, 0)
    states = [
        _ask(pynvml.nvmlDeviceGetNvLinkState, handle, link)
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS)
    ]
    persistent = _ask(pynvml.nvmlDeviceGetPersistenceMode, handle)
    statuses = {
        index: _ask(pynvml.nvmlDeviceGetP2PStatus, handle, peer, _READ)
        for index, peer in peers.items()
    }
    return GpuHealth(
        slowdowns=tuple(text for bit, text in _SLOWDOWNS.items() if reasons & bit),
        uncorrected_errors=_ask(
            pynvml.nvmlDeviceGetTotalEccErrors,
            handle,
            pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            pynvml.NVML_VOLATILE_ECC,
        ),
        awaits_reset=bool(
            remapped[2] or _ask(pynvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)
        ),
        is_worn=bool(remapped[3]),
        power_limit_watts=_watts(_ask(pynvml.nvmlDeviceGetPowerManagementLimit, handle)),
        default_power_limit_watts=_watts(
            _ask(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, handle)
        ),
        is_persistent=None if persistent is None else bool(persistent),
        links_up=sum(state in _LINKS_UP for state in states),
        links_down=states.count(_LINK_DOWN),
        peers={i: _REACH[status] for i, status in statuses.items() if status in _REACH},
    )


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000
