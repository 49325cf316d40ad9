"""NVML: what the driver says of this machine's GPUs, as frozen snapshots.

The only module that calls NVML (`pynvml`, of the package nvidia-ml-py). What a card or driver
doesn't tell is None; a card that doesn't answer at all is told as lost and hides no other one. It
knows nothing of CUDA: which of these GPUs a process may use, and under which number, isn't here.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any, Literal, TypeVar

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
_LINKS_UP = (1, 2)
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
# Bits of NVML's clock event reasons that mean that something is wrong. Those for idleness, power
# limits (as it should be under load), applications' clocks and displays are left out.
_SLOWDOWNS = {
    0x08: "the board's protection",
    0x20: "its temperature (the driver's limit)",
    0x40: "its temperature (the hardware's limit)",
    0x80: "the power supply",
}
_LOST = {pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED}


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
    """What CUDA takes for a GPU: a whole one, or a part of one in MIG mode."""

    uuid: str
    name: str
    total_bytes: int | None = None
    free_bytes: int | None = None


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
class NvmlGpu(Instance):
    """One GPU. None stands for what the card or the driver doesn't tell.

    `index` is the number that `nvidia-smi` shows. What isn't free is used or reserved by the
    driver; `processes` are those of others that NVML knows of. `compute_mode` is how many processes
    may compute on it at a time: any number, one or none. If it `is_mig`, only its `instances` can
    compute. An idle card lowers `pcie_generation`; the `max_` values are the card's here.
    `slowdowns` is what holds its clocks back now. `uncorrected_errors` are those of its memory
    since the driver was loaded; `awaits_reset`: parts of it are to be replaced at the next reset,
    `is_worn`: there is nothing left to replace them by.
    """

    index: int
    pci_address: str = ""
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
    slowdowns: tuple[str, ...] = ()
    uncorrected_errors: int | None = None
    awaits_reset: bool = False
    is_worn: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A GPU that is counted and doesn't answer, as one that fell off the bus."""

    index: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """All GPUs of a machine (or container), in `nvidia-smi`'s order.

    `cuda_version` is the newest that the driver knows.
    """

    gpus: tuple[NvmlGpu, ...]
    lost: tuple[Lost, ...] = ()
    driver_version: str = ""
    cuda_version: tuple[int, int] | None = None


_Answer = TypeVar("_Answer")


class NoDriverError(FleetError):
    """NVIDIA's driver isn't installed, which is no mistake where there is no GPU."""


def read() -> Machine:
    """Ask the driver for all GPUs."""
    with _session():
        answers = _ask_all(_count(), _gpu)
        cuda = _ask(pynvml.nvmlSystemGetCudaDriverVersion)
        return Machine(
            gpus=tuple(gpu for gpu in answers if isinstance(gpu, NvmlGpu)),
            lost=tuple(gpu for gpu in answers if isinstance(gpu, Lost)),
            driver_version=_text(_ask(pynvml.nvmlSystemGetDriverVersion)),
            cuda_version=None if cuda is None else (cuda // 1000, cuda % 1000 // 10),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity(Instance):
    """What a GPU, or an instance of one in MIG mode, is doing; None for what isn't told."""

    index: int
    processes: tuple[Process, ...] = ()
    utilization: float | None = None
    temperature_celsius: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None


class NvmlSession:
    """A session with the driver that stays open, and asks for no more than what changes."""

    def __init__(self) -> None:
        with ExitStack() as opened:
            opened.enter_context(_session())
            self._count = _count()
            self._session = opened.pop_all()

    def close(self) -> None:
        """End the session."""
        self._session.close()

    def look(self) -> list[Activity | Lost]:
        """What every GPU is doing now."""
        return _ask_all(self._count, self._activities)

    def _activities(self, index: int, handle: Any) -> Iterator[Activity]:
        """A GPU's, or those of its instances, which differ in their memory."""
        rates = _ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
        activity: dict[str, Any] = {
            "index": index,
            "processes": _processes(handle),
            "utilization": None if rates is None else rates.gpu / 100,
            "temperature_celsius": _ask(
                pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU
            ),
            "power_watts": _watts(pynvml.nvmlDeviceGetPowerUsage, handle),
            "power_limit_watts": _watts(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle),
        }
        for part in _instances(handle) if _is_mig(handle) else [_instance(handle)]:
            yield Activity(**asdict(part), **activity)


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


def _ask_all(count: int, look: Callable[[int, Any], Iterable[_Answer]]) -> list[_Answer | Lost]:
    """What each GPU answers; one that doesn't hides no other."""
    answers: list[_Answer | Lost] = []
    for index in range(count):
        try:
            answers += [*look(index, pynvml.nvmlDeviceGetHandleByIndex(index))]
        except pynvml.NVMLError as error:
            answers.append(Lost(index=index, reason=str(error)))
    return answers


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


def _watts(function: Callable[..., Any], handle: Any) -> float | None:
    milliwatts = _ask(function, handle)
    return None if milliwatts is None else milliwatts / 1e3


def _gpu(index: int, handle: Any) -> Iterator[NvmlGpu]:
    is_mig = _is_mig(handle)
    capability = _ask(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    yield NvmlGpu(
        **asdict(_instance(handle)),
        **_health(handle),
        index=index,
        pci_address=_pci_address(_ask(pynvml.nvmlDeviceGetPciInfo, handle)),
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


def _health(handle: Any) -> dict[str, Any]:
    reasons = _ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
    remapped = _ask(pynvml.nvmlDeviceGetRemappedRows, handle) or (0, 0, 0, 0)
    retired = _ask(pynvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)
    kind, span = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    return {
        "slowdowns": tuple(text for bit, text in _SLOWDOWNS.items() if reasons & bit),
        "uncorrected_errors": _ask(pynvml.nvmlDeviceGetTotalEccErrors, handle, kind, span),
        "awaits_reset": bool(remapped[2] or retired),
        "is_worn": bool(remapped[3]),
    }


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
    # Without an identity it can't be used: this one is asked without `_ask`.
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
        if _ask(pynvml.nvmlDeviceGetNvLinkState, handle, link) not in _LINKS_UP:
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
