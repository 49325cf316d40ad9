from __future__ import annotations

from duoka.models.text.tool_choice import ToolChoice

FUNCTION = {"name": "now", "description": "The time.", "parameters": {"type": "object"}}
NOW = {"type": "function", "function": FUNCTION}
ASK = {"type": "function", "function": {"name": "ask", "strict": True, "parameters": {}}}


def test_openai() -> None:
    tools = [NOW, ASK]
    assert ToolChoice.openai() == ToolChoice.openai("auto", True) == ToolChoice()
    assert ToolChoice.openai().offered(tools) == tools
    assert ToolChoice.openai("none").offered(tools) == []
    required = ToolChoice.openai("required", parallel=False)
    assert (required.mode, required.is_parallel) == ("required", False)
    choice = ToolChoice.openai({"type": "function", "function": {"name": "ask"}})
    assert (choice.mode, choice.offered(tools)) == ("required", [ASK])
