"""Rounds of patching and checking until the check is clean or no candidate is left.

In a round every fault of the last check has one active candidate, and all candidates are checked
together. A fault that is still there, or whose candidate broke the code, advances to its next
candidate. Faults that appear only after others are fixed belong to the next round, which starts
from the texts of this one.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from duoka.report.check_report import CheckReport, Fault, Place

from ..source_map import parse_quietly
from .candidates import Candidate, candidates
from .live_code import COMPREHENSIONS
from .patch import Cure
from .sources import SourceError, Sources
from .syntax import Edit, strip_blanks

MAX_ROUNDS = 5
MAX_CHECKS = 24
_NO_WAY = "no fix is known"
_IN_VAIN = "it remained after every change that was tried"
_NEAR_LINES = 1
_MOST_TEXTS = 16


Draft = Mapping[str, str]
"""Patched texts by file."""
Check = Callable[[Draft], CheckReport]
"""Repeats the check with the texts of a draft in place of the original code."""


class CandidateSearch:
    """A fault and its active candidate, None once all candidates have failed."""

    def __init__(self, fault: Fault, options: Iterator[Candidate]) -> None:
        self.fault = fault
        self._options = options
        self.reason = _NO_WAY
        self.candidate: Candidate | None = None
        self.next()

    def next(self, *, is_last: bool = False) -> None:
        """Advance to the next candidate that is valid Python; with `is_last`, give up instead."""
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
    """Return True if every edited file still parses."""
    for tree in {edit.tree: None for edit in candidate.edits}:
        try:
            parse_quietly(tree.apply(candidate.edits))
        except SyntaxError:
            return False
    return True


# Each check takes seconds and a model has dozens of faults, so all faults have an active candidate
# at once, and one check judges all of them. With faults a, b, c and their candidates a1, a2, …:
#
#   check   active       outcome                              next
#   1       a1 b1 c1     fault b is still there               b → b2
#   2       a1 b2 c1     stops by an error in c's function    c → c2
#   3       a1 b2 c2     no fault but d, which is new         end of the round; d is for the next
#
# A round takes as many checks as the longest list of candidates that is tried, not as many as there
# are combinations. A new round starts from the patched texts, where d has its final line. A later
# check's fault is recognized by function, operation, operands and line (`is_same`). A candidate
# whose edits collide with those of an earlier one is left out of the draft, and isn't judged.
class FixSearch:
    """Rounds of a search: the patched texts, the last report, and the search of each fault."""

    def __init__(self, report: CheckReport, sources: Sources, check: Check) -> None:
        self.draft: Draft = {}
        self.report = report
        self.choices: list[CandidateSearch] = []
        """Searches of all rounds; those of the current round are last."""
        self.late: Sequence[Fault] = ()
        """Faults that appeared after others were fixed, and that have no search of their own."""
        self._sources = sources
        self._check = check
        self._max_checks = MAX_CHECKS

    def run(self) -> None:
        """Search round by round; each round starts from the patched texts of the previous round."""
        self.late = self.report.faults
        for _ in range(MAX_ROUNDS):
            sources = Sources({**self._sources.texts, **self.draft})
            choices = [CandidateSearch(fault, candidates(fault, sources)) for fault in self.late]
            self.choices += choices
            if not any(choice.candidate for choice in choices):
                self.late = ()
                return
            postponed = self._run_round(choices, sources)
            # The faults of postponed searches are still in the report: the next round takes them.
            self.choices = [choice for choice in self.choices if choice not in postponed]
            given_up = [choice for choice in choices if choice.candidate is None]
            self.late = [
                fault
                for fault in self.report.faults
                if not any(self._is_left(choice, [fault], sources) for choice in given_up)
            ]
            if not self.late or self._max_checks <= 0:
                return

    def _run_round(
        self, choices: Sequence[CandidateSearch], sources: Sources
    ) -> Sequence[CandidateSearch]:
        """Check and advance candidates until none fails; return searches left out of the draft."""
        base, first_stop = self.draft, self.report.stop
        while True:
            self.draft, postponed = _make_draft(choices, base)
            self.report = self._check(self.draft)
            self._max_checks -= 1
            stop = self.report.stop
            broken = None if stop is None or stop == first_stop else stop.place
            failed = [
                choice
                for choice in choices
                if choice.candidate is not None
                and choice not in postponed
                and (
                    (broken is not None and _changes(choice, broken))
                    or self._is_left(choice, self.report.faults, sources)
                )
            ]
            for choice in failed:
                choice.next(is_last=self._max_checks <= 0)
            if failed and self._max_checks <= 0:
                self.draft, postponed = _make_draft(choices, base)
                self.report = self._check(self.draft)
            if not failed or self._max_checks <= 0:
                return postponed

    def _is_left(self, choice: CandidateSearch, faults: Iterable[Fault], sources: Sources) -> bool:
        """Return True if a search's fault is among `faults`, found by a check of the draft."""
        line, after = choice.fault.line, self.draft.get(choice.fault.file)
        if after is not None:
            line = line_after(sources.text(choice.fault.file), after, line)
        return any(is_same(choice.fault, fault, line) for fault in faults)

    def cures(self, file: str) -> Iterator[Cure]:
        """Yield the changes of a file, each with all faults fixed by the change."""
        by_candidate: dict[tuple[Edit, ...], list[CandidateSearch]] = {}
        for choice in self.choices:
            if any(edit.tree.file == file for edit in choice.edits):
                by_candidate.setdefault(choice.edits, []).append(choice)
        for choices in by_candidate.values():
            candidate, count = choices[0].candidate, max(choice.fault.count for choice in choices)
            step_bytes = 0 if candidate is None else candidate.step_bytes * count
            yield Cure(faults=tuple(choice.fault for choice in choices), step_bytes=step_bytes)

    def uncured(self) -> Iterator[tuple[Fault, str]]:
        """Yield the faults without a fix, each with the reason."""
        for choice in self.choices:
            if choice.candidate is None:
                yield choice.fault, choice.reason
        for fault in self.late:
            yield fault, "it appeared after other faults were fixed, and has no fix"


