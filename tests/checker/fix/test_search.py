"""Faults recognised in changed code, and operands found by the text of their call."""

from __future__ import annotations

from dataclasses import replace

import pytest

from duoka.checker.fix.operands import completed
from duoka.checker.fix.search import Lines, is_same
from duoka.checker.fix.syntax import Tree
from duoka.report.check_report import Fault, Operand, Place

BEFORE = "a = 1\nb = f(a) + g(a)\nc = 3\n"
AFTER = "a = 1\ng_output = g(a)\nb = f(a).to(g_output.device) + g_output\nc = 3\n"


def fault(line: int, moved: str, *, op: str = "Tensor.add") -> Fault:
    operands = (
        Operand(argument="0", expression=moved, device="cuda:0", moved=True),
        Operand(argument="1", expression="y", device="cuda:1"),
    )
    place = Place(file="m.py", line=line, function="Model.forward")
    return Fault(
        kind="mixed-devices", effect="raises", op=op, operands=operands, target="cuda:1",
        place=place, message="",
    )  # fmt: skip


def test_lines_after_an_inserted_one() -> None:
    lines = Lines(BEFORE, AFTER)
    assert [lines.after(line) for line in (1, 2, 3)] == [1, 3, 4]


@pytest.mark.parametrize(
    ("after", "same"),
    [
        (fault(3, "f(a)"), True),
        (fault(3, "f(a).to(g_output.device)"), True),
        (fault(3, "other"), False),
        (fault(9, "f(a)"), False),
        (fault(3, "f(a)", op="Tensor.mul"), False),
    ],
)
def test_a_fault_that_is_still_there(after: Fault, same: bool) -> None:
    assert is_same(fault(2, "f( a )"), after, Lines(BEFORE, AFTER)) is same


@pytest.mark.parametrize(
    ("text", "op", "arguments", "wanted"),
    [
        ("x.add_(y)", "Tensor.add_", ("0", "1"), ("x", "y")),
        ("x.lerp_(0, i, to=s)", "Tensor.lerp_", ("0", "2", "to"), ("x", "i", "s")),
        ("torch.add(x, other=y)", "torch.add", ("0", "other"), ("x", "y")),
        ("torch.cat([x, y])", "torch.cat", ("0[0]", "0[1]"), ("[x, y][0]", "[x, y][1]")),
        ("x[0] + (y)", "Tensor.add", ("0", "1"), ("x[0]", "y")),
        ("helper(x, y)", "Tensor.add", ("0", "1"), ("", "")),
        ("torch.add(*xs, y)", "torch.add", ("0", "1"), ("", "")),
    ],
)  # fmt: skip
def test_operands_by_the_text_of_the_call(
    text: str, op: str, arguments: tuple[str, ...], wanted: tuple[str, ...]
) -> None:
    place = Place(file="m.py", line=1, column=4, end_line=1, end_column=4 + len(text), text=text)
    operands = tuple(Operand(argument=each, device="cpu") for each in arguments)
    given = replace(fault(1, "", op=op), place=place, operands=operands)
    tree = Tree("m.py", f"z = {text}\n")
    assert tuple(each.expression for each in completed(tree, given).operands) == wanted
