"""NVML: the driver's data about this machine's GPUs, as frozen snapshots.

Only this module calls NVML (`pynvml`, of the package nvidia-ml-py). A value that the card or the
driver doesn't report is None. A card that doesn't respond is reported as `Lost`, beside the data of
all other cards. `cuda_driver` finds CUDA's numbers of the GPUs.
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

# Longest name to show: a process can have any name.
_MAX_NAME = 60
_PEER_KINDS: dict[int | None, Literal["gpu", "switch"]] = {
    pynvml.NVML_NVLINK_DEVICE_TYPE_GPU: "gpu",
    pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH: "switch",
    # If the driver doesn't report the kind, the end is taken as a GPU and matched by its address.
    pynvml.NVML_NVLINK_DEVICE_TYPE_UNKNOWN: "gpu",
    None: "gpu",
}
# Active, and asleep until something is sent. Links in other states carry nothing.
_ACTIVE_LINK_STATES = (1, 2)
_NO_GPU = (
    'without a GPU, plan for declared GPUs (--gpus "2xRTX4090" or "24GiB,12GiB"), or use virtual '
    'GPUs (--gpus "virtual:2x24GiB")'
)
_FAULTS: dict[int, tuple[str, str]] = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: (
        "NVIDIA's management library (libnvidia-ml.so.1) was not found",
        "install the NVIDIA driver; start a container with the GPUs (docker run --gpus all); "
        f"{_NO_GPU}",
    ),
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: (
        "the NVIDIA driver is installed but not loaded",
        "load the module (modprobe nvidia) or restart the machine, until `nvidia-smi` works; "
        "start a container with the GPUs (docker run --gpus all)",
    ),
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        "the running NVIDIA driver has another version than its library",
        "restart the machine: the driver was updated and the old one is still running",
    ),
}
_LOST = {pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """Another process that uses memory of a GPU; in a container `pid` may be the host's number.

    `computes` is True for a process that uses CUDA, False for a process that only draws.
    """

    pid: int
    name: str
    used_bytes: int | None
    computes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A CUDA device: a whole GPU, or a part of a GPU in MIG mode."""

    uuid: str
    name: str
    total_bytes: int | None = None
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The other end of a GPU's active NVLinks: another GPU, or a switch.

    `pci_address` is empty if unknown; `bytes_per_second` is the sum over all links to this end, in
    one direction.
    """

    kind: Literal["gpu", "switch"]
    pci_address: str
    bytes_per_second: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlGpu(Instance):
    """A GPU; values that the card or the driver doesn't report are None.

    Parameters
    ----------
    index : int
        The number in `nvidia-smi`.
    processes : tuple of Process
        Other processes, as far as NVML knows them.
    is_prohibited : bool
        True if the compute mode forbids all computing.
    is_mig : bool
        True in MIG mode, in which only the `instances` can compute.
    pcie_generation, max_pcie_generation : int, optional
        The current PCIe generation, which an idle card lowers, and the maximal one.
    """

    index: int
    pci_address: str = ""
    processes: tuple[Process, ...] = ()
    is_prohibited: bool = False
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
    """A GPU that NVML counts but that doesn't respond, as after falling off the bus."""

    index: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """All GPUs of a machine (or container), in `nvidia-smi`'s order.

    `cuda_version` is the newest version of CUDA that the driver supports.
    """

    gpus: tuple[NvmlGpu, ...]
    lost: tuple[Lost, ...] = ()
    driver_version: str = ""
    cuda_version: tuple[int, int] | None = None


_Answer = TypeVar("_Answer")


class NoDriverError(FleetError):
    """NVIDIA's driver isn't installed, as on machines without a GPU."""


