"""What a checked run costs: memory at its peaks, transfers, and waits for a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from duoka.base.units import format_bytes, format_count

from ..check_report import PeakMemory, Report
from . import words

_LINE_COLUMNS = 72  # with fewer there is a list instead of a table
_HEADINGS = {"activations": "activ.", "gradients": "grads"}
_MOST_SYNCS = 12
_LONGEST_TEXT = 40


def render_costs(report: Report) -> Iterator[RenderableType]:
    """Memory, transfers and synchronisations, each if there are any."""
    if report.memory:
        yield _Memory(report.memory)
    if report.transfers:
        yield Group(Text("transfers, in one step", style="bold"), _transfers(report))
    if report.syncs:
        yield Group(Text("the CPU waits for a GPU, in one step", style="bold"), _syncs(report))


class _Memory:
    def __init__(self, memory: Sequence[PeakMemory]) -> None:
        self._memory = memory

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width >= _LINE_COLUMNS:
            yield from self._table()
        else:
            yield Text("memory at its peak", style="bold")
            yield from map(_listed, self._memory)
        for peak in self._memory:
            if peak.place is not None:
                yield _set_by(peak)

    def _table(self) -> Iterator[RenderableType]:
        unit, divisor = _unit(max(peak.allocated_bytes for peak in self._memory))
        kinds = list(dict.fromkeys(kind for peak in self._memory for kind in peak.kinds))
        kinds = [kind for kind in kinds if any(peak.kinds.get(kind) for peak in self._memory)]
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("device", no_wrap=True)
        for kind in (*(_HEADINGS.get(kind, kind) for kind in kinds), "allocated", "reserved"):
            table.add_column(kind, justify="right")
        budgets = any(peak.budget_bytes is not None for peak in self._memory)
        if budgets:
            table.add_column("budget", justify="right")
        for peak in self._memory:
            sizes = [peak.kinds.get(kind, 0) for kind in kinds]
            sizes += [peak.allocated_bytes, peak.reserved_bytes]
            style = "bold red" if peak.overflows else ""
            cells = [f"{size / divisor:.2f}" for size in sizes]
            if budgets:
                known = peak.budget_bytes
                cells.append("" if known is None else f"{known / divisor:.2f}")
            table.add_row(peak.device, *cells, style=style)
        yield Text.assemble(("memory at its peak", "bold"), f", in {unit}")
        yield table


def _unit(largest_bytes: int) -> tuple[str, int]:
    units = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
    return next((each for each in units.items() if largest_bytes >= each[1]), ("KiB", 2**10))


def _listed(peak: PeakMemory) -> Text:
    style = "bold red" if peak.overflows else "bold"
    budget = "" if peak.budget_bytes is None else f" of {format_bytes(peak.budget_bytes)}"
    text = Text.assemble((peak.device, style))
    for kind, size in peak.kinds.items():
        text.append(f"\n  {kind}: {format_bytes(size)}")
    text.append(f"\n  allocated: {format_bytes(peak.allocated_bytes)}")
    return text.append(f"\n  reserved: {format_bytes(peak.reserved_bytes)}{budget}")


def _set_by(peak: PeakMemory) -> Text:
    assert peak.place is not None
    if not peak.phase:
        return Text(f"{peak.device}: set by the weights alone")
    text = f"{peak.device}: set in {peak.phase} at {words.where(peak.place)}"
    if peak.module:
        text += f" in {words.module(peak.module)}"
    if peak.place.text:
        text += f": {words.cropped(peak.place.text, _LONGEST_TEXT)}"
    return Text(text)


def _transfers(report: Report) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(2):
        table.add_column()
    for _ in range(2):
        table.add_column(justify="right")
    for each in report.transfers:
        hops = format_count(each.hops, "hop")
        ends = f"{each.source} → {each.target}"
        table.add_row(each.phase, ends, hops, format_bytes(each.num_bytes))
    return Padding(table, (0, 0, 0, 2))


def _syncs(report: Report) -> RenderableType:
    # Two on one line are told as one.
    counts: Counter[tuple[str, str, str]] = Counter()
    for sync in report.syncs:
        counts[sync.phase, sync.op, words.where(sync.place)] += sync.count
    told = [
        Text(f"{phase}: {op}, {words.times(count)}, at {where}")
        for (phase, op, where), count in list(counts.items())[:_MOST_SYNCS]
    ]
    more = len(counts) - _MOST_SYNCS
    if more > 0:
        told.append(Text(f"and {more} more, which --json shows"))
    return Padding(Group(*told), (0, 0, 0, 2))
