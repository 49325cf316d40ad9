"""Faults recognised in changed code."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from duoka.checker.fix import search
from duoka.checker.fix.candidates import Candidate
from duoka.checker.fix.search import FixSearch, is_same, line_after
from duoka.checker.fix.sources import Sources
from duoka.checker.fix.syntax import Edit
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


def test_a_fix_that_collides_is_taken_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Both faults are fixed by replacing the sum: the second waits for the next round.
    found = fault(1, "a"), fault(1, "b")

    def candidates(met: Fault, sources: Sources) -> Iterator[Candidate]:
        tree, moved = sources.tree("m.py"), met.operands[0].expression
        stop = len(tree.source) - 1
        text = tree.source[4:stop].replace(moved, f"{moved}.to(1)")
        yield Candidate((Edit(tree, 4, stop, ((4, stop, text),)),))

    def check(draft: Any) -> Any:
        left = [met for met in found if f"{met.operands[0].expression}.to" not in draft["m.py"]]
        return SimpleNamespace(faults=left, stop=None)

    monkeypatch.setattr(search, "candidates", candidates)
    report: Any = SimpleNamespace(faults=found, stop=None)
    rounds = FixSearch(report, Sources({"m.py": "x = a + b\n"}), check)
    rounds.run()
    assert rounds.draft == {"m.py": "x = a.to(1) + b.to(1)\n"}
    assert [cure.faults for cure in rounds.cures("m.py")] == [(found[0],), (found[1],)]
    assert list(rounds.uncured()) == []
