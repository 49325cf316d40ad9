"""A fault as people read it: what, where, which tensors, how it was reached, what follows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from duoka.base.units import format_count

from ..check_report import Call, Fault, Operand, Place
from . import words
from .excerpt import Excerpt, Mark

_MOVED, _KEPT = "bold yellow", "cyan"
_MOST_CALLS = 8
_FIRST_CALLS, _LAST_CALLS = 2, 5
_LONGEST_MODULE = 28


def where(place: Place) -> Text:
    """File, line and function."""
    function = f" in {place.function}" if place.function else ""
    return Text.assemble(words.linked(place), function)


def render_fault(fault: Fault, title: str, style: str) -> RenderableType:
    """One fault, or one warning."""
    heading = Text.assemble((f"{title}: ", style), (words.heading(fault), "bold"))
    inner = Group(where(fault.place), "", Excerpt(fault.place, _marks(fault)), "", _facts(fault))
    return Group(heading, Padding(inner, (0, 0, 0, 2)))


def _marks(fault: Fault) -> list[Mark]:
    return [
        Mark(place=operand.place, label=operand.device, style=_MOVED if operand.moved else _KEPT)
        for operand in fault.operands
        if operand.place is not None
    ]


def _facts(fault: Fault) -> Table:
    """What else is known, one row each."""
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, fact in _named_facts(fault):
        facts.add_row(name, fact)
    return facts


def _named_facts(fault: Fault) -> Iterator[tuple[str, RenderableType]]:
    if fault.message:
        yield "CUDA" if fault.effect == "raises" else "why", Text(fault.message)
    if fault.operands:
        yield "tensors", Group(*_operands(fault))
    if len(fault.path) > 1:
        yield "path", _path(fault)
    met = f"{words.times(fault.count)} a step, first in {fault.phase}"
    if fault.count == 1:
        met = f"once, in {fault.phase}"
    if any(fault.modules):
        met += f"; in {words.modules(fault.modules)}"
    yield "met", Text(met)
    if fault.followups:
        yield "causes", Group(*map(_followup, _all_followups(fault)))


def _operands(fault: Fault) -> Iterator[RenderableType]:
    """The tensors; neighbours in a list of which the same is to be said are one."""
    for alike, group in groupby(fault.operands, key=_said):
        operands = list(group)
        _, origin, device, moved = alike
        text = Text(_called(operands), style="bold")
        text.append(" on ", style="not bold")
        text.append(device, style=_MOVED if moved else _KEPT)
        yield text.append(words.going(operands[0], fault), style="not bold")
        tensors = list(dict.fromkeys(words.tensor(operand) for operand in operands))
        more = f" … {tensors[-1]}" if len(tensors) > 1 else ""
        about = f"{tensors[0]}{more}{' each' if len(operands) > len(tensors) else ''}"
        yield Padding(Text(f"{about}; from {origin}" if origin else about), (0, 0, 0, 2))


def _said(operand: Operand) -> tuple[str, str, str, bool]:
    """What must be equal for tensors to be told together: they stand in one list, say."""
    name, bracket, _ = operand.argument.partition("[")
    alone = "" if bracket else f"{operand.argument} {operand.expression}"
    origin = operand.origin
    # An expression that makes its tensor itself comes from nowhere else.
    made_here = origin is None or (origin.place is not None and origin.place == operand.place)
    told = "" if origin is None or made_here else words.origin(origin)
    return name + alone, told, operand.device, operand.moved


def _called(operands: Sequence[Operand]) -> str:
    names = [words.cropped(each.expression or each.argument) for each in operands]
    first, last = names[0], names[-1]
    if len(operands) == 1:
        return first
    ends = f"{first} … {last}" if last != first else f"of {first}"
    return f"{format_count(len(operands), 'tensor')} {ends}"


def _path(fault: Fault) -> Table:
    """The calls from the model's top; the middle of a long way is left out."""
    path = fault.path
    calls = Table.grid(padding=(0, 2, 0, 0), expand=True)
    for _ in range(2):
        calls.add_column(no_wrap=True)
    calls.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    cut = len(path) - _LAST_CALLS if len(path) > _MOST_CALLS else 0
    for call in path[:_FIRST_CALLS] if cut else path:
        calls.add_row(*_call(call, fault.file))
    if cut:
        calls.add_row(f"… {cut - _FIRST_CALLS} more")
        for call in path[cut:]:
            calls.add_row(*_call(call, fault.file))
    return calls


def _call(call: Call, file: str) -> tuple[Text, Text, Text]:
    place = call.place
    line = f"line {place.line}" if place.file == file else words.where(place, brief=True)
    module = words.cropped(call.module or "the model", _LONGEST_MODULE)
    return Text(module), Text(line, style="dim"), Text(place.text)


def _all_followups(fault: Fault) -> Iterator[Fault]:
    for followup in fault.followups:
        yield followup
        yield from _all_followups(followup)


def _followup(fault: Fault) -> Text:
    source = f": {words.cropped(fault.source)}" if fault.source else ""
    place = words.linked(fault.place, brief=True)
    return Text.assemble(f"{words.what(fault)} at ", place, source)
