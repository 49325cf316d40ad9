"""``duoka gpus``: what is there."""

from __future__ import annotations

import json as json_format
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from duoka.base.units import format_bytes
from duoka.hardware.detect import Connection, PresentGpu, survey

from .groups import with_groups
from .terminal import stdout

_MOST_PAIRS = 6


@with_groups
def gpus(
    json: Annotated[bool, typer.Option("--json", help="Print the same as JSON.")] = False,
) -> None:
    """Show this machine's GPUs: memory, who uses it, their names for --gpus, and their links.

    [bold]duoka gpus[/]
    """
    present, connections = survey()
    if json:
        data = {"gpus": [*map(asdict, present)], "links": [*map(asdict, connections)]}
        typer.echo(json_format.dumps(data, indent=1))
        return
    console = stdout()
    console.print(_table(present))
    for line in (*_remarks(present), *_links(connections)):
        console.print(line, markup=False, soft_wrap=True)


def _table(present: Sequence[PresentGpu]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("--gpus", overflow="fold")
    table.add_column("torch", no_wrap=True)
    table.add_column("GPU", overflow="fold")
    for name in ("memory", "free", "to plan for"):
        table.add_column(name, justify="right", no_wrap=True)
    for gpu in present:
        sizes = (gpu.total_bytes, gpu.free_bytes, gpu.budget_bytes)
        texts = ("–" if size is None else format_bytes(size) for size in sizes)
        table.add_row(gpu.name, gpu.torch_name or "–", gpu.product, *texts)
    return table


def _remarks(present: Sequence[PresentGpu]) -> Iterator[str]:
    """Who uses a GPU, and why one can't be used."""
    for gpu in present:
        for process in gpu.processes:
            size = "" if process.used_bytes is None else f" has {format_bytes(process.used_bytes)}"
            yield f"{gpu.name}: {process.name or 'a process'} (pid {process.pid}){size}"
        if gpu.trouble:
            yield f"{gpu.name} can't be used: {gpu.trouble}"


def _links(connections: Sequence[Connection]) -> Iterator[str]:
    """Pairs that are connected alike, together; the most common kind last."""
    alike: dict[tuple[str, float], list[str]] = {}
    for link in connections:
        key = (link.kind, link.bytes_per_second)
        alike.setdefault(key, []).append(f"{link.first}–{link.second}")
    ordered = sorted(alike.items(), key=lambda item: len(item[1]))
    for left, ((kind, speed), pairs) in zip(range(len(ordered), 0, -1), ordered, strict=True):
        named = ", ".join(pairs)
        if len(pairs) > _MOST_PAIRS and left > 1:
            named = f"{', '.join(pairs[:_MOST_PAIRS])} and {len(pairs) - _MOST_PAIRS} more"
        elif len(pairs) > _MOST_PAIRS:
            named = "all pairs" if len(ordered) == 1 else "all other pairs"
        by = "by NVLink" if kind == "NVLink" else "over PCIe, through the host"
        yield f"{named}: about {speed / 1e9:.0f} GB/s {by}"
