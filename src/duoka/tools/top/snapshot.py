"""Snapshot of all GPUs: the driver's data, joined with the memory published by duoka processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from duoka.errors import DuokaError
from duoka.hardware import nvml
from duoka.hardware.host import available_bytes, total_bytes
from duoka.report import live


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNow:
    """State of a real or virtual GPU; unknown values are None.

    Parameters
    ----------
    name : str
        The index of `nvidia-smi`; the UUID of a MIG instance; or, for a GPU unknown to the driver
        such as a virtual GPU, the name in its process. Then `total_bytes` is its budget.
    reserved_bytes : int
        Memory reserved by the allocators of duoka processes.
    others_bytes : int, optional
        Memory used by other processes and by CUDA contexts.
    spare_bytes : int, optional
        Free memory minus the growth that plans still forecast; negative if the peaks do not fit.
    """

    name: str
    product: str = ""
    trouble: str = ""
    total_bytes: int | None = None
    free_bytes: int | None = None
    reserved_bytes: int = 0
    others_bytes: int | None = None
    spare_bytes: int | None = None
    processes: tuple[live.LiveDevice, ...] = ()
    activity: nvml.Activity | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSnapshot:
    """State of all GPUs and of host memory at a moment, with notes about missing data.

    `host_total_bytes` and `host_available_bytes` are within a container's limit; None if unknown.
    """

    time: str
    gpus: tuple[GpuNow, ...]
    notes: tuple[str, ...] = ()
    host_total_bytes: int | None = None
    host_available_bytes: int | None = None


class Monitor:
    """Takes snapshots of all GPUs repeatedly."""

    def __init__(self) -> None:
        self._watch: nvml.NvmlSession | None = None
        self._notes: tuple[str, ...] = ()
        try:
            self._watch = nvml.NvmlSession()
        except DuokaError as error:
            self._notes = (f"no NVIDIA GPU: {error}",)

    def close(self) -> None:
        """Close the NVML session."""
        if self._watch is not None:
            self._watch.close()

    def look(self) -> GpuSnapshot:
        """Take a snapshot."""
        devices, notes = [], self._notes
        try:
            devices = live.read_memory()
        except DuokaError as error:
            notes += (f"{error}; {error.hint}",)
        gpus = _join_gpus([] if self._watch is None else self._watch.look(), devices)
        return GpuSnapshot(
            time=datetime.now(UTC).isoformat(timespec="milliseconds"),
            gpus=tuple(gpus),
            notes=notes,
            host_total_bytes=total_bytes(),
            host_available_bytes=available_bytes(),
        )


def _join_gpus(
    activities: Sequence[nvml.Activity | nvml.Lost], devices: Sequence[live.LiveDevice]
) -> Iterator[GpuNow]:
    """Yield every GPU once, with the duoka processes on it."""
    on_gpu: dict[str, list[live.LiveDevice]] = {}
    for device in devices:
        # A virtual GPU belongs to a single process.
        key = device.uuid.lower() or f"{device.pid} {device.measured.device}"
        on_gpu.setdefault(key, []).append(device)
    for gpu in activities:
        if isinstance(gpu, nvml.Lost):
            yield GpuNow(name=str(gpu.index), trouble=f"it doesn't respond: {gpu.reason}")
            continue
        processes = on_gpu.pop(gpu.uuid.lower(), [])
        name = gpu.uuid if gpu.uuid.startswith("MIG-") else str(gpu.index)
        now = GpuNow(name=name, product=gpu.name, activity=gpu)
        yield _with_memory(now, gpu.total_bytes, gpu.free_bytes, processes)
    for processes in on_gpu.values():
        budget = max(process.forecast.budget_bytes for process in processes)
        free = max(budget - sum(process.measured.reserved_bytes for process in processes), 0)
        yield _with_memory(GpuNow(name=processes[0].measured.device), budget, free, processes)


# Example: on a GPU of 24 GiB a duoka process has reserved 10 GiB and will reserve 14 GiB at the
# peak of its plan; other processes use 3 GiB:
#
#   |  reserved 10  |  others 3  |          free 11          |
#                                |  growth 4  |   spare 7    |
#
# The growth of a process above its forecast is 0, not negative.
def _with_memory(
    gpu: GpuNow, total: int | None, free: int | None, processes: Sequence[live.LiveDevice]
) -> GpuNow:
    """Return a GPU with its memory fields computed from the driver's data and its processes."""
    pairs = [(p.measured.reserved_bytes, p.forecast.reserved_bytes) for p in processes]
    reserved = sum(now for now, _ in pairs)
    to_come = sum(max(peak - now, 0) for now, peak in pairs)
    return replace(
        gpu,
        total_bytes=total,
        free_bytes=free,
        reserved_bytes=reserved,
        others_bytes=None if total is None or free is None else max(total - free - reserved, 0),
        spare_bytes=None if free is None else free - to_come,
        processes=tuple(processes),
    )
