"""``duoka plan --dtypes``: weights of each precision side by side."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rich import box
from rich.table import Table

from duoka.api.plan import find_or_trace
from duoka.base.units import GIB
from duoka.planner.limits import on_fleet
from duoka.planner.precisions import Precision, precisions
from duoka.planner.room import is_tight, least_room_bytes

from .options import ModelOptions, PlanOptions
from .planning import read_request
from .terminal import stdout, working


def plan_each(model: ModelOptions, options: PlanOptions) -> list[Precision]:
    """Plan each precision."""
    checkpoint, request = read_request(model, options, None)
    with working():
        problem = on_fleet(request, request.gpus)
        return list(precisions(checkpoint, problem, partial(find_or_trace, checkpoint)))


def show_precisions(rows: Sequence[Precision]) -> None:
    """Print them as a table."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("weights in", no_wrap=True)
    for name in ("size", "GPUs", "reserved", "least left", "tokens in the cache"):
        table.add_column(name, justify="right")
    for precision in rows:
        table.add_row(precision.name, *_numbers(precision))
    table.caption, table.caption_justify = "in GiB; training is in 16 bit, with AdamW", "left"
    console = stdout()
    console.print(table)
    for precision in rows:
        if precision.trouble:
            console.print(f"{precision.name}: {precision.trouble}", markup=False, soft_wrap=True)


def _numbers(precision: Precision) -> list[str]:
    """A row of the table behind its name."""
    size = f"{precision.weight_bytes / GIB:.2f}" if precision.weight_bytes else "–"
    if precision.plan is None:
        return [size, "–", "–" if precision.trouble else "does not fit"]
    forecast = precision.plan.forecast
    note = ", little room" if any(map(is_tight, forecast.devices)) else ""
    return [
        size,
        str(len(forecast.devices)),
        " + ".join(f"{stage.reserved_bytes / GIB:.2f}" for stage in forecast.devices),
        f"{least_room_bytes(forecast) / GIB:.2f}{note}",
        f"{precision.cache_tokens:,}" if precision.cache_tokens else "–",
    ]
