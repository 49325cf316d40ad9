"""``duoka compare``: two saved plans side by side."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import typer

import duoka

from .groups import with_groups
from .terminal import stdout


@with_groups
def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="A plan that was saved.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="The plan to hold beside it.")],
    json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Put two saved plans side by side: what differs, bytes, seconds, modules that moved.

    [bold]duoka compare[/] before.plan after.plan
    """
    comparison = duoka.compare(duoka.Plan.load(first), duoka.Plan.load(second))
    if json:
        typer.echo(json_format.dumps(comparison.to_dict(), indent=1))
        return
    from duoka.report.terminal import render_comparison

    stdout().print(render_comparison(comparison, (str(first), str(second))))
