"""Rounds of patching and checking: until the check is clean, or nothing more is known to try.

In a round every fault of the last check has a candidate, and all of them are checked together.
Those whose fault is still there, or whose code broke, go on to their next candidate. What comes up
only when others are cured is for the next round, which works on the texts of this one.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import libcst as cst

from duoka.report.check_report import CheckReport, Fault, Place

from ..source_map import parse_quietly
from ..subject import Subject
from .candidates import Candidate, candidates
from .patch import Cure
from .sources import SourceError, Sources
from .syntax import Edit, folded

MAX_ROUNDS = 5
MAX_CHECKS = 24
_NO_WAY = "no way to cure it is known"
_IN_VAIN = "it was still there after every change that was tried"
_NEAR_LINES = 1
_MOST_TEXTS = 16


Draft = Mapping[str, str]
"""Patched texts by file."""
Check = Callable[[Draft], CheckReport]
"""Checks again with a draft in place of the code."""


class CandidateSearch:
    """A fault, and which of the candidates to cure it is being tried."""

    def __init__(self, fault: Fault, options: Iterator[Candidate]) -> None:
        self.fault = fault
        self._options = options
        self.reason = _NO_WAY
        self.candidate: Candidate | None = None
        self.next()

    def next(self, *, is_last: bool = False) -> None:
        """Try the next candidate, or nothing more after the last."""
        if self.candidate is not None:
            self.reason = _IN_VAIN
        try:
            self.candidate = None if is_last else next(filter(_is_python, self._options), None)
        except SourceError as error:
            self.candidate, self.reason = None, str(error)

    @property
    def edits(self) -> tuple[Edit, ...]:
        """What the candidate that is being tried changes."""
        return self.candidate.edits if self.candidate is not None else ()


def _is_python(candidate: Candidate) -> bool:
    """Whether the text after a candidate's edits is still Python."""
    for tree in {edit.tree: None for edit in candidate.edits}:
        try:
            parse_quietly(tree.apply(candidate.edits))
        except (SyntaxError, cst.CSTValidationError, cst.ParserSyntaxError):
            return False
    return True


@dataclass(slots=True)
class Round:
    """The faults of one check, cured together on top of what the rounds before came to."""

    report: CheckReport
    choices: Sequence[CandidateSearch]
    sources: Sources
    base: Draft
    postponed: list[CandidateSearch] = field(default_factory=list)

    def run(self, check: Check, max_checks: int) -> tuple[Draft, CheckReport, int]:
        """Change candidates until none of these faults is left that could be cured.

        The result is what came of it, and how many checks are left.
        """
        while True:
            draft = self.draft()
            report = check(draft)
            max_checks -= 1
            failed = list(self._failed(draft, report))
            if not failed:
                return draft, report, max_checks
            for choice in failed:
                choice.next(is_last=max_checks <= 0)
            if max_checks <= 0:
                draft = self.draft()
                return draft, check(draft), 0

    def draft(self) -> Draft:
        """The texts with the candidates that are being tried; colliding ones wait."""
        edits: list[Edit] = []
        self.postponed = []
        for choice in self.choices:
            if any(_collide(new, old) for new in choice.edits for old in edits):
                self.postponed.append(choice)
            elif choice.candidate is not None:
                edits += choice.edits
        texts = dict(self.base)
        for tree in {edit.tree: None for edit in edits}:
            texts[tree.file] = tree.apply(edits)
        return texts

    def is_uncured(self, fault: Fault, draft: Draft) -> bool:
        """Whether a fault of a later check is one of these that nothing has cured."""
        return any(
            choice.candidate is None and self._is_left(choice, [fault], draft)
            for choice in self.choices
        )

    def _failed(self, draft: Draft, report: CheckReport) -> Iterator[CandidateSearch]:
        """The choices whose candidate didn't cure, or broke the code."""
        stop = report.stop
        broken = None if stop is None or stop == self.report.stop else stop.place
        for choice in self.choices:
            if choice.candidate is None or choice in self.postponed:
                continue
            is_broken = broken is not None and _changes(choice, broken)
            if is_broken or self._is_left(choice, report.faults, draft):
                yield choice

    def _is_left(self, choice: CandidateSearch, faults: Iterable[Fault], draft: Draft) -> bool:
        """Whether a choice's fault is among those of a draft."""
        line, after = choice.fault.line, draft.get(choice.fault.file)
        if after is not None:
            line = line_after(self.sources.text(choice.fault.file), after, line)
        return any(is_same(choice.fault, fault, line) for fault in faults)


