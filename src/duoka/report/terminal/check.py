"""Render the report of a check: verdict, map errors, faults, warnings, memory, transfers."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby, islice

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from duoka.base.units import format_bytes, format_count, unit_for
from duoka.errors import Faults

from ..check_report import CallSite, CheckReport, Fault, Operand, PeakMemory, Place, Stop
from . import words
from .excerpt import Excerpt, Mark
from .plan import workload_facts

_PLAIN_COLUMNS = 100
_MAX_NAMES = 12
_SPLIT_MODULES = "the map splits modules that must stay whole"
_COMPLETED = (
    "The check completed the map and continued. `duoka plan --device-map … --save-device-map FILE` "
    "saves the completed map (in Python: report.completeness.completed)."
)
_FIX = "--fix finds changes that fix these, and proves them (in Python: duoka.repair)"
_ONE_DEVICE = (
    "a single device can't have device faults; to check a split, give more GPUs or a device map"
)
_MOVED, _KEPT = "bold yellow", "cyan"
_MAX_CALLS = 8
_FIRST_CALLS, _LAST_CALLS = 2, 5
_LONGEST_MODULE = 28
_HEADINGS = {"activations": "activ.", "gradients": "grads"}
_MAX_SYNCS = 12
_LONGEST_TEXT = 40


def render_report(report: CheckReport, *, advice: bool = True) -> RenderableType:
    """Return a rich renderable of a report; `advice` adds the next steps."""
    return _View(report, advice=advice)


def render_plain(what: RenderableType, width: int = _PLAIN_COLUMNS) -> str:
    """Render as plain text without color."""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


class _View:
    """Rich renderable of a report."""

    def __init__(self, report: CheckReport, *, advice: bool) -> None:
        self._report = report
        self._advice = advice

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        report = self._report
        yield from _warn_not_run(report)
        yield _verdict(report, ascii_only=options.ascii_only)
        if report.workload is not None:
            yield Text(" · ".join(workload_facts(report.workload)), style="dim")
        for part in (*_errors(report), *_render_faults(report), *_costs(report)):
            yield ""
            yield part
        notes = [*report.notes, *([_ONE_DEVICE] if report.ok and len(report.devices) == 1 else [])]
        if notes:
            yield ""
        yield from (Text(f"note: {note}") for note in notes)
        if self._advice:
            yield from _advice(report)


def _verdict(report: CheckReport, *, ascii_only: bool) -> Text:
    """Render the first line: model, code, devices, and the problems or the success."""
    sign, style = ("✓", "bold green") if report.ok else ("✗", "bold red")
    if ascii_only:
        sign = "ok:" if report.ok else "fails:"
    devices = f" on {words.join_words(report.devices)}" if report.devices else ""
    code = f" ({report.code})" if report.code else ""
    if report.code.startswith(f"{report.model} of "):
        code = report.code.removeprefix(report.model)
    text = Text.assemble((f"{sign} ", style), (report.model, "bold"), f"{code}{devices}: ")
    problems = [*_problems(report)]
    success = f"{'runs and trains' if report.train else 'runs'} without a fault"
    if any(peak.budget_bytes is not None for peak in report.memory):
        success += ", memory fits"
    text.append(", ".join(problems) or success, style=style)
    if report.warnings:
        text.append(f", {format_count(len(report.warnings), 'warning')}", style="bold yellow")
    return text


def _warn_not_run(report: CheckReport) -> Iterator[Text]:
    """Warn about code files of the checkpoint that were not run."""
    if report.not_run:
        files = words.join_words(report.not_run)
        verb = "was" if len(report.not_run) == 1 else "were"
        yield Text(
            f"{files} of {report.model} {verb} not run and not checked; use --trust-remote-code "
            "to check it.",
            style="bold yellow",
        )


def _problems(report: CheckReport) -> Iterator[str]:
    """Yield each problem of the report as a short phrase."""
    if not report.complete:
        yield _describe_map(report.completeness)
    if report.stop is not None:
        yield _describe_stop(report.stop)
    if report.faults:
        yield format_count(len(report.faults), "fault")
    for peak in report.memory:
        if peak.overflows:
            lacking = peak.reserved_bytes - (peak.budget_bytes or peak.reserved_bytes)
            amount = f" by {format_bytes(lacking)}" if lacking > 0 else ""
            yield f"{peak.device} exceeds its budget{amount}"


def _describe_map(faults: Faults) -> str:
    """Describe the errors of a device map: incomplete, or splitting modules."""
    names = (faults.missing, faults.unknown, faults.doubled, faults.misplaced)
    return "the map is incomplete" if any(names) else _SPLIT_MODULES


def _errors(report: CheckReport) -> Iterator[RenderableType]:
    """Render the errors of the device map, and the error that ended the run early."""
    if not report.complete:
        lines: list[RenderableType] = []
        for what, names in words.describe_map_errors(report.completeness):
            num_hidden = len(names) - _MAX_NAMES
            rest = [f"and {num_hidden} more (see --json)"] if num_hidden > 0 else []
            lines.append(Text(f"{what}:", style="dim"))
            lines += [_indented(Text(name)) for name in names[:_MAX_NAMES] + rest]
        heading = Text(_describe_map(report.completeness), style="bold red")
        if heading.plain == _SPLIT_MODULES:
            lines.append(Text("The check ran it unchanged."))
        elif report.completeness.completed is not None:
            lines.append(Text(_COMPLETED))
        yield Group(heading, _indented(*lines))
    if report.stop is not None:
        yield _render_stop(report.stop)


def _indented(*parts: RenderableType) -> Padding:
    return Padding(Group(*parts), (0, 0, 0, 2))


def _describe_stop(stop: Stop) -> str:
    """Describe where the run ended early."""
    if stop.phase == "plan":
        return "duoka plan rejects it"
    return f"the model's code stopped {words.describe_phase(stop.phase)}"


def _render_stop(stop: Stop) -> RenderableType:
    """Render the error that ended the run early, with its source lines."""
    heading = Text.assemble((f"{_describe_stop(stop)}: ", "bold red"), (stop.message, "bold"))
    inner: list[RenderableType] = []
    if stop.place is not None:
        inner = [render_place(stop.place), "", Excerpt(stop.place), ""]
    if stop.phase != "plan":
        inner.append(Text("the rest was not checked"))
    if stop.hint:
        inner.append(Text(f"hint: {stop.hint}"))
    return Group(heading, _indented(*inner))


def _render_faults(report: CheckReport) -> Iterator[RenderableType]:
    """Render all faults, then all warnings."""
    for name, style, faults in (
        ("fault", "bold red", report.faults),
        ("warning", "bold yellow", report.warnings),
    ):
        for number, fault in enumerate(faults, 1):
            title = f"{name} {number} of {len(faults)}" if len(faults) > 1 else name
            yield render_fault(fault, title, style)


def _advice(report: CheckReport) -> Iterator[RenderableType]:
    """Yield the next steps: --fix for faults, less memory for an exceeded budget."""
    hints = [_FIX] if report.faults else []
    if not report.fits:
        hints.append(
            "to reduce memory: more or larger GPUs, a shorter --context, or a smaller --batch"
        )
    if hints:
        yield ""
    yield from (Text.assemble(("next: ", "bold"), text) for text in hints)


def render_place(place: Place) -> Text:
    """Format file, line and function."""
    function = f" in {place.function}" if place.function else ""
    return Text(words.format_place(place) + function)


def render_fault(fault: Fault, title: str, style: str) -> RenderableType:
    """Render one fault or warning."""
    heading = Text.assemble((f"{title}: ", style), (words.describe_fault(fault), "bold"))
    marks = [
        Mark(place=operand.place, label=operand.device, style=_MOVED if operand.moved else _KEPT)
        for operand in fault.operands
        if operand.place is not None
    ]
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, fact in _named_facts(fault):
        facts.add_row(name, fact)
    excerpt = Excerpt(fault.place, marks)
    return Group(heading, _indented(render_place(fault.place), "", excerpt, "", facts))


def _named_facts(fault: Fault) -> Iterator[tuple[str, RenderableType]]:
    """Yield the facts below a fault's source lines, with their labels."""
    if fault.message:
        yield "CUDA" if fault.effect == "raises" else "why", Text(fault.message)
    if fault.operands:
        yield "tensors", Group(*_render_operands(fault))
    if len(fault.path) > 1:
        yield "path", _render_path(fault)
    occurrence = f"{words.format_times(fault.count)} per step, first in {fault.phase}"
    if fault.count == 1:
        occurrence = f"once, in {fault.phase}"
    if any(fault.modules):
        occurrence += f"; in {words.format_modules(fault.modules)}"
    yield "met", Text(occurrence)
    if fault.followups:
        yield "causes", Group(*map(_render_followup, _all_followups(fault)))


