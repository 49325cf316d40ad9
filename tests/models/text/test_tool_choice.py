from __future__ import annotations

from typing import Any

import pytest
from fuzzing import JSON, fuzz, told_of
from hypothesis import given

from duoka.errors import UsageError
from duoka.models.text.tool_choice import ToolChoice, openai_tools

FUNCTION = {"name": "now", "description": "The time.", "parameters": {"type": "object"}}
NOW = {"type": "function", "function": FUNCTION}
ASK = {"type": "function", "function": {"name": "ask", "strict": True, "parameters": {}}}


def test_openai() -> None:
    tools = openai_tools([NOW, ASK])
    assert tools == [NOW, ASK]
    assert ToolChoice.openai() == ToolChoice.openai("auto", True) == ToolChoice()
    assert ToolChoice.openai().offered(tools) == tools
    assert ToolChoice.openai("none").offered(tools) == []
    required = ToolChoice.openai("required", parallel=False)
    assert (required.mode, required.is_parallel) == ("required", False)
    for named in (
        {"type": "function", "function": {"name": "ask"}},
        {"type": "function", "name": "ask"},
    ):
        choice = ToolChoice.openai(named)
        assert (choice.mode, choice.offered(tools)) == ("required", [ASK])
    assert openai_tools(None) == []


@pytest.mark.parametrize(
    "value", ["any", 3, [], {}, {"type": "function"}, {"type": "tool", "name": "x"}]
)
def test_unknown_choices_of_openai(value: Any) -> None:
    with pytest.raises(UsageError, match="tool_choice is"):
        ToolChoice.openai(value)


def test_choices_that_no_tool_fits() -> None:
    with pytest.raises(UsageError, match="there are no tools"):
        ToolChoice.openai("required").offered([])
    with pytest.raises(UsageError, match="names 'x', which is none") as refused:
        ToolChoice("required", "x").offered([NOW, ASK])
    assert refused.value.hint == "there are now, ask"
    with pytest.raises(UsageError, match="true or false"):
        ToolChoice.openai("auto", "yes")


@pytest.mark.parametrize(
    "tools",
    [
        *({}, [3], [{"type": "web_search"}], [{"type": "function"}], [{**NOW, "extra": 1}]),
        [{"type": "function", "function": {**FUNCTION, "extra": 1}}],
        [{"type": "function", "function": {**FUNCTION, "description": "\ud800"}}],
    ],
)
def test_unknown_tools(tools: Any) -> None:
    with pytest.raises(UsageError, match="tool"):
        openai_tools(tools)


@fuzz()
@given(value=JSON)
def test_anything_is_read_or_refused(value: Any) -> None:
    for read in (ToolChoice.openai, openai_tools):
        try:
            read(value)
        except UsageError as error:
            told_of(error, "", 300)
