"""What is said in a chat, whatever the model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from duoka.errors import UsageError

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")

Role = Literal["system", "user", "assistant", "observation"]
Tool = Mapping[str, Any]
"""A function as JSON schema: name, description, parameters; bare or as OpenAI wraps it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A model's wish to have a function called.

    Parameters
    ----------
    name : str
        Of the function.
    arguments : mapping
        By name; nothing but what JSON knows, and Python's other literals.
    """

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message.

    Parameters
    ----------
    role : {"system", "user", "assistant", "observation"}
        Who says it; an observation is what a tool returned.
    content : str
        What is said.
    metadata : str
        What the ChatGLM family writes beside the role: the name of the tool that is called.
    tool_call : ToolCall, optional
        Of an assistant's message that calls a tool.
    """

    role: Role
    content: str
    metadata: str = ""
    tool_call: ToolCall | None = None

    def __post_init__(self) -> None:
        """Refuse what no model knows."""
        if self.role not in get_args(Role):
            raise UsageError(
                f"{self.role!r} is no role of a message", hint=f"roles: {', '.join(get_args(Role))}"
            )
        for name, text in (("content", self.content), ("metadata", self.metadata)):
            if not isinstance(text, str):
                raise UsageError(f"a message's {name} is a text, not {type(text).__name__}")
            if _LONE_SURROGATE.search(text):
                raise UsageError(
                    f"a message's {name} is no valid text: it has half of a surrogate pair",
                    hint="read it as UTF-8",
                )
        if "\n" in self.metadata:
            raise UsageError("metadata is one line", hint="the content may have several")


def last_is_answerable(messages: Sequence[Message]) -> None:
    """Raise UsageError unless somebody waits for the assistant."""
    if not messages:
        raise UsageError("there is no message to answer")
    if messages[-1].role == "assistant":
        raise UsageError("the last message is the assistant's own; there is nothing to answer")


def tool_function(tool: Tool) -> Mapping[str, Any]:
    """Return the function that a tool describes, taken out of OpenAI's wrapping."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else tool
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UsageError(
            "a tool is an object with a name, a description and parameters",
            hint="give its JSON schema, bare or as OpenAI wraps it",
        )
    return function