def _render_operands(fault: Fault) -> Iterator[RenderableType]:
    """Render the operands; consecutive list elements with the same description are merged."""
    for key, group in groupby(fault.operands, key=_operand_key):
        operands = list(group)
        _, origin, device, moved = key
        text = Text(_tensor_names(operands), style="bold")
        text.append(" on ", style="not bold")
        text.append(device, style=_MOVED if moved else _KEPT)
        yield text.append(f", moved to {fault.target} to continue" if moved else "", "not bold")
        tensors = list(dict.fromkeys(words.format_tensor(operand) for operand in operands))
        last_tensor = f" … {tensors[-1]}" if len(tensors) > 1 else ""
        about = f"{tensors[0]}{last_tensor}{' each' if len(operands) > len(tensors) else ''}"
        yield _indented(Text(f"{about}; from {origin}" if origin else about))


def _operand_key(operand: Operand) -> tuple[str, str, str, bool]:
    """Return (name, origin, device, moved); consecutive operands with equal keys are merged."""
    name, bracket, _ = operand.argument.partition("[")
    own_name = "" if bracket else f"{operand.argument} {operand.expression}"
    origin = operand.origin
    # If the expression itself creates the tensor, its place is no separate origin.
    made_here = origin is None or (origin.place is not None and origin.place == operand.place)
    origin_text = "" if origin is None or made_here else words.describe_origin(origin)
    return name + own_name, origin_text, operand.device, operand.moved