def _changes(choice: CandidateSearch, place: Place) -> bool:
    """Whether a candidate changes the function that a place is in."""
    name = place.function.rpartition(".")[2]
    for edit in choice.edits:
        function = edit.tree.function_of(edit.node)
        changed = function.name.value if isinstance(function, cst.FunctionDef) else "<lambda>"
        if edit.tree.file == place.file and changed == name:
            return True
    return False


def _collide(new: Edit, old: Edit) -> bool:
    """Whether two edits can't be made in one pass."""
    if new.tree is not old.tree or new == old:
        return False
    if new.node is old.node:
        return not (new.adds_line and old.adds_line)
    return (new.rewrites and new.node in new.tree.around(old.node)) or (
        old.rewrites and old.node in old.tree.around(new.node)
    )


@lru_cache(maxsize=_MOST_TEXTS)
def _line_blocks(before: str, after: str) -> Sequence[tuple[str, int, int, int, int]]:
    lines = before.splitlines(), after.splitlines()
    return difflib.SequenceMatcher(None, *lines, autojunk=False).get_opcodes()


def line_after(before: str, after: str, line: int) -> int:
    """Where a line of a text is in the changed text, both from 1."""
    for _, start, end, new_start, new_end in _line_blocks(before, after):
        if start < line <= end:
            # Lines are added before the statement that they are for: count from the end.
            return max(new_end - (end - line), new_start + 1)
    return line


def is_same(before: Fault, after: Fault, line: int) -> bool:
    """Whether a fault, which is on this line now, is still there: the same operands move."""
    if (before.file, before.function, before.op) != (after.file, after.function, after.op):
        return False
    if abs(line - after.line) > _NEAR_LINES:
        return False
    old = [folded(operand.expression) for operand in before.operands if operand.moved]
    new = [folded(operand.expression) for operand in after.operands if operand.moved]
    return old == new or any(one in other for one in old for other in new)


@dataclass(slots=True)
class FixOutcome:
    """What all rounds came to."""

    draft: Draft
    choices: list[CandidateSearch]
    report: CheckReport
    """Of the last check."""
    late: Sequence[Fault] = ()
    """What came up when others were cured, and was not cured itself."""

    def cures(self, file: str) -> Iterator[Cure]:
        """What is changed in a file, each change with all that it cures."""
        by_edits: dict[tuple[Edit, ...], list[CandidateSearch]] = {}
        for choice in self.choices:
            if any(edit.tree.file == file for edit in choice.edits):
                by_edits.setdefault(choice.edits, []).append(choice)
        for choices in by_edits.values():
            candidate, count = choices[0].candidate, max(one.fault.count for one in choices)
            moved = 0 if candidate is None else candidate.step_bytes * count
            yield Cure(faults=tuple(one.fault for one in choices), step_bytes=moved)

    def uncured(self) -> Iterator[tuple[Fault, str]]:
        """The faults for which nothing is changed, each with the reason."""
        for choice in self.choices:
            if choice.candidate is None:
                yield choice.fault, choice.reason
        for fault in self.late:
            yield fault, "it came up when others were cured, and was not cured itself"


def search(report: CheckReport, sources: Sources, subject: Subject, check: Check) -> FixOutcome:
    """Find changes that cure the faults of a report, round by round."""
    outcome = FixOutcome({}, [], report)
    max_checks = MAX_CHECKS
    faults: Sequence[Fault] = report.faults
    for _ in range(MAX_ROUNDS):
        texts = Sources({**sources.texts, **outcome.draft})
        choices = [CandidateSearch(fault, candidates(fault, texts, subject)) for fault in faults]
        outcome.choices += choices
        if not any(choice.candidate for choice in choices):
            return outcome
        current = Round(report, choices, texts, outcome.draft)
        draft, report, max_checks = current.run(check, max_checks)
        outcome.draft, outcome.report = draft, report
        faults = [fault for fault in report.faults if not current.is_uncured(fault, draft)]
        if not faults or max_checks <= 0:
            break
    outcome.late = faults
    return outcome
