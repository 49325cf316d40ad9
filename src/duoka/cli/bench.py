"""``duoka bench``: measure what planning can't know from published figures."""

from __future__ import annotations

import json as json_format
from typing import TYPE_CHECKING, Annotated

import typer

from duoka.errors import UsageError
from duoka.serial import to_dict
from duoka.units import format_bytes

from . import options, planning
from .terminal import stderr, stdout

if TYPE_CHECKING:
    from duoka.bench import Calibrated


def bench(
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Measure the GPUs' overhead, memory, matrix rates, launches and links, and keep "
            "it for the plans to come. It takes less than a minute.",
        ),
    ] = False,
    gpus: options.Gpus = None,
    json: Annotated[bool, typer.Option("--json", help="Print what was measured as JSON.")] = False,
    debug: options.Debug = False,
) -> None:
    """Measure this machine.

    [bold]duoka bench[/] --calibrate

    [bold]duoka bench[/] --calibrate --gpus 2,3

    [bold]duoka bench[/] --calibrate --gpus virtual:2x1GiB   (a rehearsal)
    """
    if not calibrate:
        raise UsageError("nothing was said to be measured", hint="say what: --calibrate")
    _calibrate(planning.ALL_GPUS if gpus is None else gpus, json=json)


def _calibrate(gpus: str, *, json: bool) -> None:
    fleet = planning.read_fleet(gpus)
    from duoka.bench import calibrate

    console = stderr()
    with console.status("measuring") as status:
        found = calibrate(fleet, told=status.update)
    if json:
        typer.echo(json_format.dumps(to_dict(found.calibration), indent=1))
    else:
        _print(found)
    if found.path is None:
        console.print("virtual GPUs: a rehearsal, of which nothing is kept", markup=False)
    else:
        console.print(f"kept in {found.path}; remove it to forget", markup=False, soft_wrap=True)


def _print(found: Calibrated) -> None:
    from rich import box
    from rich.table import Table

    measured = found.calibration
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("GPU", overflow="fold")
    for name in ("outside", "GB/s", "TFLOPs", "fp32", "launch", "from host", "to host"):
        table.add_column(name, justify="right")
    for each in measured.gpus:
        table.add_row(
            each.product,
            format_bytes(each.overhead_bytes),
            _number(each.memory_bytes_per_second, 1e9),
            _number(each.flops_per_second, 1e12),
            _number(each.float32_flops_per_second, 1e12),
            f"{_number(each.launch_seconds, 1e-6)} µs",
            _pair(each.from_pinned_bytes_per_second, each.from_pageable_bytes_per_second),
            _pair(each.to_pinned_bytes_per_second, each.to_pageable_bytes_per_second),
        )
    table.caption = (
        "outside: held outside torch's allocator; GB/s of its memory; TFLOPs in 16 bit;\n"
        "from and to the host in GB/s, pinned and pageable"
    )
    table.caption_justify = "left"
    stdout().print(table)
    for link in measured.links:
        stdout().print(
            f"{link.source} → {link.target}  {_number(link.bytes_per_second, 1e9)} GB/s, "
            f"{_number(link.latency_seconds, 1e-6)} µs",
            markup=False,
            soft_wrap=True,
        )


def _pair(pinned: float | None, pageable: float) -> str:
    told = "–" if pinned is None else _number(pinned, 1e9)
    return f"{told}, {_number(pageable, 1e9)}"


def _number(value: float, unit: float) -> str:
    return f"{value / unit:.3g}"
