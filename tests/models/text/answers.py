"""Answers with calls, as each family writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from duoka.base.answer_parts import AnswerPart
from duoka.models.text.answer_reader import AnswerReader, CallForm, Tags
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


def read(answer: AnswerReader, pieces: Sequence[str], *, is_cut: bool = False) -> list[AnswerPart]:
    """All parts of an answer, those that go on joined."""
    parts = [part for piece in pieces for part in answer.feed(piece)]
    return join(parts + answer.finish(is_cut=is_cut))


def join(parts: Sequence[AnswerPart]) -> list[AnswerPart]:
    joined: list[AnswerPart] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last and part.kind != "tool_name" and (last.kind, last.call) == (part.kind, part.call):
            joined[-1] = part._replace(text=last.text + part.text)
        else:
            joined.append(part)
    return joined


def text_in(parts: Sequence[AnswerPart], kind: str) -> str:
    return "".join(part.text for part in parts if part.kind == kind)


def content(parts: Sequence[AnswerPart]) -> str:
    return text_in(parts, "content")


def told(parts: Sequence[AnswerPart]) -> list[tuple[str, str]]:
    """The name and the arguments of each call, in their order."""
    found: list[tuple[str, str]] = []
    for part in parts:
        if part.kind == "tool_name":
            assert part.call == len(found)
            found.append((part.text, ""))
        elif part.kind == "tool_arguments":
            assert part.call == len(found) - 1
            found[-1] = found[-1][0], found[-1][1] + part.text
    return found


def calls(parts: Sequence[AnswerPart]) -> list[ToolCall]:
    """The calls whose arguments are JSON."""
    whole = []
    for name, arguments in told(parts):
        try:
            whole.append(ToolCall(name=name, arguments=json.loads(arguments)))
        except ValueError:
            continue
    return whole
