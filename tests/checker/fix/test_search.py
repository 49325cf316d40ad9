"""Faults recognised in changed code."""

from __future__ import annotations

import pytest

from duoka.checker.fix.search import is_same, line_after
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
    assert [line_after(BEFORE, AFTER, line) for line in (1, 2, 3)] == [1, 3, 4]


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
    assert is_same(fault(2, "f( a )"), after, line_after(BEFORE, AFTER, 2)) is same
