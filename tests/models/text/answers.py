"""Answers with calls, as each family writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from duoka.models.text.answer_parts import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Part,
    ReasoningPart,
)
from duoka.models.text.answer_reader import AnswerReader, CallForm, Tags, joined
from duoka.models.text.call_forms import (
    LineForm,
    MistralForm,
    ObjectForm,
    PairForm,
    ParameterForm,
    TaggedForm,
)
from duoka.models.text.messages import ToolCall, write_python_call

THINK = Tags("<think>", "</think>")
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "note": {"type": ["string", "null"]},
    },
}
SCHEMAS: dict[str, Mapping[str, Any]] = {"get_weather": WEATHER, "get": {}, "search-web": {}}

FORMS: dict[str, CallForm] = {
    "chatglm3": LineForm("python"),
    "glm4": LineForm("json"),
    "glm4.5": PairForm(),
    "qwen3-coder": ParameterForm(),
    "hermes": TaggedForm(),
    "llama": ObjectForm(),
    "mistral": MistralForm(),
    "mistral-named": MistralForm(has_names=True),
}


def text_of(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def write(name: str, calls: Sequence[ToolCall]) -> str:
    """Calls as a family writes them."""
    if name == "chatglm3":
        return "<|assistant|>".join(f"{c.name}\n {write_python_call(c)}" for c in calls)
    if name == "glm4":
        return "<|assistant|>".join(f"{c.name}\n{text_of(dict(c.arguments))}" for c in calls)
    if name == "mistral":
        objects = [{"name": c.name, "arguments": c.arguments, "id": "a" * 9} for c in calls]
        return f"[TOOL_CALLS] {json.dumps(objects)}"
    if name == "llama":
        objects = [{"name": c.name, "parameters": c.arguments} for c in calls]
        return "; ".join(map(json.dumps, objects))
    return "".join(_write_one(name, call) for call in calls)


def _write_one(name: str, call: ToolCall) -> str:
    arguments = call.arguments
    if name == "mistral-named":
        return f"[TOOL_CALLS]{call.name}[ARGS]{json.dumps(arguments)}"
    if name == "hermes":
        said = {"name": call.name, "arguments": arguments}
        return f"\n<tool_call>\n{json.dumps(said, ensure_ascii=False)}\n</tool_call>"
    if name == "glm4.5":
        pairs = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{text_of(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        return f"\n<tool_call>{call.name}\n{pairs}</tool_call>"
    assert name == "qwen3-coder"
    pairs = "".join(
        f"<parameter={key}>\n{text_of(value)}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"\n<tool_call>\n<function={call.name}>\n{pairs}</function>\n</tool_call>"


def reader(
    form: CallForm | None,
    *,
    is_reasoning: bool = False,
    is_forced: bool = False,
    schemas: Mapping[str, Mapping[str, Any]] | None = None,
) -> AnswerReader:
    return AnswerReader(
        form,
        SCHEMAS if schemas is None else schemas,
        THINK,
        is_reasoning=is_reasoning,
        is_forced=is_forced,
    )


def read(answer: AnswerReader, pieces: Sequence[str], *, is_cut: bool = False) -> list[Part]:
    """All parts of an answer."""
    parts = [part for piece in pieces for part in answer.feed(piece)]
    return joined(parts + answer.finish(is_cut=is_cut))


def content(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Content))


def reasoning(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, ReasoningPart))


def calls(parts: Sequence[Part]) -> list[ToolCall]:
    """The whole calls; every part of one is told in its order."""
    names, arguments, whole = {}, {}, []
    for part in parts:
        if isinstance(part, CallStart):
            assert part.index == len(names)
            names[part.index], arguments[part.index] = part.name, ""
        elif isinstance(part, CallArguments):
            arguments[part.index] += part.text
        elif isinstance(part, CallEnd) and part.is_whole:
            whole.append(part.index)
    return [ToolCall(name=names[n], arguments=json.loads(arguments[n])) for n in whole]
