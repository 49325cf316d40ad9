"""GPUs at one moment, for people: a bar for each, what each process has beside its forecast."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from duoka.base.units import format_bytes, format_seconds, unit_for
from duoka.hardware.nvml import Activity
from duoka.report.terminal.plan import KINDS, bar, kinds_of, legend

from .snapshot import GpuNow, Holder, Snapshot

_WIDEST_BAR = 78
_LABEL_COLUMNS, _NUMBER_COLUMNS = 21, 9
_ALWAYS = ("weights", "activations", "overhead")
_MOST_OTHERS = 4


class View:
    """What rich prints for a snapshot; `way_out` says how one leaves, where that isn't plain."""

    def __init__(self, snapshot: Snapshot, way_out: str = "") -> None:
        self._snapshot = snapshot
        self._way_out = way_out
        self._kinds = [kind for kind in KINDS if _is_shown(kind, snapshot)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        snapshot = self._snapshot
        moment = datetime.fromisoformat(snapshot.time).astimezone()
        yield Text(f"duoka top · {moment:%H:%M:%S}{self._way_out}", style="bold")
        for note in snapshot.notes:
            yield Text(note)
        if not snapshot.gpus:
            yield Text("no process of duoka runs for this user")
            return
        columns = min(options.max_width, _WIDEST_BAR)
        for gpu in snapshot.gpus:
            yield Text("\n").join(self._gpu(gpu, columns, ascii_only=options.ascii_only))
        kinds = [*self._kinds, "free", "others"]
        yield Text("\n") + legend(kinds, ascii_only=options.ascii_only)

    def _gpu(self, gpu: GpuNow, columns: int, *, ascii_only: bool) -> Iterator[Text]:
        yield Text()
        yield _heading(gpu)
        if gpu.total_bytes is not None and gpu.free_bytes is not None:
            outside = {"others": gpu.others_bytes or 0, "free": gpu.free_bytes}
            parts = {kind: gpu.kinds[kind] for kind in self._kinds} | outside
            yield bar(parts, columns, ascii_only=ascii_only)
        if gpu.holders:
            yield from self._table(gpu)
        yield from _remarks(gpu)

    def _table(self, gpu: GpuNow) -> Iterator[Text]:
        """What each process has now, and beneath it what its plan forecasts for its peak."""
        largest = max(max(h.forecast.budget_bytes, h.measured.reserved_bytes) for h in gpu.holders)
        unit, divisor = unit_for(largest)
        names = [*(KINDS[kind].column for kind in self._kinds), "reserved"]
        head = "".join(name.rjust(_NUMBER_COLUMNS) for name in names)
        yield Text(f"in {unit}".ljust(_LABEL_COLUMNS) + head, style="dim")
        for holder in gpu.holders:
            yield Text(f"{holder.model} (pid {holder.pid})" + _busy(holder))
            for label, stage in (("now", holder.measured), ("plan", holder.forecast)):
                kinds = dict(kinds_of(stage))
                sizes = [*(kinds[kind] for kind in self._kinds), stage.reserved_bytes]
                numbers = "".join(f"{size / divisor:.2f}".rjust(_NUMBER_COLUMNS) for size in sizes)
                yield Text(f"  {label}".ljust(_LABEL_COLUMNS) + numbers)


def _is_shown(kind: str, snapshot: Snapshot) -> bool:
    holders = [holder for gpu in snapshot.gpus for holder in gpu.holders]
    stages = [stage for holder in holders for stage in (holder.measured, holder.forecast)]
    if kind in _ALWAYS:
        return bool(holders)
    return any(dict(kinds_of(stage)).get(kind) for stage in stages)


def _heading(gpu: GpuNow) -> Text:
    name = f"GPU {gpu.name}" if gpu.activity or gpu.trouble else gpu.name
    text = Text(f"{name} {gpu.product}".rstrip(), style="bold")
    if gpu.total_bytes is not None and gpu.free_bytes is not None:
        used, total = format_bytes(gpu.total_bytes - gpu.free_bytes), format_bytes(gpu.total_bytes)
        text.append(f"  {used} of {total}", style="not bold")
    facts = [gpu.trouble] if gpu.trouble else list(_facts(gpu.activity))
    return text.append("".join(f" · {fact}" for fact in facts), style="not bold")


def _facts(activity: Activity | None) -> Iterator[str]:
    """What a GPU is doing."""
    if activity is None:
        return
    if activity.utilization is not None:
        yield f"{activity.utilization:.0%}"
    if activity.temperature_celsius is not None:
        yield f"{activity.temperature_celsius} °C"
    if activity.power_watts is not None:
        limit = activity.power_limit_watts
        yield f"{activity.power_watts:.0f}{'' if limit is None else f' of {limit:.0f}'} W"
    for link, received, sent in (
        ("PCIe", activity.pcie_received_bytes_per_second, activity.pcie_sent_bytes_per_second),
        (
            "NVLink",
            activity.nvlink_received_bytes_per_second,
            activity.nvlink_sent_bytes_per_second,
        ),
    ):
        if received is not None and sent is not None:
            yield f"{link} in {received / 1e9:.1f}, out {sent / 1e9:.1f} GB/s"


def _busy(holder: Holder) -> str:
    return "" if holder.busy_share is None else f" · busy {holder.busy_share:.0%}"


def _remarks(gpu: GpuNow) -> Iterator[Text]:
    """Who else is there, and for how long the memory will do."""
    pids = {holder.pid for holder in gpu.holders}
    processes = gpu.activity.processes if gpu.activity else ()
    others = [process for process in processes if process.pid not in pids]
    for other in others[:_MOST_OTHERS]:
        size = "" if other.used_bytes is None else f" has {format_bytes(other.used_bytes)}"
        yield Text(f"{other.name or 'a process'} (pid {other.pid}){size}")
    if len(others) > _MOST_OTHERS:
        yield Text(f"and {len(others) - _MOST_OTHERS} more processes")
    spare = gpu.spare_bytes
    if spare is not None and spare < 0:
        text = f"the next allocations won't fit: at its peak the plan lacks {format_bytes(-spare)}"
        yield Text(text, style="bold red")
    elif spare is not None and gpu.holders:
        yield Text(f"at the plan's peak {format_bytes(spare)} stay free")
    if gpu.seconds_left is not None:
        left = format_seconds(gpu.seconds_left)
        text = f"at the pace of the last minute allocations no longer fit in {left}"
        yield Text(text, style="yellow")
