"""A report for people: the verdict, what is incomplete, faults, warnings, costs; short if well."""

from __future__ import annotations

import io
from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.text import Text

from duoka.base.units import format_bytes, format_count
from duoka.errors import Faults
from duoka.planner.device_map import meant, runs

from ..check_report import Report, Stop
from . import words
from .costs import render_costs
from .excerpt import Excerpt
from .faults import render_fault, where

_PLAIN_COLUMNS = 100
_MOST_NAMES = 12
_CUT = "the map cuts what must stay whole"
_COMPLETED = (
    "The check completed the map and went on. --save-device-map FILE keeps the completed one "
    "(in Python it is report.completeness.completed)."
)


def render_report(report: Report, *, advice: bool = True) -> RenderableType:
    """What rich prints for a report."""
    return _View(report, advice=advice)


def plain(what: RenderableType, width: int = _PLAIN_COLUMNS) -> str:
    """What is printed without colours, as text."""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


class _View:
    def __init__(self, report: Report, *, advice: bool) -> None:
        self._report = report
        self._advice = advice

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        report = self._report
        yield _verdict(report, ascii_only=options.ascii_only)
        sections = (_incomplete(report), _stopped(report), _faults(report), render_costs(report))
        for section in sections:
            for part in section:
                yield ""
                yield part
        notes = (*report.notes, *_caveats(report))
        if notes:
            yield ""
        for note in notes:
            yield Text(f"note: {note}")
        if self._advice:
            yield from _advice(report)


def _verdict(report: Report, *, ascii_only: bool) -> Text:
    sign, style = ("✓", "bold green") if report.ok else ("✗", "bold red")
    if ascii_only:
        sign = "ok:" if report.ok else "fails:"
    on = f" on {words.joined(report.devices)}" if report.devices else ""
    text = Text.assemble((f"{sign} ", style), (report.model, "bold"), f"{on}: ")
    problems = [*_problems(report)]
    text.append(", ".join(problems) if problems else _all_well(report), style=style)
    if report.warnings:
        text.append(f", {format_count(len(report.warnings), 'warning')}", style="bold yellow")
    return text


def _problems(report: Report) -> Iterator[str]:
    if not report.complete:
        yield _of_map(report.completeness)
    if report.stop is not None:
        yield f"its code stopped {words.during(report.stop.phase)}"
    if report.faults:
        yield format_count(len(report.faults), "fault")
    for peak in report.memory:
        if peak.overflows:
            lacking = -(peak.free_bytes or 0)
            yield (
                f"{peak.device} lacks {format_bytes(lacking)}"
                if lacking > 0
                else (f"{peak.device} overflows")
            )


def _of_map(found: Faults) -> str:
    others = (found.missing, found.unknown, found.doubled, found.misplaced)
    return "the map is incomplete" if any(others) else _CUT


def _all_well(report: Report) -> str:
    ran = "runs and trains" if report.train else "runs"
    budgets = [peak for peak in report.memory if peak.budget_bytes is not None]
    return f"{ran} without a fault" + (", memory fits" if budgets else "")


def _incomplete(report: Report) -> Iterator[RenderableType]:
    if report.complete:
        return
    told: list[RenderableType] = []
    for what, names in _names(report.completeness):
        more = len(names) - _MOST_NAMES
        rest = [f"and {more} more, which --json shows"] if more > 0 else []
        told.append(Text(f"{what}:", style="dim"))
        told += [Padding(Text(name), (0, 0, 0, 2)) for name in names[:_MOST_NAMES] + rest]
    heading = Text(_of_map(report.completeness), style="bold red")
    if heading.plain == _CUT:
        told.append(Text("The check ran it as it stands."))
    elif report.completeness.completed is not None:
        told.append(Text(_COMPLETED))
    yield Group(heading, Padding(Group(*told), (0, 0, 0, 2)))


def _names(found: Faults) -> Iterator[tuple[str, list[str]]]:
    """What is wrong with names, and which; those that differ in a number are one."""
    for what, names in (
        ("no device for", runs(found.missing)),
        ("not there", meant(found)),
        ("two devices for", runs(found.doubled)),
        ("cut in two", runs(found.split)),
        ("no such device, for", runs(found.misplaced)),
    ):
        if names:
            yield what, names


def _stopped(report: Report) -> Iterator[RenderableType]:
    if report.stop is not None:
        yield _stop(report.stop)


def _stop(stop: Stop) -> RenderableType:
    heading = Text.assemble(
        (f"the model's code stopped {words.during(stop.phase)}: ", "bold red"),
        (stop.message, "bold"),
    )
    inner: list[RenderableType] = []
    if stop.place is not None:
        inner = [where(stop.place), "", Excerpt(stop.place), ""]
    inner.append(Text("what comes after it was not checked"))
    if stop.hint:
        inner.append(Text(f"hint: {stop.hint}"))
    return Group(heading, Padding(Group(*inner), (0, 0, 0, 2)))


def _faults(report: Report) -> Iterator[RenderableType]:
    for name, style, faults in (
        ("fault", "bold red", report.faults),
        ("warning", "bold yellow", report.warnings),
    ):
        for number, fault in enumerate(faults, 1):
            title = f"{name} {number} of {len(faults)}" if len(faults) > 1 else name
            yield render_fault(fault, title, style)


def _caveats(report: Report) -> Iterator[str]:
    if report.ok and len(report.devices) == 1:
        yield "on one device nothing is mixed: to check a split, give more GPUs or a map"


def _advice(report: Report) -> Iterator[RenderableType]:
    told = []
    if report.faults:
        told.append(
            "--fix writes changes that cure these, and proves them (in Python: duoka.repair)"
        )
    if not report.fits:
        told.append("for memory: more or larger GPUs, a shorter --context, a smaller --batch")
    for index, text in enumerate(told):
        if not index:
            yield ""
        yield Text.assemble(("next: ", "bold"), text)
