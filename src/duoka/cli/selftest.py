"""``duoka selftest``: whether duoka is right and fast on this machine's GPUs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from duoka.base.progress import say_import

from . import planning
from .doctor import print_diagnosis
from .errors import NOT_OK, redact
from .groups import with_groups
from .options import PlanOptions
from .terminal import check_file, working, write_file

_PATH = re.compile(r"(?<![\w.)])~?/[^\s'\",:;]+")


@with_groups
def selftest(
    options: Annotated[PlanOptions, ("gpus",)],
    quick: Annotated[bool, typer.Option("--quick", help="Use a tiny model.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a JSON report without names, paths and UUIDs."),
    ] = None,
) -> None:
    """Test duoka on this machine's GPUs: numbers, memory beside the forecast, and speed.

    [bold]duoka selftest[/]

    [bold]duoka selftest[/] --gpus 0 --out selftest.json
    """
    check_file(out, "the report")
    with working():
        say_import("torch")
        from duoka.tools.doctor import bundle
        from duoka.tools.selftest.run import run_selftest

        diagnosis = run_selftest(options.gpus or planning.ALL_GPUS, quick=quick)
    if out is not None:
        write_file(out, bundle(diagnosis, lambda text: _PATH.sub("***", redact(text))))
    print_diagnosis(diagnosis)
    if diagnosis.severity == "error":
        raise typer.Exit(NOT_OK)
