"""Which of the tools that a request brings may be called, and whether one must be."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from duoka.errors import UsageError

from .messages import Tool, refuse_half_pairs, tool_function

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
    def openai(cls, value: object = None, parallel: object = None) -> ToolChoice:
        """Read `tool_choice` and `parallel_tool_calls`."""
        if not isinstance(parallel, bool | None):
            raise UsageError(f"parallel_tool_calls is {str(parallel)[:80]}; it is true or false")
        several = parallel is not False
        for mode in get_args(Mode):
            if value == mode or (value is None and mode == "auto"):
                return cls(mode, is_parallel=several)
        function = value.get("function", value) if isinstance(value, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        is_known = isinstance(value, Mapping) and value.get("type") == "function"
        if not is_known or not isinstance(name, str):
            raise UsageError(
                f"tool_choice is {str(value)[:80]}, which is unknown",
                hint='none, auto, required, or {"type": "function", "function": {"name": "…"}}',
            )
        return cls("required", name, several)

    def offered(self, tools: Sequence[Tool]) -> list[Tool]:
        """The tools that the prompt tells of, and a reader knows: those that may be called."""
        if self.mode == "required" and not tools:
            raise UsageError("tool_choice requires a call, but there are no tools")
        if self.mode == "none":
            return []
        if self.name is None:
            return list(tools)
        chosen = [tool for tool in tools if tool_function(tool)["name"] == self.name]
        if not chosen:
            raise UsageError(
                f"tool_choice names {self.name[:80]!r}, which is none of the tools",
                hint=f"there are {', '.join(tool_function(tool)['name'] for tool in tools)}"[:300],
            )
        return chosen


def openai_tools(tools: object) -> list[Tool]:
    """Read `tools` of OpenAI's, of which functions are known."""
    read: list[Tool] = []
    for tool in _listed(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
            raise UsageError(
                f"a tool is {str(tool)[:80]}; functions alone are known",
                hint='{"type": "function", "function": {"name": …, "parameters": …}}',
            )
        _refuse_unknown(tool, {"type", "function"})
        _refuse_unknown(function, {"name", "description", "parameters", "strict"})
        read.append({"type": "function", "function": dict(function)})
    return _valid(read)


def _valid(tools: list[Tool]) -> list[Tool]:
    refuse_half_pairs(json.dumps(tools, ensure_ascii=False, default=str), "a tool")
    return tools


def _listed(tools: object) -> list[Any]:
    if tools is not None and not isinstance(tools, list):
        raise UsageError(f"tools are {str(tools)[:80]}, which is no list")
    return tools or []


def _refuse_unknown(said: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(map(str, said.keys() - known))
    if unknown:
        raise UsageError(
            f"a tool has a field that isn't read: {unknown[0][:80]!r}",
            hint=f"known are {', '.join(sorted(known))}",
        )
