"""Render a snapshot: a bar per GPU, and the memory of each process beside its forecast."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from duoka.base.units import format_bytes, unit_for
from duoka.report.terminal.plan import KINDS, draw_bar, draw_legend

from .snapshot import GpuNow, GpuSnapshot

_WIDEST_BAR = 78
_LABEL_COLUMNS, _NUMBER_COLUMNS = 18, 9
# Kinds of memory that are shown even if they are empty.
_ALWAYS = ("weights", "activations", "overhead")
_MAX_OTHERS = 4


class View:
    """Rich renderable of a snapshot; `suffix` is appended to the first line."""

    def __init__(self, snapshot: GpuSnapshot, suffix: str = "") -> None:
        self._snapshot = snapshot
        self._suffix = suffix
        processes = [process for gpu in snapshot.gpus for process in gpu.processes]
        stages = [stage.kinds for p in processes for stage in (p.measured, p.forecast)]
        present = {kind for stage in stages for kind, size in stage.items() if size}
        self._kinds = [kind for kind in KINDS if kind in present or (stages and kind in _ALWAYS)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        snapshot = self._snapshot
        moment = datetime.fromisoformat(snapshot.time).astimezone()
        yield Text(f"duoka top · {moment:%H:%M:%S}{self._suffix}", style="bold")
        yield from map(Text, snapshot.notes)
        if not any(gpu.processes for gpu in snapshot.gpus):
            yield Text("this user runs no duoka process")
        columns = min(options.max_width, _WIDEST_BAR)
        for gpu in snapshot.gpus:
            yield from self._gpu(gpu, columns, ascii_only=options.ascii_only)
        total, available = snapshot.host_total_bytes, snapshot.host_available_bytes
        if total is not None and available is not None:
            used = f" · {format_bytes(total - available)} of {format_bytes(total)}"
            yield Text("\nhost memory", style="bold").append(used, style="not bold")
        if snapshot.gpus:
            kinds = [*self._kinds, "others", "free"]
            yield Text("\n") + draw_legend(kinds, ascii_only=options.ascii_only)

    def _gpu(self, gpu: GpuNow, columns: int, *, ascii_only: bool) -> Iterator[Text]:
        """Render a GPU: heading, bar, the processes' memory and other memory."""
        yield _heading(gpu)
        if gpu.others_bytes is not None and gpu.free_bytes is not None:
            stages = [process.measured.kinds for process in gpu.processes]
            parts = {kind: sum(stage[kind] for stage in stages) for kind in self._kinds}
            parts |= {"others": gpu.others_bytes, "free": gpu.free_bytes}
            yield draw_bar(parts, columns, ascii_only=ascii_only)
        if gpu.processes:
            yield from self._table(gpu)
        yield from _describe_other_memory(gpu)

    def _table(self, gpu: GpuNow) -> Iterator[Text]:
        """Yield a table: per process its current memory, and the memory at its plan's peak."""
        sizes = [p.forecast.budget_bytes for p in gpu.processes]
        unit, divisor = unit_for(max(*sizes, gpu.reserved_bytes))
        names = [*(KINDS[kind].column for kind in self._kinds), "reserved"]
        head = "".join(name.rjust(_NUMBER_COLUMNS) for name in names)
        yield Text(f"in {unit}".ljust(_LABEL_COLUMNS) + head, style="dim")
        for process in gpu.processes:
            busy = process.busy_share
            share = "" if busy is None else f" · busy {busy:.0%}"
            yield Text(f"{process.model} (pid {process.pid}){share}")
            for label, stage in (("now", process.measured), ("plan", process.forecast)):
                kinds = {**stage.kinds, "reserved": stage.reserved_bytes}
                row = (kinds[kind] / divisor for kind in [*self._kinds, "reserved"])
                numbers = "".join(f"{size:.2f}".rjust(_NUMBER_COLUMNS) for size in row)
                yield Text(f"  {label}".ljust(_LABEL_COLUMNS) + numbers)


def _heading(gpu: GpuNow) -> Text:
    """Render the name of a GPU with its used memory and utilization."""
    name = f"GPU {gpu.name}" if gpu.name.isdecimal() else gpu.name
    text = Text(f"\n{name} {gpu.product}".rstrip(), style="bold")
    facts = [gpu.trouble] if gpu.trouble else []
    if gpu.total_bytes is not None and gpu.free_bytes is not None:
        used = format_bytes(gpu.total_bytes - gpu.free_bytes)
        facts.append(f"{used} of {format_bytes(gpu.total_bytes)}")
    if gpu.activity and gpu.activity.utilization is not None:
        facts.append(f"{gpu.activity.utilization:.0%}")
    return text.append("".join(f" · {fact}" for fact in facts), style="not bold")


def _describe_other_memory(gpu: GpuNow) -> Iterator[Text]:
    """Describe processes other than duoka's, and the memory left free at the planned peak."""
    pids = {process.pid for process in gpu.processes}
    neighbours = [p for p in (gpu.activity.processes if gpu.activity else ()) if p.pid not in pids]
    for process in neighbours[:_MAX_OTHERS]:
        size = "" if process.used_bytes is None else f" has {format_bytes(process.used_bytes)}"
        yield Text(f"{process.name or 'a process'} (pid {process.pid}){size}")
    if len(neighbours) > _MAX_OTHERS:
        yield Text(f"and {len(neighbours) - _MAX_OTHERS} more processes")
    spare = gpu.spare_bytes
    if spare is not None and gpu.processes:
        text = f"{format_bytes(spare)} stay free at the planned peak"
        if spare < 0:
            text = f"allocations will fail: {format_bytes(-spare)} are missing at the planned peak"
        yield Text(text, style="bold red" if spare < 0 else "")