def _make_draft(
    choices: Sequence[CandidateSearch], base: Draft
) -> tuple[Draft, Sequence[CandidateSearch]]:
    """Apply the active candidates to `base`; return the texts, and searches whose edits collide."""
    edits: list[Edit] = []
    postponed = []
    for choice in choices:
        if any(new.collides_with(old) for new in choice.edits for old in edits):
            postponed.append(choice)
        else:
            edits += choice.edits
    texts = {tree.file: tree.apply(edits) for tree in {edit.tree: None for edit in edits}}
    return {**base, **texts}, postponed


def _function(place: Place) -> str:
    """Return the name of the function at a place, skipping comprehensions; "" if there is none."""
    names = [name for name in place.function.split(".") if name not in COMPREHENSIONS]
    return names[-1] if names else ""


def _changes(choice: CandidateSearch, place: Place) -> bool:
    """Return True if a search's fault, and so its edits, are in the function at a place."""
    return choice.fault.file == place.file and _function(choice.fault.place) == _function(place)


@lru_cache(maxsize=_MOST_TEXTS)
def _line_blocks(old_text: str, new_text: str) -> Sequence[tuple[str, int, int, int, int]]:
    """Return the equal and changed blocks of lines of two texts, as difflib's opcodes."""
    lines = old_text.splitlines(), new_text.splitlines()
    return difflib.SequenceMatcher(None, *lines, autojunk=False).get_opcodes()


# Example: lines a b c d become a n B c d, with a name assigned in line n for the statement B. The
# blocks are (a → a), (b → n B) and (c d → c d). Line 3 becomes 4; line 2 becomes 3, the last line
# of its block, where the statement is.
def line_after(old_text: str, new_text: str, line: int) -> int:
    """Map a line number of a text to the changed text; lines count from 1."""
    for _, start, end, new_start, new_end in _line_blocks(old_text, new_text):
        if start < line <= end:
            # A line is added before the statement that uses it: count from the block's end.
            return max(new_end - (end - line), new_start + 1)
    return line


def is_same(earlier: Fault, later: Fault, line: int) -> bool:
    """Return True if `later` is `earlier`, now on `line`, with the same moved operands."""
    if (earlier.file, earlier.function, earlier.op) != (later.file, later.function, later.op):
        return False
    if abs(line - later.line) > _NEAR_LINES:
        return False
    old = [strip_blanks(operand.expression) for operand in earlier.operands if operand.moved]
    new = [strip_blanks(operand.expression) for operand in later.operands if operand.moved]
    return old == new or any(left in right for left in old for right in new)
