"""Rounds of patching and checking: until the check is clean, or nothing more is known to try."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import libcst as cst

from duoka.report.check_report import Fault, Place, Report

from ..subject import Subject
from .buffers import Table
from .candidates import Cure, cures
from .live_code import SwapError
from .sources import SourceError, Sources, parse_quietly
from .syntax import Edit, folded

MAX_ROUNDS = 5
MAX_CHECKS = 24
MINIMISE_SECONDS = 10
_NO_WAY = "no way to cure it is known"
_IN_VAIN = "it was still there after every change that was tried"


@dataclass(frozen=True, slots=True)
class Draft:
    """Patched texts by file, and the attributes that became buffers."""

    texts: Mapping[str, str] = field(default_factory=dict)
    tables: tuple[Table, ...] = ()


Check = Callable[[Draft], Report]
"""Checks again with a draft in place of the code."""


class Budget:
    """How often may be checked."""

    def __init__(self, checks: int = MAX_CHECKS) -> None:
        self.checks = checks


class Choice:
    """A fault, and which of the ways to cure it is being tried.

    Parameters
    ----------
    fault : Fault
    ways : iterator of Cure
    """

    def __init__(self, fault: Fault, ways: Iterator[Cure]) -> None:
        self.fault = fault
        self._ways = ways
        self.reason = _NO_WAY
        self.cure: Cure | None = None
        self.is_needed = True
        self.next()

    def next(self) -> None:
        """Try the next way."""
        if self.cure is not None:
            self.reason = _IN_VAIN
        try:
            self.cure = next(filter(_is_python, self._ways), None)
        except SourceError as error:
            self.cure, self.reason = None, str(error)

    def give_up(self) -> None:
        """Try nothing more."""
        self.cure, self.reason = None, _IN_VAIN

    @property
    def edits(self) -> tuple[Edit, ...]:
        """What the way that is being tried changes."""
        return self.cure.edits if self.cure is not None and self.is_needed else ()

    @property
    def files(self) -> set[str]:
        """The files that it changes."""
        return {edit.tree.file for edit in self.edits}


def _is_python(cure: Cure) -> bool:
    """Whether the text after a way is still Python."""
    for tree in {edit.tree: None for edit in cure.edits}:
        try:
            parse_quietly(tree.apply(cure.edits))
        except (SyntaxError, cst.CSTValidationError, cst.ParserSyntaxError):
            return False
    return True


class Round:
    """The faults of one check, cured together.

    Parameters
    ----------
    found : Report
        Of that check.
    faults : sequence of Fault
        Those of its faults that are to be cured.
    sources : Sources
        The texts that the faults stand in.
    subject : Subject, optional
    base : Draft
        What the rounds before came to.
    """

    def __init__(
        self,
        found: Report,
        faults: Sequence[Fault],
        sources: Sources,
        subject: Subject | None,
        base: Draft,
    ) -> None:
        self._stop = found.stop
        self._sources = sources
        self._base = base
        self.choices = [Choice(fault, cures(fault, sources, subject)) for fault in faults]
        self.postponed: list[Choice] = []
        self._line_maps: dict[tuple[str, str], Lines] = {}

    def run(self, check: Check, budget: Budget) -> tuple[Draft, Report]:
        """Change which ways are tried until none of these faults is left that could be cured."""
        while True:
            draft = self.draft()
            budget.checks -= 1
            try:
                report = check(draft)
            except SwapError as error:
                if budget.checks <= 0 or not self._turn_from(error.file, error.function):
                    raise
                continue
            failed = list(self._failed(draft, report))
            if not failed:
                return self._minimised(check, draft, report)
            for choice in failed:
                if budget.checks > 0:
                    choice.next()
                else:
                    choice.give_up()
            if budget.checks <= 0:
                draft = self.draft()
                return draft, check(draft)

    def _minimised(self, check: Check, draft: Draft, report: Report) -> tuple[Draft, Report]:
        """Leave out what isn't needed, since something else cures it as well."""
        trying = [choice for choice in self.choices if choice.cure is not None]
        until = time.monotonic() + MINIMISE_SECONDS - len(trying) * report.seconds
        for choice in trying if len(trying) > 1 else ():
            if time.monotonic() > until:
                break
            choice.is_needed = False
            try:
                less = self.draft()
                found = check(less)
            except SwapError:
                choice.is_needed = True
                continue
            if len(found.faults) > len(report.faults) or (found.stop and not report.stop):
                choice.is_needed = True
            else:
                draft, report = less, found
        return draft, report

    def draft(self) -> Draft:
        """The texts with the ways that are being tried."""
        edits: list[Edit] = []
        tables = list(self._base.tables)
        self.postponed = []
        for choice in self.choices:
            if any(_collide(new, old) for new in choice.edits for old in edits):
                self.postponed.append(choice)
            elif choice.cure is not None and choice.is_needed:
                edits += choice.edits
                tables += choice.cure.tables
        texts = dict(self._base.texts)
        for tree in {edit.tree: None for edit in edits}:
            texts[tree.file] = tree.apply(edits)
        return Draft(texts, tuple(dict.fromkeys(tables)))

    def is_left(self, fault: Fault, draft: Draft) -> bool:
        """Whether a fault of a later check is one of these that nothing has cured."""
        return any(
            choice.cure is None and is_same(choice.fault, fault, self._lines(fault.file, draft))
            for choice in self.choices
        )

    def _failed(self, draft: Draft, report: Report) -> Iterator[Choice]:
        """The choices whose way didn't cure, or broke the code."""
        trying = [each for each in self.choices if each.cure and each not in self.postponed]
        broken = None if report.stop is None or report.stop == self._stop else report.stop.place
        for choice in trying:
            if (broken is not None and _changes(choice, broken)) or any(
                is_same(choice.fault, fault, self._lines(fault.file, draft))
                for fault in report.faults
            ):
                yield choice

    def _turn_from(self, file: str, function: str) -> bool:
        """Try something else for what changes a function that can't be exchanged."""
        blamed = [
            choice
            for choice in self.choices
            if choice.cure is not None
            and file in choice.files
            and choice.fault.function.startswith(function)
        ]
        for choice in blamed:
            choice.next()
        return bool(blamed) and all(choice.cure is not None for choice in blamed)

    def _lines(self, file: str, draft: Draft) -> Lines:
        try:
            before = self._sources.text(file)
        except SourceError:
            return Lines("", "")
        after = draft.texts.get(file, before)
        if (file, after) not in self._line_maps:
            self._line_maps[file, after] = Lines(before, after)
        return self._line_maps[file, after]


