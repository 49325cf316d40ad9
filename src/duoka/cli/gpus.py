"""``duoka gpus``: this machine's GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from duoka.base.units import format_bytes
from duoka.hardware.detect import PresentGpu, survey
from duoka.hardware.links import Way

from .groups import with_groups
from .terminal import new_table, print_json, stdout

_MOST_PAIRS = 6


@with_groups
def gpus(
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """List this machine's GPUs: memory, processes, names for --gpus, and links.

    [bold]duoka gpus[/]
    """
    present, ways = survey()
    if json:
        links = [{"first": source, "second": target, **asdict(way)} for source, target, way in ways]
        print_json({"gpus": [gpu.to_dict() for gpu in present], "links": links})
        return
    console = stdout()
    console.print(_table(present))
    for line in (*_describe_use(present), *_describe_links(ways)):
        console.print(line, markup=False, soft_wrap=True)


def _table(present: Sequence[PresentGpu]) -> Table:
    """Build the table of GPUs; an unusable GPU has no memory to plan for."""
    table = new_table("--gpus", "torch", "GPU", "memory", "free", "to plan for", num_text_columns=3)
    for gpu in present:
        budget = None if gpu.trouble else gpu.budget_bytes
        sizes = (gpu.part.total_bytes, gpu.part.free_bytes, budget)
        texts = ("–" if size is None else format_bytes(size) for size in sizes)
        table.add_row(gpu.name, gpu.torch_name or "–", gpu.part.name, *texts)
    return table


def _describe_use(present: Sequence[PresentGpu]) -> Iterator[str]:
    """Describe other processes on each GPU, and unusable GPUs."""
    for gpu in present:
        for process in gpu.processes:
            size = "" if process.used_bytes is None else f" has {format_bytes(process.used_bytes)}"
            yield f"{gpu.name}: {process.name or 'a process'} (pid {process.pid}){size}"
        if gpu.trouble:
            yield f"{gpu.name} can't be used: {gpu.trouble.reason}"


def _describe_links(ways: Sequence[tuple[str, str, Way]]) -> Iterator[str]:
    """Describe the links between GPUs, grouped by kind, the most common kind last."""
    pairs_by_way: dict[Way, list[str]] = {}
    for source, target, way in ways:
        pairs_by_way.setdefault(way, []).append(f"{source}–{target}")
    for way, pairs in sorted(pairs_by_way.items(), key=lambda item: len(item[1])):
        names = ", ".join(pairs) if len(pairs) <= _MOST_PAIRS else f"{len(pairs)} pairs"
        by = "by NVLink" if way.kind == "NVLink" else "over PCIe, through the host"
        yield f"{names}: about {way.bytes_per_second / 1e9:.0f} GB/s {by}"
