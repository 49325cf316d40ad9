"""All GPUs at one moment: what the driver says of them, and processes of duoka of their memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import linear_regression

from duoka.errors import DuokaError
from duoka.hardware import nvml
from duoka.report import live

# A trend is that of the last minute, once so much of it is known; what is farther away than an hour
# isn't told.
_TREND_SECONDS, _LEAST_SECONDS, _FARTHEST_SECONDS = 60.0, 10.0, 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNow:
    """A GPU, a virtual one too, at one moment. None stands for what isn't known.

    `name` is the index that `nvidia-smi` shows, the UUID of an instance, or what a process calls a
    GPU that the driver doesn't know; that one's memory is its budget. `reserved_bytes` is what
    allocators of duoka's have, and `forecast_bytes` what they have at their plans' peaks.
    `others_bytes` are used and not theirs: by other processes, by CUDA's contexts. `spare_bytes`
    are free beside what the plans still forecast; below 0 so many are missing at the peak. If spare
    memory goes on to go as in the last minute, it is gone in `seconds_left`.
    """

    name: str
    product: str = ""
    trouble: str = ""
    total_bytes: int | None = None
    free_bytes: int | None = None
    reserved_bytes: int = 0
    forecast_bytes: int = 0
    others_bytes: int | None = None
    spare_bytes: int | None = None
    seconds_left: float | None = None
    processes: tuple[live.LiveDevice, ...] = ()
    activity: nvml.Activity | None = None

    @property
    def label(self) -> str:
        """What tells it apart: there is a ``vgpu:0`` in every process that has virtual GPUs."""
        is_known = self.activity is not None or self.trouble
        return self.name if is_known else f"{self.name} (pid {self.processes[0].pid})"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSnapshot:
    """All GPUs at one moment, and why something isn't known."""

    time: str
    gpus: tuple[GpuNow, ...]
    notes: tuple[str, ...] = ()


class Monitor:
    """Looks at all GPUs, again and again."""

    def __init__(self) -> None:
        self._watch: nvml.NvmlSession | None = None
        self._notes: tuple[str, ...] = ()
        try:
            self._watch = nvml.NvmlSession()
        except DuokaError as error:
            self._notes = (f"no NVIDIA GPU: {error}",)
        self._trends: dict[str, deque[tuple[float, int]]] = {}

    def close(self) -> None:
        """Leave the driver alone."""
        if self._watch is not None:
            self._watch.close()

    def look(self) -> GpuSnapshot:
        """How everything is now."""
        devices, notes = [], self._notes
        try:
            devices = live.read_memory()
        except DuokaError as error:
            notes += (f"{error}; {error.hint}",)
        gpus = _gpus([] if self._watch is None else self._watch.look(), devices)
        return GpuSnapshot(
            time=datetime.now(UTC).isoformat(timespec="milliseconds"),
            gpus=tuple(replace(gpu, seconds_left=self._seconds_left(gpu)) for gpu in gpus),
            notes=notes,
        )

    def _seconds_left(self, gpu: GpuNow) -> float | None:
        """When spare memory is gone, if it goes on as in the last minute."""
        now, spare = time.monotonic(), gpu.spare_bytes
        if spare is None or spare <= 0:
            return None
        trend = self._trends.setdefault(gpu.label, deque())
        trend.append((now, spare))
        while trend[0][0] < now - _TREND_SECONDS:
            trend.popleft()
        if now - trend[0][0] < _LEAST_SECONDS:
            return None
        slope, _ = linear_regression(*zip(*trend, strict=True))
        seconds = -spare / slope if slope < 0 else _FARTHEST_SECONDS
        return seconds if seconds < _FARTHEST_SECONDS else None


def _gpus(
    activities: Sequence[nvml.Activity | nvml.Lost], devices: Sequence[live.LiveDevice]
) -> Iterator[GpuNow]:
    """Every GPU once, with the processes of duoka that are on it."""
    on_gpu: dict[str, list[live.LiveDevice]] = {}
    for device in devices:
        # Of a virtual GPU there is one in each process.
        key = device.uuid.lower() or f"{device.pid} {device.measured.device}"
        on_gpu.setdefault(key, []).append(device)
    for gpu in activities:
        if isinstance(gpu, nvml.Lost):
            yield GpuNow(name=str(gpu.index), trouble=f"it doesn't answer: {gpu.reason}")
            continue
        processes = on_gpu.pop(gpu.uuid.lower(), [])
        name = gpu.uuid if gpu.uuid.startswith("MIG-") else str(gpu.index)
        now = GpuNow(name=name, product=gpu.name, activity=gpu)
        yield _with_memory(now, gpu.total_bytes, gpu.free_bytes, processes)
    for processes in on_gpu.values():
        budget = max(process.forecast.budget_bytes for process in processes)
        free = max(budget - sum(process.measured.reserved_bytes for process in processes), 0)
        yield _with_memory(GpuNow(name=processes[0].measured.device), budget, free, processes)


def _with_memory(
    gpu: GpuNow, total: int | None, free: int | None, processes: Sequence[live.LiveDevice]
) -> GpuNow:
    """A GPU with what is known and follows of its memory."""
    pairs = [(p.measured.reserved_bytes, p.forecast.reserved_bytes) for p in processes]
    reserved = sum(now for now, _ in pairs)
    to_come = sum(max(peak - now, 0) for now, peak in pairs)
    return replace(
        gpu,
        total_bytes=total,
        free_bytes=free,
        reserved_bytes=reserved,
        forecast_bytes=sum(peak for _, peak in pairs),
        others_bytes=None if total is None or free is None else max(total - free - reserved, 0),
        spare_bytes=None if free is None else free - to_come,
        processes=tuple(processes),
    )
