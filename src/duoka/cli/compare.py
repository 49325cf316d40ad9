"""``duoka compare``: two saved plans side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import duoka

from .groups import with_groups
from .terminal import print_json, stdout


@with_groups
def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="A saved plan.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="The plan to compare it with.")],
    json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Compare two saved plans: workload, memory, time, and moved modules.

    [bold]duoka compare[/] before.plan after.plan
    """
    comparison = duoka.compare(duoka.Plan.load(first), duoka.Plan.load(second))
    if json:
        print_json(comparison.to_dict())
        return
    from duoka.report.terminal import render_comparison

    stdout().print(render_comparison(comparison, (str(first), str(second))))
