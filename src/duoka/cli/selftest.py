"""``duoka selftest``: whether duoka is right and fast on this machine's GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import duoka
from duoka.base.progress import say_import

from . import planning
from .doctor import print_diagnosis
from .errors import NOT_OK, redact
from .groups import with_groups
from .options import PlanOptions
from .terminal import check_file, working, write_file


@with_groups
def selftest(
    options: Annotated[PlanOptions, ("gpus",)],
    quick: Annotated[
        bool, typer.Option("--quick", help="Use a tiny model: numbers and memory, no speeds.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the self-test as JSON, to attach to a report; names, paths and UUIDs are "
            "removed.",
        ),
    ] = None,
) -> None:
    """Test duoka on this machine's GPUs: right numbers, forecast memory, and speed.

    [bold]duoka selftest[/]

    [bold]duoka selftest[/] --gpus 0 --out selftest.json
    """
    check_file(out, "the self-test")
    gpus = options.gpus or planning.ALL_GPUS
    duoka.Fleet.parse(gpus)  # refuses missing GPUs before torch is imported
    with working():
        say_import("torch")
        from duoka.tools import selftest as tool

        diagnosis = tool.selftest(gpus, quick=quick)
    if out is not None:
        write_file(out, tool.to_report(diagnosis, redact))
    print_diagnosis(diagnosis)
    if diagnosis.severity == "error":
        raise typer.Exit(NOT_OK)