def _tensor_names(operands: Sequence[Operand]) -> str:
    """Name an operand, or merged operands by their number and their first and last name."""
    names = [words.crop(operand.expression or operand.argument) for operand in operands]
    first, last = names[0], names[-1]
    if len(operands) == 1:
        return first
    ends = f"{first} … {last}" if last != first else f"of {first}"
    return f"{format_count(len(operands), 'tensor')} {ends}"


def _render_path(fault: Fault) -> Table:
    """Render the calls from the model to the fault; a long path is shortened in the middle."""
    path = fault.path
    calls = Table.grid(padding=(0, 2, 0, 0), expand=True)
    for _ in range(2):
        calls.add_column(no_wrap=True)
    calls.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    num_hidden = len(path) - _FIRST_CALLS - _LAST_CALLS if len(path) > _MAX_CALLS else 0
    for number, call in enumerate(path):
        if num_hidden and number == _FIRST_CALLS:
            calls.add_row(f"… {num_hidden} more")
        if not 0 <= number - _FIRST_CALLS < num_hidden:
            calls.add_row(*_call_cells(call, fault.file))
    return calls


def _call_cells(call: CallSite, file: str) -> tuple[Text, Text, Text]:
    """Return the cells of a call in the path: module, line, expression."""
    place = call.place
    line = f"line {place.line}" if place.file == file else words.format_place(place, brief=True)
    module = words.crop(call.module or "the model", _LONGEST_MODULE)
    return Text(module), Text(line, style="dim"), Text(place.text)


