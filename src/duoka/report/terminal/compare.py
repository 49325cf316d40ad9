"""Two plans side by side, for people: differences first, then bytes, seconds and moved modules."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from duoka.base.units import format_bytes, format_count
from duoka.forecast.stage_bytes import StageBytes
from duoka.planner.compare import Comparison, DevicePair

from .explain import shortly
from .names import name_modules
from .summary import kinds_of

_SECONDS = {
    "total_seconds": "a request",
    "slowest_seconds": "the slowest stage",
    "first_token_seconds": "to the first token",
    "token_seconds": "a token",
    "step_seconds": "a step",
}


def render_comparison(comparison: Comparison, names: tuple[str, str]) -> RenderableType:
    """What rich prints for two plans."""
    return _View(comparison, names)


class _View:
    def __init__(self, comparison: Comparison, names: tuple[str, str]) -> None:
        self._comparison = comparison
        self._names = names

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        comparison = self._comparison
        if comparison.same:
            yield Text("the plans say the same")
            return
        if comparison.differences:
            table = self._table("differs")
            for each in comparison.differences:
                table.add_row(each.what, each.first, each.second)
            yield table
        yield from self._bytes()
        if comparison.seconds:
            yield ""
            yield self._pace()
        yield from _moves(comparison)

    def _table(self, head: str) -> Table:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(head, no_wrap=True)
        for name in self._names:
            table.add_column(name, overflow="fold")
        return table

    def _bytes(self) -> Iterator[RenderableType]:
        for device in self._comparison.devices:
            yield ""
            if device.first == device.second:
                assert device.first is not None, "one of the plans uses it"
                yield Text(f"{device.device}: the same, {_full(device.first)}")
            else:
                yield self._held(device)

    def _held(self, device: DevicePair) -> Table:
        table = self._table(device.device)
        sides = [_sizes(each) for each in (device.first, device.second)]
        for kind in dict.fromkeys(kind for side in sides for kind in side):
            one, other = (side.get(kind) for side in sides)
            if one or other:
                table.add_row(kind, _told(one), _told(other, one))
        return table

    def _pace(self) -> Table:
        table = self._table("time")
        for name, one, other in self._comparison.seconds:
            if name in _SECONDS:
                times = ["unknown" if each is None else shortly(each) for each in (one, other)]
                table.add_row(_SECONDS[name], *times)
            else:
                rates = ["unknown" if each is None else f"{each:,.1f}" for each in (one, other)]
                table.add_row(name.replace("_", " "), *rates)
        return table


def _sizes(forecast: StageBytes | None) -> dict[str, int]:
    if forecast is None:
        return {}
    return {
        **dict(kinds_of(forecast)),
        "reserved": forecast.reserved_bytes,
        "budget": forecast.budget_bytes,
        "free": forecast.free_bytes,
    }


def _told(size: int | None, other: int | None = None) -> str:
    if size is None:
        return "not used"
    if other is None or other == size:
        return format_bytes(size)
    sign = "+" if size > other else "-"
    return f"{format_bytes(size)} ({sign}{format_bytes(abs(size - other))})"


def _full(forecast: StageBytes) -> str:
    return f"{format_bytes(forecast.reserved_bytes)} of {format_bytes(forecast.budget_bytes)}"


def _moves(comparison: Comparison) -> Iterator[RenderableType]:
    yield ""
    if comparison.moves is None:
        yield Text("the models have different modules: none can be said to have moved")
        return
    if not comparison.moves:
        yield Text("every module is where it was")
    for move in comparison.moves:
        count = format_count(len(move.modules), "module")
        yield Text(f"{move.source} → {move.target}: {count}: {name_modules(move.modules)}")
