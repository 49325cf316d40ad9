"""All GPUs at one moment: what the driver says of them, and processes of duoka of their memory."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import linear_regression
from typing import Any

from duoka.base.serialization import to_dict
from duoka.errors import DuokaError
from duoka.forecast.stage_bytes import StageBytes
from duoka.hardware import nvml
from duoka.report import live
from duoka.report.terminal.plan import kinds_of

# A trend is that of the last minute, once so much of it is known; what is farther away than an hour
# isn't told.
_TREND_SECONDS, _LEAST_SECONDS, _FARTHEST_SECONDS = 60.0, 10.0, 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process of duoka that has memory of a GPU: see `live.LiveDevice`."""

    pid: int
    model: str
    measured: StageBytes
    forecast: StageBytes
    peak_reserved_bytes: int
    busy_share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNow:
    """A GPU, a virtual one too, at one moment. None stands for what isn't known.

    `name` is the index that `nvidia-smi` shows, or what the process calls a GPU that the driver
    doesn't know; that one's memory is its budget. `others_bytes` are used and by no allocator of
    duoka's: other processes, CUDA's contexts. `spare_bytes` are free beside what the plans still
    forecast; below 0 so many are missing at their peak. As spare memory went in the last minute, it
    is gone in `seconds_left`.
    """

    name: str
    product: str
    total_bytes: int | None
    free_bytes: int | None
    activity: nvml.Activity | None = None
    holders: tuple[Holder, ...] = ()
    trouble: str = ""
    seconds_left: float | None = None

    @property
    def kinds(self) -> Counter[str]:
        """Bytes by kind of all processes of duoka."""
        return sum((Counter(dict(kinds_of(h.measured))) for h in self.holders), Counter[str]())

    @property
    def reserved_bytes(self) -> int:
        """What duoka's allocators have."""
        return sum(holder.measured.reserved_bytes for holder in self.holders)

    @property
    def forecast_bytes(self) -> int:
        """What they have at their peaks, as forecast."""
        return sum(holder.forecast.reserved_bytes for holder in self.holders)

    @property
    def others_bytes(self) -> int | None:
        """What others have."""
        if self.total_bytes is None or self.free_bytes is None:
            return None
        return max(self.total_bytes - self.free_bytes - self.reserved_bytes, 0)

    @property
    def spare_bytes(self) -> int | None:
        """What is free beside what the plans still forecast."""
        to_come = (h.forecast.reserved_bytes - h.measured.reserved_bytes for h in self.holders)
        return (
            None if self.free_bytes is None else self.free_bytes - sum(max(b, 0) for b in to_come)
        )

    def to_dict(self) -> dict[str, Any]:
        """The form that `json.dumps` takes."""
        derived = "reserved_bytes", "forecast_bytes", "others_bytes", "spare_bytes"
        return {**to_dict(self), **{name: getattr(self, name) for name in derived}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All GPUs at one moment, and why something isn't known."""

    time: str
    gpus: tuple[GpuNow, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The form that `json.dumps` takes."""
        gpus = [gpu.to_dict() for gpu in self.gpus]
        return {"time": self.time, "gpus": gpus, "notes": list(self.notes)}


class Monitor:
    """Looks at all GPUs, again and again."""

    def __init__(self) -> None:
        self._watch: nvml.Watch | None = None
        self._why_none = ""
        try:
            self._watch = nvml.Watch()
        except DuokaError as error:
            self._why_none = f"no NVIDIA GPU: {error}"
        self._trends: dict[tuple[str, int], deque[tuple[float, int]]] = {}

    def close(self) -> None:
        """Leave the driver alone."""
        if self._watch is not None:
            self._watch.close()

    def look(self) -> Snapshot:
        """How everything is now."""
        notes = [self._why_none] if self._why_none else []
        processes: list[live.LiveProcess] = []
        try:
            processes = live.read()
        except DuokaError as error:
            notes.append(f"{error}; {error.hint}")
        gpus = _gpus([] if self._watch is None else self._watch.look(), processes)
        now = time.monotonic()
        return Snapshot(
            time=datetime.now(UTC).isoformat(timespec="milliseconds"),
            gpus=tuple(replace(gpu, seconds_left=self._seconds_left(gpu, now)) for gpu in gpus),
            notes=tuple(notes),
        )

    def _seconds_left(self, gpu: GpuNow, now: float) -> float | None:
        """When spare memory is gone, if it goes on as in the last minute."""
        spare = gpu.spare_bytes
        if spare is None or spare <= 0:
            return None
        # The driver knows other GPUs by their indices, whoever is on them.
        key = gpu.name, 0 if gpu.activity else gpu.holders[0].pid
        trend = self._trends.setdefault(key, deque())
        trend.append((now, spare))
        while trend[0][0] < now - _TREND_SECONDS:
            trend.popleft()
        if now - trend[0][0] < _LEAST_SECONDS:
            return None
        slope, _ = linear_regression([then for then, _ in trend], [size for _, size in trend])
        seconds = -spare / slope if slope < 0 else _FARTHEST_SECONDS
        return seconds if seconds < _FARTHEST_SECONDS else None


def _gpus(
    activities: list[nvml.Activity | nvml.Lost], processes: list[live.LiveProcess]
) -> Iterator[GpuNow]:
    """Every GPU once, with the processes of duoka that are on it."""
    holders: dict[str, list[Holder]] = {}
    for process in processes:
        for device in process.devices:
            holder = Holder(
                pid=process.pid,
                model=process.model,
                measured=device.measured,
                forecast=device.forecast,
                peak_reserved_bytes=device.peak_reserved_bytes,
                busy_share=device.busy_share,
            )
            # Of a virtual GPU there is one in each process.
            key = device.uuid.lower() or f"{process.pid} {device.measured.device}"
            holders.setdefault(key, []).append(holder)
    for gpu in activities:
        if isinstance(gpu, nvml.Lost):
            trouble = f"it doesn't answer: {gpu.reason}"
            yield GpuNow(
                name=str(gpu.index), product="", total_bytes=None, free_bytes=None, trouble=trouble
            )
            continue
        yield GpuNow(
            name=str(gpu.index),
            product=gpu.name,
            total_bytes=gpu.total_bytes,
            free_bytes=gpu.free_bytes,
            activity=gpu,
            holders=tuple(holders.pop(gpu.uuid.lower(), ())),
        )
    for rest in holders.values():
        budget = max(holder.forecast.budget_bytes for holder in rest)
        used = sum(holder.measured.reserved_bytes for holder in rest)
        yield GpuNow(
            name=rest[0].measured.device,
            product="",
            total_bytes=budget,
            free_bytes=max(budget - used, 0),
            holders=tuple(rest),
        )