def _all_followups(fault: Fault) -> Iterator[Fault]:
    """Yield the followups of a fault, and their followups."""
    for followup in fault.followups:
        yield followup
        yield from _all_followups(followup)


def _render_followup(fault: Fault) -> Text:
    source = f": {words.crop(fault.source)}" if fault.source else ""
    place = words.format_place(fault.place, brief=True)
    return Text(f"{words.describe_operation(fault)} at {place}{source}")


def _costs(report: CheckReport) -> Iterator[RenderableType]:
    """Render memory, transfers and synchronizations, if any."""
    if report.memory:
        lines = (_peak_line(peak) for peak in report.memory if peak.place is not None)
        yield Group(*_memory_table(report.memory), *lines)
    if report.transfers:
        yield Group(Text("transfers per step", style="bold"), _render_transfers(report))
    if report.syncs:
        yield Group(Text("CPU-GPU synchronizations per step", style="bold"), _render_syncs(report))


def _memory_table(memory: Sequence[PeakMemory]) -> Iterator[RenderableType]:
    """Render the peak memory as a table with a column per kind."""
    unit, divisor = unit_for(max(peak.allocated_bytes for peak in memory))
    kinds = list(dict.fromkeys(kind for peak in memory for kind in peak.kinds))
    kinds = [kind for kind in kinds if any(peak.kinds.get(kind) for peak in memory)]
    headings = [*(_HEADINGS.get(kind, kind) for kind in kinds), "allocated", "reserved"]
    has_budgets = any(peak.budget_bytes is not None for peak in memory)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("device", no_wrap=True)
    for heading in [*headings, "budget"] if has_budgets else headings:
        table.add_column(heading, justify="right")
    for peak in memory:
        sizes: list[int | None] = [peak.kinds.get(kind, 0) for kind in kinds]
        sizes += [peak.allocated_bytes, peak.reserved_bytes]
        sizes += [peak.budget_bytes] if has_budgets else []
        cells = ["" if size is None else f"{size / divisor:.2f}" for size in sizes]
        table.add_row(peak.device, *cells, style="bold red" if peak.overflows else "")
    yield Text.assemble(("peak memory", "bold"), f", in {unit}")
    yield table


def _peak_line(peak: PeakMemory) -> Text:
    """Name the line of code that set a device's peak."""
    assert peak.place is not None
    if not peak.phase:
        return Text(f"{peak.device}: set by the weights only")
    text = f"{peak.device}: set in {peak.phase} at {words.format_place(peak.place)}"
    if peak.module:
        text += f" in {words.format_module(peak.module)}"
    if peak.place.text:
        text += f": {words.crop(peak.place.text, _LONGEST_TEXT)}"
    return Text(text)


def _render_transfers(report: CheckReport) -> RenderableType:
    """Render the copies between devices as a table."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(2):
        table.add_column()
    for _ in range(2):
        table.add_column(justify="right")
    for transfer in report.transfers:
        hops = format_count(transfer.hops, "hop")
        ends = f"{transfer.source} → {transfer.target}"
        table.add_row(transfer.phase, ends, hops, format_bytes(transfer.num_bytes))
    return _indented(table)


def _render_syncs(report: CheckReport) -> RenderableType:
    """Render the synchronizations, one line of code per line."""
    # Synchronizations on the same line are merged.
    counts: Counter[tuple[str, str, str]] = Counter()
    for sync in report.syncs:
        counts[sync.phase, sync.op, words.format_place(sync.place)] += sync.count
    lines = [
        Text(f"{phase}: {op}, {words.format_times(count)}, at {place}")
        for (phase, op, place), count in islice(counts.items(), _MAX_SYNCS)
    ]
    num_hidden = len(counts) - _MAX_SYNCS
    if num_hidden > 0:
        lines.append(Text(f"and {num_hidden} more (see --json)"))
    return _indented(*lines)
