"""Calls that a request forces, of a real model: the three forms of chats tell the same call."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI
from served import Served

PARAMETERS: Any = {
    "type": "object",
    "properties": {"dry": {"type": "boolean"}},
    "required": ["dry"],
    "additionalProperties": False,
}
HI: Any = [{"role": "user", "content": "hi"}]
NAME, MOST_TOKENS = "rain", 110


def response_call(client: OpenAI, *, stream: bool) -> tuple[str, str, str | None]:
    tool: Any = {"type": "function", "name": NAME, "parameters": PARAMETERS, "strict": True}
    request: Any = {"model": "llama", "input": "hi", "temperature": 0, "tools": [tool]}
    request |= {"tool_choice": {"type": "function", "name": NAME}, "parallel_tool_calls": False}
    request |= {"max_output_tokens": MOST_TOKENS}
    if stream:
        events = list(client.responses.create(stream=True, **request))
        answer: Any = events[-1]
        answer = answer.response
        deltas = [event for event in events if event.type.endswith("arguments.delta")]
        assert len(deltas) > 1
    else:
        answer = client.responses.create(**request)
    (item,) = answer.output
    return item.name, item.arguments, answer.status


def message_call(client: Anthropic, *, stream: bool) -> tuple[str, str, str | None]:
    request: Any = {"model": "llama", "messages": HI, "max_tokens": MOST_TOKENS}
    request |= {"tools": [{"name": NAME, "input_schema": PARAMETERS}]}
    request |= {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    request |= {"extra_body": {"temperature": 0}}
    if stream:
        with client.messages.stream(**request) as events:
            answer = events.get_final_message()
    else:
        answer = client.messages.create(**request)
    (block,) = answer.content
    assert block.type == "tool_use"
    return block.name, json.dumps(block.input), answer.stop_reason


def told(
    client: OpenAI, most_tokens: int, *, stream: bool, parallel: bool = True
) -> tuple[str, list[str], str | None]:
    """The content of an answer, the names and arguments of its calls, and why it has ended."""
    function: Any = {"name": NAME, "parameters": PARAMETERS}
    request: Any = {"model": "llama", "messages": HI, "temperature": 0, "tool_choice": "required"}
    request |= {"tools": [{"type": "function", "function": function}], "max_tokens": most_tokens}
    request |= {"parallel_tool_calls": parallel}
    if not stream:
        (choice,) = client.chat.completions.create(**request).choices
        calls: Any = choice.message.tool_calls or ()
        said = [text for c in calls for text in (c.function.name, c.function.arguments)]
        return choice.message.content or "", said, choice.finish_reason
    content, said, end = "", [], None
    for chunk in client.chat.completions.create(stream=True, **request):
        (piece,) = chunk.choices
        content, end = content + (piece.delta.content or ""), piece.finish_reason
        for call in piece.delta.tool_calls or ():
            assert call.function is not None
            if call.function.name:
                said += [call.function.name, ""]
            said[-1] += call.function.arguments or ""
    return content, said, end


def test_a_forced_call_that_a_limit_cuts_is_told_alike_in_a_stream(client: OpenAI) -> None:
    start = len('{"name": "rain", "arguments": {')
    for most in (1, 2, start - 1, start, start + 1, start + 6, start + 9):
        whole = told(client, most, stream=False)
        assert told(client, most, stream=True) == whole
        assert whole[0] == ""
        assert whole[1] in ([], [NAME, whole[1][-1]] if whole[1] else [])
        assert bool(whole[1]) == (most >= start)
        assert whole[2] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_is_told_in_every_form(served: Served, stream: bool) -> None:
    with OpenAI(
        base_url=f"{served.url}/v1", api_key="x", _strict_response_validation=True
    ) as client:
        _, (name, text), end = told(client, MOST_TOKENS, stream=stream, parallel=False)
        response = response_call(client, stream=stream)
    with Anthropic(base_url=served.url, api_key="x", _strict_response_validation=True) as anthropic:
        message = message_call(anthropic, stream=stream)
    arguments = json.loads(text)
    assert arguments.keys() == {"dry"}
    assert isinstance(arguments["dry"], bool)
    assert [json.loads(call[1]) for call in (response, message)] == [arguments] * 2
    assert [call[0] for call in (response, message)] == [name] * 2 == [NAME] * 2
    assert (end, response[2], message[2]) == ("tool_calls", "completed", "tool_use")
