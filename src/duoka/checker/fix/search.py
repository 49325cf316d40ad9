"""Rounds of patching and checking until the check is clean or no candidate is left.

In a round every fault of the last check has one active candidate, and all candidates are checked
together. A fault that is still there, or whose candidate broke the code, advances to its next
candidate. Faults that appear only after others are fixed belong to the next round, which starts
from the texts of this one.
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
from .syntax import Edit, strip_blanks

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
    """A fault and its active candidate."""

    def __init__(self, fault: Fault, options: Iterator[Candidate]) -> None:
        self.fault = fault
        self._options = options
        self.reason = _NO_WAY
        self.candidate: Candidate | None = None
        self.next()

    def next(self, *, is_last: bool = False) -> None:
        """Advance to the next candidate, or to none after the last."""
        if self.candidate is not None:
            self.reason = _IN_VAIN
        try:
            self.candidate = None if is_last else next(filter(_is_python, self._options), None)
        except SourceError as error:
            self.candidate, self.reason = None, str(error)

    @property
    def edits(self) -> tuple[Edit, ...]:
        """Edits of the active candidate."""
        return self.candidate.edits if self.candidate is not None else ()


def _is_python(candidate: Candidate) -> bool:
    """Return True if the text parses after a candidate's edits."""
    for tree in {edit.tree: None for edit in candidate.edits}:
        try:
            parse_quietly(tree.apply(candidate.edits))
        except (SyntaxError, cst.CSTValidationError, cst.ParserSyntaxError):
            return False
    return True


@dataclass(slots=True)
class Round:
    """Faults of one check, fixed together on top of earlier rounds."""

    report: CheckReport
    choices: Sequence[CandidateSearch]
    sources: Sources
    base: Draft
    postponed: list[CandidateSearch] = field(default_factory=list)

    def run(self, check: Check, max_checks: int) -> tuple[Draft, CheckReport, int]:
        """Advance candidates until no fixable fault is left.

        Returns the result and the remaining number of checks.
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
        """Apply the active candidates; colliding ones wait."""
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
        """Return True if a fault of a later check is one of these without a fix."""
        return any(
            choice.candidate is None and self._is_left(choice, [fault], draft)
            for choice in self.choices
        )

    def _failed(self, draft: Draft, report: CheckReport) -> Iterator[CandidateSearch]:
        """Return the searches whose candidate did not fix the fault, or broke the code."""
        stop = report.stop
        broken = None if stop is None or stop == self.report.stop else stop.place
        for choice in self.choices:
            if choice.candidate is None or choice in self.postponed:
                continue
            is_broken = broken is not None and _changes(choice, broken)
            if is_broken or self._is_left(choice, report.faults, draft):
                yield choice

    def _is_left(self, choice: CandidateSearch, faults: Iterable[Fault], draft: Draft) -> bool:
        """Return True if a search's fault is still in a draft."""
        line, after = choice.fault.line, draft.get(choice.fault.file)
        if after is not None:
            line = line_after(self.sources.text(choice.fault.file), after, line)
        return any(is_same(choice.fault, fault, line) for fault in faults)


def _changes(choice: CandidateSearch, place: Place) -> bool:
    """Return True if a candidate changes the function of a place."""
    name = place.function.rpartition(".")[2]
    for edit in choice.edits:
        function = edit.tree.function_of(edit.node)
        changed = function.name.value if isinstance(function, cst.FunctionDef) else "<lambda>"
        if edit.tree.file == place.file and changed == name:
            return True
    return False


def _collide(new: Edit, old: Edit) -> bool:
    """Return True if two edits cannot be applied in one pass."""
    if new.tree is not old.tree or new == old:
        return False
    if new.node is old.node:
        return not (new.adds_line and old.adds_line)
    return (new.rewrites and new.node in new.tree.ancestors(old.node)) or (
        old.rewrites and old.node in old.tree.ancestors(new.node)
    )


@lru_cache(maxsize=_MOST_TEXTS)
def _line_blocks(old_text: str, new_text: str) -> Sequence[tuple[str, int, int, int, int]]:
    lines = old_text.splitlines(), new_text.splitlines()
    return difflib.SequenceMatcher(None, *lines, autojunk=False).get_opcodes()


def line_after(old_text: str, new_text: str, line: int) -> int:
    """Map a line of a text to the changed text, both from 1."""
    for _, start, end, new_start, new_end in _line_blocks(old_text, new_text):
        if start < line <= end:
            # Lines are added before the statement that they are for: count from the end.
            return max(new_end - (end - line), new_start + 1)
    return line


def is_same(earlier: Fault, later: Fault, line: int) -> bool:
    """Return True if a fault, now on `line`, is still there with the same moved operands."""
    if (earlier.file, earlier.function, earlier.op) != (later.file, later.function, later.op):
        return False
    if abs(line - later.line) > _NEAR_LINES:
        return False
    old = [strip_blanks(operand.expression) for operand in earlier.operands if operand.moved]
    new = [strip_blanks(operand.expression) for operand in later.operands if operand.moved]
    return old == new or any(left in right for left in old for right in new)


@dataclass(slots=True)
class FixOutcome:
    """Result of all rounds."""

    draft: Draft
    choices: list[CandidateSearch]
    report: CheckReport
    """Of the last check."""
    late: Sequence[Fault] = ()
    """What came up when others were cured, and was not cured itself."""

    def cures(self, file: str) -> Iterator[Cure]:
        """Return the changes of a file, each with all faults it fixes."""
        by_edits: dict[tuple[Edit, ...], list[CandidateSearch]] = {}
        for choice in self.choices:
            if any(edit.tree.file == file for edit in choice.edits):
                by_edits.setdefault(choice.edits, []).append(choice)
        for choices in by_edits.values():
            candidate, count = choices[0].candidate, max(one.fault.count for one in choices)
            step_bytes = 0 if candidate is None else candidate.step_bytes * count
            yield Cure(faults=tuple(one.fault for one in choices), step_bytes=step_bytes)

    def uncured(self) -> Iterator[tuple[Fault, str]]:
        """Return the faults without a fix, each with the reason."""
        for choice in self.choices:
            if choice.candidate is None:
                yield choice.fault, choice.reason
        for fault in self.late:
            yield fault, "it came up when others were cured, and was not cured itself"


def search(report: CheckReport, sources: Sources, subject: Subject, check: Check) -> FixOutcome:
    """Search for changes that fix the faults of a report, round by round."""
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
