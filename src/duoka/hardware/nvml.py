"""NVML: what the driver says of this machine's GPUs, as frozen snapshots.

But for `gpu_health` the only module that calls NVML (`pynvml`, of the package nvidia-ml-py). What a
card or driver doesn't tell is None; a card that doesn't answer at all is told as lost and hides no
other one. It knows nothing of CUDA: which of these GPUs a process may use, and under which number,
isn't here.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

import pynvml

from duoka.errors import FleetError

# A name can be anything that a process calls itself: it is shown, so it is kept short.
_MAX_NAME = 60
_PEER_KINDS: dict[int | None, Literal["gpu", "switch"]] = {
    pynvml.NVML_NVLINK_DEVICE_TYPE_GPU: "gpu",
    pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH: "switch",
    # Where a driver doesn't say, the address tells whether it is one.
    pynvml.NVML_NVLINK_DEVICE_TYPE_UNKNOWN: "gpu",
    None: "gpu",
}
# Active, and asleep: that one wakes when something is to be sent. The other states carry nothing.
_LINK_STATES = (1, 2)
_COMPUTE_MODES: dict[int | None, Literal["shared", "exclusive", "prohibited"]] = {
    pynvml.NVML_COMPUTEMODE_DEFAULT: "shared",
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive",
    pynvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited",
}
_NO_GPU = (
    'without a GPU, declare some (--gpus "2xRTX4090" or "24GiB,12GiB") to plan for, or try virtual '
    'ones (--gpus "virtual:2x24GiB")'
)
_FAULTS: dict[int, tuple[str, str]] = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: (
        "NVIDIA's management library (libnvidia-ml.so.1) is not here",
        "it comes with the NVIDIA driver; in a container, start it with the GPUs "
        f"(docker run --gpus all); {_NO_GPU}",
    ),
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: (
        "the NVIDIA driver is installed and not loaded",
        "`nvidia-smi` should work first: load the module (modprobe nvidia) or restart the machine; "
        "in a container, start it with the GPUs (docker run --gpus all)",
    ),
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        "the NVIDIA driver that runs is of another version than its library",
        "the driver was updated and the old one still runs: restart the machine",
    ),
    pynvml.NVML_ERROR_NO_PERMISSION: (
        "this user may not ask the NVIDIA driver",
        "look at who may open /dev/nvidiactl and /dev/nvidia0",
    ),
}
_LOST = {pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED}
# Counters of all NVLinks together, in KiB, out of the GPU and into it.
_ALL_LINKS = 2**32 - 1
_NVLINK_COUNTERS = [
    (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _ALL_LINKS),
    (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, _ALL_LINKS),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process of somebody else that has memory of a GPU.

    `pid` is as the driver counts: inside a container that may be the host's number. `computes`:
    whether it uses CUDA; otherwise it draws.
    """

    pid: int
    name: str
    used_bytes: int | None
    computes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A part of a GPU in MIG mode, which CUDA takes for a GPU of its own."""

    uuid: str
    name: str
    total_bytes: int | None
    free_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """What a GPU's active NVLinks lead to: another GPU, or a switch.

    `pci_address` is the other end's, empty when it isn't told; `bytes_per_second` is of all the
    links to it together, in one direction.
    """

    kind: Literal["gpu", "switch"]
    pci_address: str
    bytes_per_second: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU. None stands for what the card or the driver doesn't tell.

    `index` is the number that `nvidia-smi` shows. What isn't free is used or reserved by the
    driver; `processes` are those of others that NVML knows of. `compute_mode` is how many processes
    may compute on it at a time: any number, one or none. If it `is_mig`, only its `instances` can
    compute. An idle card lowers `pcie_generation`; the `max_` values are the card's here.
    """

    index: int
    name: str
    uuid: str
    pci_address: str = ""
    total_bytes: int | None = None
    free_bytes: int | None = None
    processes: tuple[Process, ...] = ()
    compute_mode: Literal["shared", "exclusive", "prohibited"] | None = None
    is_mig: bool = False
    instances: tuple[Instance, ...] = ()
    peers: tuple[Peer, ...] = ()
    pcie_generation: int | None = None
    pcie_lanes: int | None = None
    max_pcie_generation: int | None = None
    max_pcie_lanes: int | None = None
    compute_capability: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A GPU that is counted and doesn't answer, as one that fell off the bus."""

    index: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """All GPUs of a machine (or container), in `nvidia-smi`'s order."""

    gpus: tuple[Gpu, ...]
    lost: tuple[Lost, ...] = ()
    driver_version: str = ""


class NoDriverError(FleetError):
    """NVIDIA's driver isn't installed, which is no mistake where there is no GPU."""


