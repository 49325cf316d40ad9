"""Whether a fault in changed code is one that was there before."""

from __future__ import annotations

import difflib

from duoka.report.check_report import Fault

from .syntax import folded

_NEAR = 1


class Lines:
    """Which line of a changed text is which of the text before."""

    def __init__(self, before: str, after: str) -> None:
        self._blocks = difflib.SequenceMatcher(
            None, before.splitlines(), after.splitlines(), autojunk=False
        ).get_opcodes()

    def after(self, line: int) -> int:
        """Where a line of the text before is now, both from 1."""
        for _, start, end, new_start, new_end in self._blocks:
            if start < line <= end:
                # Lines are added before the statement that they are for: count from the end.
                return max(new_end - (end - line), new_start + 1)
        return line


def is_same(before: Fault, after: Fault, lines: Lines) -> bool:
    """Whether a fault is still there: the place, the operation and what moves are the same."""
    if (before.file, before.function, before.op) != (after.file, after.function, after.op):
        return False
    if abs(lines.after(before.line) - after.line) > _NEAR:
        return False
    old = [folded(each.expression) for each in before.operands if each.moved]
    new = [folded(each.expression) for each in after.operands if each.moved]
    return old == new or any(one in other for one in old for other in new)