def _changes(choice: Choice, place: Place) -> bool:
    """Whether a way changes the function that a place is in."""
    name = place.function.rpartition(".")[2]
    for edit in choice.edits:
        function = edit.tree.enclosing(edit.node, cst.FunctionDef, cst.Lambda)
        own = function.name.value if isinstance(function, cst.FunctionDef) else "<lambda>"
        if edit.tree.file == place.file and own == name:
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


@dataclass(slots=True)
class Outcome:
    """What all rounds came to.

    Parameters
    ----------
    draft : Draft
    choices : list of Choice
    report : Report, optional
        Of the last check; None where none was made.
    left : list of (Fault, str)
        What is still there, each with why.
    """

    draft: Draft
    choices: list[Choice]
    report: Report | None = None
    left: list[tuple[Fault, str]] = field(default_factory=list)


def settle(report: Report, sources: Sources, subject: Subject, check: Check) -> Outcome:
    """Find changes that cure the faults of a report, round by round."""
    outcome = Outcome(Draft(), [], report)
    budget = Budget()
    found = report
    faults: Sequence[Fault] = report.faults
    for _ in range(MAX_ROUNDS):
        texts = {**sources.texts, **outcome.draft.texts}
        round_ = Round(found, faults, Sources(texts), subject, outcome.draft)
        draft, found = round_.run(check, budget)
        outcome.choices += round_.choices
        outcome.draft, outcome.report = draft, found
        faults = [each for each in found.faults if not round_.is_left(each, draft)]
        if not faults or budget.checks <= 0 or not any(each.cure for each in round_.choices):
            break
    outcome.left = list(_left(outcome, faults))
    return outcome


def guess(report: Report, sources: Sources) -> Outcome:
    """The most likely changes, unchecked: of a report that doesn't hold what was checked."""
    round_ = Round(report, report.faults, sources, None, Draft())
    outcome = Outcome(round_.draft(), round_.choices)
    outcome.left = list(_left(outcome, ()))
    return outcome


def _left(outcome: Outcome, faults: Iterable[Fault]) -> Iterator[tuple[Fault, str]]:
    for choice in outcome.choices:
        if choice.cure is None:
            yield choice.fault, choice.reason
    for fault in faults:
        yield fault, "it came up when others were cured, and was not cured itself"


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