def read() -> Machine:
    """Ask the driver for all GPUs."""
    with _session():
        gpus: list[Gpu] = []
        lost: list[Lost] = []
        for index in range(_count()):
            try:
                gpus.append(_gpu(index, pynvml.nvmlDeviceGetHandleByIndex(index)))
            except pynvml.NVMLError as error:
                lost.append(Lost(index=index, reason=str(error)))
        return Machine(
            gpus=tuple(gpus),
            lost=tuple(lost),
            driver_version=_text(_ask(pynvml.nvmlSystemGetDriverVersion)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What a GPU, or an instance of one in MIG mode, is doing; None for what isn't told.

    `sent` and `received` are as the GPU sees them. Over PCIe they are of the last 20 ms, over
    NVLink, of all links together, on average since one looked before.
    """

    index: int
    name: str
    uuid: str
    total_bytes: int | None
    free_bytes: int | None
    processes: tuple[Process, ...] = ()
    utilization: float | None = None
    temperature_celsius: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    pcie_sent_bytes_per_second: float | None = None
    pcie_received_bytes_per_second: float | None = None
    nvlink_sent_bytes_per_second: float | None = None
    nvlink_received_bytes_per_second: float | None = None


class Watch:
    """A session with the driver that stays open, and asks for no more than what changes.

    Raises
    ------
    FleetError
        If there is no driver that answers.
    """

    def __init__(self) -> None:
        with ExitStack() as opened:
            opened.enter_context(_session())
            self._count = _count()
            self._session = opened.pop_all()
        # Of each GPU when its NVLinks' counters were looked at, and what they were.
        self._nvlink: dict[int, tuple[float, list[int]]] = {}

    def close(self) -> None:
        """End the session."""
        self._session.close()

    def look(self) -> list[Activity | Lost]:
        """What every GPU is doing now."""
        activities: list[Activity | Lost] = []
        for index in range(self._count):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                activities += self._activities(index, handle)
            except pynvml.NVMLError as error:
                activities.append(Lost(index=index, reason=str(error)))
        return activities

    def _activities(self, index: int, handle: Any) -> list[Activity]:
        """A GPU's, or those of its instances, which differ in their memory."""
        rates = _ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
        power = _ask(pynvml.nvmlDeviceGetPowerUsage, handle)
        limit = _ask(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        sent, received = self._over_nvlink(index, handle)
        common: dict[str, Any] = {
            "index": index,
            "processes": _processes(handle),
            "utilization": None if rates is None else rates.gpu / 100,
            "temperature_celsius": _ask(
                pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU
            ),
            "power_watts": None if power is None else power / 1e3,
            "power_limit_watts": None if limit is None else limit / 1e3,
            "pcie_sent_bytes_per_second": _over_pcie(handle, pynvml.NVML_PCIE_UTIL_TX_BYTES),
            "pcie_received_bytes_per_second": _over_pcie(handle, pynvml.NVML_PCIE_UTIL_RX_BYTES),
            "nvlink_sent_bytes_per_second": sent,
            "nvlink_received_bytes_per_second": received,
        }
        parts = _instances(handle) if _is_mig(handle) else [_instance(handle)]
        return [
            Activity(
                name=part.name,
                uuid=part.uuid,
                total_bytes=part.total_bytes,
                free_bytes=part.free_bytes,
                **common,
            )
            for part in parts
        ]

    def _over_nvlink(self, index: int, handle: Any) -> tuple[float | None, float | None]:
        """Bytes per second out and in, since the counters were looked at before."""
        values = _ask(pynvml.nvmlDeviceGetFieldValues, handle, _NVLINK_COUNTERS) or ()
        counts = [v.value.ullVal for v in values if v.nvmlReturn == pynvml.NVML_SUCCESS]
        now, (then, before) = time.monotonic(), self._nvlink.get(index, (0.0, []))
        self._nvlink[index] = now, counts
        grown = [new - old for new, old in zip(counts, before, strict=False)]
        if len(grown) != 2 or now <= then or min(grown) < 0:
            return None, None
        sent, received = (1024 * kibibytes / (now - then) for kibibytes in grown)
        return sent, received


def own_bytes(uuid: str) -> int | None:
    """What this process holds on a GPU; None where the driver doesn't tell, as in containers."""
    with _session():
        handle = _ask(pynvml.nvmlDeviceGetHandleByUUID, uuid)
        if handle is None:
            return None
        running = _ask(pynvml.nvmlDeviceGetComputeRunningProcesses_v3, handle) or ()
        mine = (process for process in running if process.pid == os.getpid())
        return next((process.usedGpuMemory for process in mine), None)


@contextmanager
def _session() -> Iterator[None]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise _fault(error) from None
    try:
        yield
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _count() -> int:
    try:
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError as error:
        raise _fault(error) from None


def _fault(error: Any) -> FleetError:
    message, hint = _FAULTS.get(
        error.value,
        (
            f"the NVIDIA driver doesn't answer: {error}",
            f"`nvidia-smi` should work first; {_NO_GPU}",
        ),
    )
    kind = NoDriverError if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND else FleetError
    return kind(message, hint=hint)


def _ask(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What NVML answers; None where it has no answer. A lost GPU is raised."""
    try:
        return function(*arguments, **options)
    except pynvml.NVMLError as error:
        if error.value in _LOST:
            raise
        return None
    except UnicodeDecodeError:  # the name of a process
        return None


def _gpu(index: int, handle: Any) -> Gpu:
    total, free = _memory(handle)
    is_mig = _is_mig(handle)
    capability = _ask(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    return Gpu(
        index=index,
        name=_text(_ask(pynvml.nvmlDeviceGetName, handle)),
        # Without an identity it can't be used: this one is asked without `_ask`.
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        pci_address=_pci_address(_ask(pynvml.nvmlDeviceGetPciInfo, handle)),
        total_bytes=total,
        free_bytes=free,
        processes=_processes(handle),
        compute_mode=_COMPUTE_MODES.get(_ask(pynvml.nvmlDeviceGetComputeMode, handle)),
        is_mig=is_mig,
        instances=tuple(_instances(handle)) if is_mig else (),
        peers=_peers(handle),
        pcie_generation=_ask(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
        pcie_lanes=_ask(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        max_pcie_generation=_ask(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        max_pcie_lanes=_ask(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        compute_capability=None if capability is None else (capability[0], capability[1]),
    )


def _over_pcie(handle: Any, counter: int) -> float | None:
    """Bytes per second in a direction."""
    kilobytes = _ask(pynvml.nvmlDeviceGetPcieThroughput, handle, counter)
    return None if kilobytes is None else kilobytes * 1e3


def _memory(handle: Any) -> tuple[int | None, int | None]:
    """Total and free, which mean the same in both versions of the call."""
    memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle, version=pynvml.nvmlMemory_v2)
    memory = memory or _ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
    if memory is None or not memory.total:
        return None, None
    return int(memory.total), int(memory.free)


def _processes(handle: Any) -> tuple[Process, ...]:
    processes = {}
    for computes, function in (
        # By their versions: where a driver lacks the newest one, the names without it raise
        # something that is no NVMLError. A process can do both, and stands in both lists.
        (False, pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3),
        (True, pynvml.nvmlDeviceGetComputeRunningProcesses_v3),
    ):
        for process in _ask(function, handle) or ():
            processes[process.pid] = Process(
                pid=process.pid,
                name=PurePath(_text(_ask(pynvml.nvmlSystemGetProcessName, process.pid))).name,
                used_bytes=process.usedGpuMemory,
                computes=computes,
            )
    processes.pop(os.getpid(), None)
    return tuple(processes.values())


def _instances(handle: Any) -> Iterator[Instance]:
    for index in range(_ask(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        part = _ask(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
        # There may be fewer than could be.
        if part is not None and _ask(pynvml.nvmlDeviceGetUUID, part) is not None:
            yield _instance(part)


def _instance(part: Any) -> Instance:
    total, free = _memory(part)
    name = _text(_ask(pynvml.nvmlDeviceGetName, part))
    uuid = _text(pynvml.nvmlDeviceGetUUID(part))
    return Instance(uuid=uuid, name=name, total_bytes=total, free_bytes=free)


def _is_mig(handle: Any) -> bool:
    mig = _ask(pynvml.nvmlDeviceGetMigMode, handle)
    return mig is not None and mig[0] == pynvml.NVML_DEVICE_MIG_ENABLE


def _peers(handle: Any) -> tuple[Peer, ...]:
    """The other ends of the active links, each once."""
    speed = _link_speed(handle)
    peers: Counter[tuple[Literal["gpu", "switch"], str]] = Counter()
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        if _ask(pynvml.nvmlDeviceGetNvLinkState, handle, link) not in _LINK_STATES:
            continue
        kind = _PEER_KINDS.get(_ask(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link))
        if kind is None:
            continue
        address = _pci_address(_ask(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link))
        peers[kind, address] += 1
    return tuple(
        Peer(kind=kind, pci_address=address, bytes_per_second=speed and number * speed)
        for (kind, address), number in peers.items()
    )


def _link_speed(handle: Any) -> float | None:
    """Bytes per second of one NVLink in one direction, where the driver tells it."""
    field = pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON
    values = _ask(pynvml.nvmlDeviceGetFieldValues, handle, [field])
    if not values or values[0].nvmlReturn != pynvml.NVML_SUCCESS:
        return None
    return values[0].value.uiVal * 1e6 or None


def _pci_address(info: Any) -> str:
    return "" if info is None else _text(info.busId).upper()


def _text(value: Any) -> str:
    """What NVML tells as text: short, and without what a terminal would obey."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    return "".join(sign for sign in value or "" if sign.isprintable())[-_MAX_NAME:]
