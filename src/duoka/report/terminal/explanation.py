"""An explanation for people at a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.text import Text

from duoka.planner.explain import Explanation

from . import explain
from .names import name_modules


def render_explanation(explanation: Explanation) -> RenderableType:
    """What rich prints: the objective, each GPU, and the alternatives."""
    return _View(explanation)


class _View:
    def __init__(self, explanation: Explanation) -> None:
        self._explanation = explanation

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        explanation = self._explanation
        yield Text("why", style="bold")
        for sentence in (
            *explain.aim(explanation),
            explain.fewer(explanation),
            explain.whole_prompt(explanation),
        ):
            if sentence:
                yield _indented(sentence)
        for share in explanation.shares:
            yield Text.assemble((share.device, "bold"), " has ", name_modules(share.modules))
            yield _indented(explain.holds(share))
            for sentence in explain.why_not_else(explanation, share.device):
                yield _indented(sentence)
        yield from _crossings(explanation)
        yield from _rivals(explanation)


def _crossings(explanation: Explanation) -> Iterator[RenderableType]:
    for sentence in explain.crossings(explanation):
        yield Text(sentence)


def _rivals(explanation: Explanation) -> Iterator[RenderableType]:
    others = list(explain.rivals(explanation))
    if others:
        yield Text("alternatives", style="bold")
    for rival in others:
        yield _indented(rival.name, style="bold" if rival.is_plan else "")
        yield _indented(rival.dealt, by=4)
        yield _indented(rival.verdict, by=4, style="" if rival.fits else "red")


def _indented(text: str, *, by: int = 2, style: str = "") -> RenderableType:
    return Padding(Text(text, style=style), (0, 0, 0, by))