def read() -> Machine:
    """Query the driver for the data of all GPUs."""
    with _session() as count:
        answers = _query_all(count, _read_gpu)
        cuda = _query(pynvml.nvmlSystemGetCudaDriverVersion)
        return Machine(
            gpus=tuple(gpu for gpu in answers if isinstance(gpu, NvmlGpu)),
            lost=tuple(gpu for gpu in answers if isinstance(gpu, Lost)),
            driver_version=_to_text(_query(pynvml.nvmlSystemGetDriverVersion)),
            cuda_version=None if cuda is None else (cuda // 1000, cuda % 1000 // 10),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity(Instance):
    """Utilization and processes of a GPU, or of an instance in MIG mode."""

    index: int
    processes: tuple[Process, ...] = ()
    utilization: float | None = None


def driver_version() -> str:
    """Return the driver's version; "" if there is no driver."""
    with suppress(FleetError), _session():
        return _to_text(_query(pynvml.nvmlSystemGetDriverVersion))
    return ""


class NvmlSession:
    """An open session with the driver, to query the GPUs' activity repeatedly."""

    def __init__(self) -> None:
        self._session = ExitStack()
        self._count = self._session.enter_context(_session())

    def close(self) -> None:
        """End the session."""
        self._session.close()

    def look(self) -> list[Activity | Lost]:
        """Return the activity of every GPU."""
        return _query_all(self._count, self._activities)

    def _activities(self, index: int, handle: Any) -> Iterator[Activity]:
        """Yield the activity of a GPU, or in MIG mode of each instance with its own memory."""
        rates = _query(pynvml.nvmlDeviceGetUtilizationRates, handle)
        activity: dict[str, Any] = {
            "index": index,
            "processes": _read_processes(handle),
            "utilization": None if rates is None else rates.gpu / 100,
        }
        for part in _instances(handle) if _is_mig(handle) else [_instance(handle)]:
            yield Activity(**asdict(part), **activity)


def own_bytes(uuid: str) -> int | None:
    """Return the bytes of this process on a GPU; None if the driver doesn't report the process.

    In a container, the driver may list processes under other numbers.
    """
    with _session():
        handle = _query(pynvml.nvmlDeviceGetHandleByUUID, uuid)
        if handle is None:
            return None
        running = _query(pynvml.nvmlDeviceGetComputeRunningProcesses_v3, handle) or ()
        mine = (process for process in running if process.pid == os.getpid())
        return next((process.usedGpuMemory for process in mine), None)


@contextmanager
def _session() -> Iterator[int]:
    """Keep NVML open inside the scope; yield the number of GPUs."""
    try:
        pynvml.nvmlInit()
        try:
            yield int(pynvml.nvmlDeviceGetCount())
        finally:
            with suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise _to_error(error) from None


def _query_all(count: int, look: Callable[[int, Any], Iterable[_Answer]]) -> list[_Answer | Lost]:
    """Query each GPU; a GPU without an answer becomes `Lost`."""
    answers: list[_Answer | Lost] = []
    for index in range(count):
        try:
            answers += [*look(index, pynvml.nvmlDeviceGetHandleByIndex(index))]
        except pynvml.NVMLError as error:
            answers.append(Lost(index=index, reason=str(error)))
    return answers


def _to_error(error: Any) -> FleetError:
    hint = f"make `nvidia-smi` work first; {_NO_GPU}"
    unknown = (f"the NVIDIA driver doesn't respond: {error}", hint)
    message, hint = _FAULTS.get(error.value, unknown)
    kind = NoDriverError if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND else FleetError
    return kind(message, hint=hint)


# NVML fails for single values on many machines: consumer cards have no ECC, containers hide the
# names of processes, old drivers lack functions. Such a value is None. Two errors (`_LOST`) mean
# that the GPU itself doesn't respond; they end the query of this GPU, but not of the others.
def _query(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call an NVML function; return None if it fails, but raise the error of a lost GPU."""
    try:
        return function(*arguments, **options)
    except pynvml.NVMLError as error:
        if error.value in _LOST:
            raise
        return None
    except UnicodeDecodeError:  # the name of a process
        return None


def _read_gpu(index: int, handle: Any) -> Iterator[NvmlGpu]:
    """Yield the data of one GPU; an iterator, as `_query_all` expects."""
    is_mig = _is_mig(handle)
    capability = _query(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    yield NvmlGpu(
        **asdict(_instance(handle)),
        index=index,
        pci_address=_pci_address(_query(pynvml.nvmlDeviceGetPciInfo, handle)),
        processes=_read_processes(handle),
        is_prohibited=_query(pynvml.nvmlDeviceGetComputeMode, handle)
        == pynvml.NVML_COMPUTEMODE_PROHIBITED,
        is_mig=is_mig,
        instances=tuple(_instances(handle)) if is_mig else (),
        peers=_find_peers(handle),
        pcie_generation=_query(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
        pcie_lanes=_query(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        max_pcie_generation=_query(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        max_pcie_lanes=_query(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        compute_capability=None if capability is None else (capability[0], capability[1]),
    )


def _read_memory(handle: Any) -> tuple[int | None, int | None]:
    """Return the total and free bytes; (None, None) if not reported."""
    memory = _query(pynvml.nvmlDeviceGetMemoryInfo, handle, version=pynvml.nvmlMemory_v2)
    memory = memory or _query(pynvml.nvmlDeviceGetMemoryInfo, handle)
    if memory is None or not memory.total:
        return None, None
    return int(memory.total), int(memory.free)


def _read_processes(handle: Any) -> tuple[Process, ...]:
    """Return all processes on a GPU that NVML reports, except this one."""
    processes = {}
    for computes, function in (
        # Names with a version: without it, an old driver causes an error other than NVMLError.
        # A process that draws and computes is in both lists, and counts as computing.
        (False, pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3),
        (True, pynvml.nvmlDeviceGetComputeRunningProcesses_v3),
    ):
        for process in _query(function, handle) or ():
            processes[process.pid] = Process(
                pid=process.pid,
                name=PurePath(_to_text(_query(pynvml.nvmlSystemGetProcessName, process.pid))).name,
                used_bytes=process.usedGpuMemory,
                computes=computes,
            )
    processes.pop(os.getpid(), None)
    return tuple(processes.values())


def _instances(handle: Any) -> Iterator[Instance]:
    """Yield the instances of a GPU in MIG mode."""
    for index in range(_query(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        part = _query(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
        # Fewer than the maximum may exist.
        if part is not None and _query(pynvml.nvmlDeviceGetUUID, part) is not None:
            yield _instance(part)


def _instance(part: Any) -> Instance:
    total, free = _read_memory(part)
    name = _to_text(_query(pynvml.nvmlDeviceGetName, part))
    # A part without a UUID is unusable, so its error is raised: no `_query` here.
    uuid = _to_text(pynvml.nvmlDeviceGetUUID(part))
    return Instance(uuid=uuid, name=name, total_bytes=total, free_bytes=free)


def _is_mig(handle: Any) -> bool:
    mig = _query(pynvml.nvmlDeviceGetMigMode, handle)
    return mig is not None and mig[0] == pynvml.NVML_DEVICE_MIG_ENABLE


def _find_peers(handle: Any) -> tuple[Peer, ...]:
    """Return the other ends of the active NVLinks, each with the rate of all links to it."""
    speed = _link_speed(handle)
    peers: Counter[tuple[Literal["gpu", "switch"], str]] = Counter()
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        if _query(pynvml.nvmlDeviceGetNvLinkState, handle, link) not in _ACTIVE_LINK_STATES:
            continue
        kind = _PEER_KINDS.get(_query(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link))
        if kind is not None:
            address = _pci_address(_query(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link))
            peers[kind, address] += 1
    return tuple(
        Peer(kind=kind, pci_address=address, bytes_per_second=speed and number * speed)
        for (kind, address), number in peers.items()
    )


def _link_speed(handle: Any) -> float | None:
    """Return bytes per second of an NVLink in one direction; None if unknown."""
    field = pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON
    values = _query(pynvml.nvmlDeviceGetFieldValues, handle, [field])
    if not values or values[0].nvmlReturn != pynvml.NVML_SUCCESS:
        return None
    return values[0].value.uiVal * 1e6 or None


def _pci_address(info: Any) -> str:
    return "" if info is None else _to_text(info.busId).upper()


def _to_text(value: Any) -> str:
    """Decode a text of NVML, without control characters; keep its last `_MAX_NAME` characters."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    return "".join(sign for sign in value or "" if sign.isprintable())[-_MAX_NAME:]
