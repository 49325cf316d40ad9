"""The end of reasoning is forced after its budget, and nowhere else."""

from __future__ import annotations

import pytest

from duoka.engine.reasoning import ReasoningCounter
from duoka.models.text.answer_reader import Tags
from duoka.models.text.reasoning import ReasoningBudget

CLOSING = (91, 92)


def answer(texts: list[str], *, is_open: bool, tokens: int = 3) -> list[str]:
    """The tokens of an answer whose model would write these texts."""
    counter = ReasoningCounter(
        ReasoningBudget(tokens, Tags("<think>", "</think>"), CLOSING, is_open)
    )
    result = []
    rest = iter(texts)
    for text in rest:
        while not counter.is_done and counter.forced is not None:
            result.append(str(counter.forced))
            counter.add("anything")
        if not counter.is_done:
            counter.add(text)
        result.append(text)
    return result


@pytest.mark.parametrize(
    ("texts", "is_open", "result"),
    [
        ("a b c d", True, "a b c 91 92 d"),
        ("<think> a b c d", False, "<think> a b c 91 92 d"),
        ("<th ink> a b c d", False, "<th ink> a b c 91 92 d"),
        ("a <think> b c d e", False, "a <think> b c d e"),
        ("a b </think> c d e", True, "a b </think> c d e"),
        ("a </thi nk>b c d", True, "a </thi nk>b c d"),
        ("a b </thi nk> c", True, "a b </thi 91 92 nk> c"),
        ("</think> a b c d", True, "</think> a b c d"),
        ("a b </think>c d e", True, "a b </think>c d e"),
    ],
)
def test_reasoning_ends_after_its_budget(texts: str, is_open: bool, result: str) -> None:
    assert answer(texts.split(), is_open=is_open) == result.split()


def test_space_before_the_tag_is_no_other_text() -> None:
    texts = ["\n", "<think>", "a", "b", "c"]
    assert answer(texts, is_open=False, tokens=2) == [*texts[:4], "91", "92", "c"]
