"""Which of the tools that a request brings may be called, and whether one must be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from .messages import Tool, tool_function

Mode = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What may be called: nothing, anything, at least something; or the tool of a name.

    Parameters
    ----------
    mode : {"none", "auto", "required"}
    name : str, optional
        Of the only tool that may be called, and must be.
    is_parallel : bool
        Whether an answer may call several.
    """

    mode: Mode = "auto"
    name: str | None = None
    is_parallel: bool = True

    @classmethod
    def openai(cls, value: str | Mapping[str, Any] = "auto", parallel: bool = True) -> ToolChoice:
        """Read `tool_choice` and `parallel_tool_calls`, whose forms a server has checked."""
        if isinstance(value, str):
            return cls(cast(Mode, value), is_parallel=parallel)
        return cls("required", value["function"]["name"], parallel)

    def offered(self, tools: Sequence[Tool]) -> list[Tool]:
        """The tools that the prompt tells of, and a reader knows: those that may be called."""
        if self.mode == "none":
            return []
        return [tool for tool in tools if self.name in (None, tool_function(tool)["name"])]
