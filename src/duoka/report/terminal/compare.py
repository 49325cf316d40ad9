"""Render two plans side by side: differences, bytes, seconds, moved modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from duoka.base.units import format_bytes, format_count
from duoka.forecast.stage_bytes import StageBytes
from duoka.planner.compare import Comparison, DevicePair

from .explain import format_duration
from .words import name_modules

_SECONDS = {
    "total_seconds": "total time",
    "slowest_seconds": "slowest stage",
    "first_token_seconds": "time to first token",
    "token_seconds": "a token",
}


def render_comparison(comparison: Comparison, names: tuple[str, str]) -> RenderableType:
    """Return a rich renderable of a comparison; `names` are the titles of the two plans."""
    if comparison.same:
        return Text("the plans are equal")
    return Group(*_parts(comparison, names))


def _parts(comparison: Comparison, names: tuple[str, str]) -> Iterator[RenderableType]:
    """Yield the differing facts, a table per device, the times and the moved modules."""
    if comparison.differences:
        rows = ((pair.what, pair.first, pair.second) for pair in comparison.differences)
        yield _table("differs", names, rows)
    for device in comparison.devices:
        yield ""
        if device.first and device.first == device.second:
            reserved, budget = device.first.reserved_bytes, device.first.budget_bytes
            full = f"{format_bytes(reserved)} of {format_bytes(budget)}"
            yield Text(f"{device.device}: the same, {full}")
        else:
            yield _table(device.device, names, _compare_bytes(device))
    if comparison.seconds:
        yield ""
        yield _table("time", names, _compare_seconds(comparison))
    yield from _render_moves(comparison)


def _table(head: str, names: tuple[str, str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(head, no_wrap=True)
    for name in names:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _compare_bytes(device: DevicePair) -> Iterator[Sequence[str]]:
    """Yield a row per kind of memory: both sizes, the second with its difference."""
    sides = [_bytes_by_kind(side) for side in (device.first, device.second)]
    for kind in dict.fromkeys(kind for side in sides for kind in side):
        first, second = (side.get(kind) for side in sides)
        if first or second:
            yield kind, _format_size(first), _format_size(second, first)


def _compare_seconds(comparison: Comparison) -> Iterator[Sequence[str]]:
    """Yield a row per time or speed with both values."""
    for name, *values in comparison.seconds:
        say = format_duration if name in _SECONDS else "{:,.1f}".format
        texts = ["unknown" if value is None else say(value) for value in values]
        yield _SECONDS.get(name, name.replace("_", " ")), *texts


def _bytes_by_kind(forecast: StageBytes | None) -> dict[str, int]:
    """Return the bytes of a device by kind; {} for an unused device."""
    if forecast is None:
        return {}
    return {
        **forecast.kinds,
        "reserved": forecast.reserved_bytes,
        "budget": forecast.budget_bytes,
        "free": forecast.free_bytes,
    }


def _format_size(size: int | None, reference: int | None = None) -> str:
    """Format a size with its difference from a reference; None means an unused device."""
    if size is None:
        return "not used"
    if reference is None or reference == size:
        return format_bytes(size)
    sign = "+" if size > reference else "-"
    return f"{format_bytes(size)} ({sign}{format_bytes(abs(size - reference))})"


def _render_moves(comparison: Comparison) -> Iterator[RenderableType]:
    """Render the modules that moved between devices."""
    yield ""
    if comparison.moves is None:
        yield Text("the models have different modules, which can't be compared")
        return
    if not comparison.moves:
        yield Text("no module moved")
    for move in comparison.moves:
        count = format_count(len(move.modules), "module")
        yield Text(f"{move.source} → {move.target}: {count}: {name_modules(move.modules)}")
