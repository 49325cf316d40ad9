"""``duoka doctor``: findings about the machine and a model, with advice."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import duoka
from duoka.base.serialization import to_dict
from duoka.base.units import format_count

from . import planning
from .errors import NOT_OK, WARNED
from .groups import with_groups
from .machine import versions
from .options import ModelOptions, PlanOptions
from .terminal import print_json, stdout, working

if TYPE_CHECKING:
    from duoka.tools.doctor import Diagnosis, Finding

_STYLES = {
    "ok": "green",
    "note": "cyan",
    "skipped": "dim",
    "warning": "bold yellow",
    "error": "bold red",
}
_CODES = {"warning": WARNED, "error": NOT_OK}


@with_groups
def doctor(
    model: Annotated[ModelOptions, ("model",)],
    options: Annotated[PlanOptions, ("gpus",)],
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Diagnose this machine, its GPUs and a model, and suggest what to do.

    [bold]duoka doctor[/]

    [bold]duoka doctor[/] ./glm-4-9b-chat --gpus 2,3

    [bold]duoka doctor[/] --gpus virtual:2x8GiB   (GPU tests without a GPU)
    """
    from duoka.tools import doctor as tool

    if options.gpus is not None:
        planning.read_fleet(options.gpus)
    facts = None
    if model.model is not None:
        facts = tool.ModelFacts(model.model, partial(_plan_model, model.model, options))
    with working("checking this machine"):
        diagnosis = tool.diagnose(options.gpus, facts)
    show_diagnosis(diagnosis, as_json=json)
    if diagnosis.severity in _CODES:
        raise typer.Exit(_CODES[diagnosis.severity])


def _plan_model(model: str, options: PlanOptions) -> duoka.Plan:
    """Plan a model as `duoka plan` does, without its progress messages."""
    checkpoint = duoka.Checkpoint.open(model)
    workload = planning.read_workload(options, limit=checkpoint.max_context_tokens)
    return duoka.plan(checkpoint, options.gpus or planning.ALL_GPUS, workload)


def show_diagnosis(diagnosis: Diagnosis, *, as_json: bool) -> None:
    """Print the findings as a table per group, and a summary line; or as JSON, with versions."""
    if as_json:
        about = {"severity": diagnosis.severity, "versions": versions()}
        print_json(about | to_dict(diagnosis))
        return
    console = stdout()
    for group, checks in groupby(diagnosis.checks, key=lambda check: check.group):
        table = Table.grid(padding=(0, 1))
        table.add_column(width=max(map(len, _STYLES)))
        table.add_column(overflow="fold")
        for check in checks:
            for finding in check.findings:
                style = _STYLES[finding.severity]
                table.add_row(Text(finding.severity, style), _render_finding(check.name, finding))
        if table.row_count:
            console.print(Text(group, "bold"))
            console.print(Padding(table, (0, 0, 1, 1)))
    console.print(_summary(diagnosis), soft_wrap=True)


def _render_finding(name: str, finding: Finding) -> Text:
    """Render a finding: its text, then its meaning and advice on lines of their own."""
    meaning = f"\n{finding.meaning}" if finding.meaning else ""
    advice = f"\n→ {finding.advice}" if finding.advice else ""
    return Text.assemble((f"{name}: ", "dim"), finding.text, (meaning, "dim"), advice)


def _summary(diagnosis: Diagnosis) -> str:
    """Count the findings by severity."""
    counts = Counter(finding.severity for check in diagnosis.checks for finding in check.findings)
    texts = [format_count(counts[kind], kind) for kind in ("error", "warning", "note")]
    return f"{', '.join(texts)}; {counts['ok']} ok"
