"""Render measurements beside the forecast."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from duoka.base.units import format_bytes, format_roughly, format_seconds
from duoka.planner.plan import Plan

from ..measured import Measured


def render_measured(plan: Plan, measured: Measured) -> RenderableType:
    """Return a rich renderable of peak memory by device and of token speed."""
    return Group(*_measured_parts(plan, measured))


def _measured_parts(plan: Plan, measured: Measured) -> Iterator[RenderableType]:
    """Yield the table of peaks, the speed, and a note if less context was used than planned."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("device")
    for name in ("allocated peak", "forecast", "reserved peak", "forecast"):
        table.add_column(name, justify="right")
    for peaks, stage in measured.beside(plan.forecast):
        sizes = (
            peaks.allocated_bytes,
            stage.allocated_bytes,
            peaks.reserved_bytes,
            stage.reserved_bytes,
        )
        table.add_row(peaks.device, *map(format_bytes, sizes))
    if table.row_count:
        yield table
    if pace := _describe_speed(measured):
        yield Text(pace)
    if measured.expert_hits is not None:
        yield Text(f"{measured.expert_hits:.0%} of the chosen experts were in the GPUs' caches")
    if 0 < measured.context_tokens < plan.workload.context_tokens:
        yield Text(
            f"The forecast is for {plan.workload.context_tokens} tokens; at most "
            f"{measured.context_tokens} were used."
        )


def _describe_speed(measured: Measured) -> str:
    """Describe the time to first token and the decode speed; "" if nothing was timed."""
    if measured.first_token_seconds is None:
        return ""
    text = f"first token after {format_seconds(measured.first_token_seconds)}"
    if measured.tokens_per_second is None:
        return text
    return f"{text}, then {format_roughly(measured.tokens_per_second)} tokens/s"
