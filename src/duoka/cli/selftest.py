"""``duoka selftest``: whether duoka is right and fast on this machine's GPUs."""

from __future__ import annotations

from typing import Annotated

import typer

from duoka.base.progress import say_import

from . import planning
from .doctor import show_diagnosis
from .errors import NOT_OK
from .groups import with_groups
from .options import PlanOptions
from .terminal import working


@with_groups
def selftest(
    options: Annotated[PlanOptions, ("gpus",)],
    quick: Annotated[bool, typer.Option("--quick", help="Use a tiny model.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Test duoka on this machine's GPUs: numbers, memory beside the forecast, and speed.

    [bold]duoka selftest[/]

    [bold]duoka selftest[/] --gpus 0 --json
    """
    with working():
        say_import("torch")
        from duoka.tools.selftest.run import run_selftest

        diagnosis = run_selftest(options.gpus or planning.ALL_GPUS, quick=quick)
    show_diagnosis(diagnosis, as_json=json)
    if diagnosis.severity == "error":
        raise typer.Exit(NOT_OK)
