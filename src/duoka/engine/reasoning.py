"""Limits of reasoning: its end is forced when an answer has used up the tokens for it."""

from __future__ import annotations

from duoka.models.text.reasoning import ReasoningBudget


# With a budget of 3 tokens, and answers that the model would begin with "a b c d e":
#
#     begins within reasoning        a b c </think> …
#     begins with <think>            <think> a b c </think> …
#     begins with other text         a …: no reasoning follows, so nothing is counted
class ReasoningCounter:
    """Counts the tokens of reasoning in one answer, and forces its end.

    `is_done` is True once no token will be forced any more.
    """

    def __init__(self, budget: ReasoningBudget) -> None:
        self._budget = budget
        self._is_open = budget.is_open
        self._remaining = budget.tokens
        self._closing: list[int] = []
        self._text = ""
        self.is_done = False

    @property
    def forced(self) -> int | None:
        """The token that must come next; None if any may."""
        return self._closing[0] if self._closing else None

    def add(self, text: str) -> None:
        """Add the next token of the answer by its text."""
        if self._closing:
            del self._closing[0]
            self.is_done = not self._closing
            return
        self._text += text
        if not self._is_open:
            start, begin = self._text.lstrip(), self._budget.tags.begin
            self._is_open = start.startswith(begin)
            self.is_done = not (self._is_open or begin.startswith(start))
            return
        end = self._budget.tags.end
        self.is_done = end in self._text
        self._text = self._text[-len(end) :]  # a tag may consist of several tokens
        self._remaining -= 1
        if not self._remaining and not self.is_done:
            self._closing = [*self._budget.closing_ids]
