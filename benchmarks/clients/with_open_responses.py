"""The compliance cases of Open Responses, and what its specification requires of responses.

Source: https://www.openresponses.org, version 2026-04-24. The tool call is forced, since the model
has random weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx
from checks import AGENT, IMAGE, KEY, LLAMA, MODEL, VISION, check, main

REQUIRED = (
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model"),
    *("previous_response_id", "instructions", "output", "error", "tools", "tool_choice"),
    *("truncation", "parallel_tool_calls", "text", "top_p", "presence_penalty"),
    *("frequency_penalty", "top_logprobs", "temperature", "reasoning", "usage"),
    *("max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata"),
    *("safety_identifier", "prompt_cache_key"),
)
NUMBERS = ("presence_penalty", "frequency_penalty", "top_logprobs")
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a location",
    "parameters": {
        "type": "object",
        "properties": {"location": {"enum": ["San Francisco, CA"]}},
        "required": ["location"],
    },
}
QUESTION = [{"type": "message", "role": "user", "content": "What's the weather like?"}]


def post(url: str = LLAMA, **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {KEY}"}
    asked = {"model": MODEL, **body}
    answer = httpx.post(f"{url}/v1/responses", json=asked, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer


def verify(response: Mapping[str, Any], status: str = "completed") -> None:
    missing = [name for name in REQUIRED if name not in response]
    missing += [name for name in NUMBERS if not isinstance(response.get(name), int | float)]
    assert not missing, f"missing: {missing}"
    assert response["status"] == status, response
    assert response["output"]
    assert response["usage"]["input_tokens_details"].keys() >= {"cached_tokens"}
    assert response["usage"]["output_tokens_details"].keys() >= {"reasoning_tokens"}
    for item in response["output"]:
        assert item["id"]
        assert item["type"] == "reasoning" or item["status"]
    for tool in response["tools"]:
        assert tool.keys() >= {"type", "name", "description", "parameters", "strict"}, tool


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    events = []
    for block in answer.text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        if lines["data"] != "[DONE]":
            events.append(json.loads(lines["data"]))
            assert events[-1]["type"] == lines["event"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


@check
def basic_response() -> None:
    content = "Say hello in exactly 3 words."
    answer = post(AGENT, input=[{"type": "message", "role": "user", "content": content}])
    verify(answer.json())
    cut = post(input=content, max_output_tokens=16).json()
    verify(cut, "incomplete")
    assert cut["incomplete_details"] == {"reason": "max_output_tokens"}


@check
def streaming_response() -> None:
    events = events_of(post(AGENT, input=QUESTION, stream=True))
    verify(events[-1]["response"])
    assert [event["type"] for event in events] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added", "response.output_text.delta", "response.output_text.done",
        "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip


@check
def system_prompt() -> None:
    pirate = {"type": "message", "role": "system", "content": "You are a pirate."}
    verify(post(AGENT, input=[pirate, *QUESTION]).json())
    verify(post(AGENT, input=[{**pirate, "role": "developer"}, *QUESTION], instructions="a").json())


@check
def tool_calling() -> None:
    asked: dict[str, Any] = {"input": QUESTION, "tools": [WEATHER], "tool_choice": "required"}
    asked |= {"parallel_tool_calls": False, "temperature": 0}
    response = post(**asked).json()
    verify(response)
    (call,) = response["output"]
    # The schema allows further properties, which a random model writes.
    assert json.loads(call["arguments"])["location"] == "San Francisco, CA"
    events = events_of(post(**asked, stream=True))
    kinds = [event["type"] for event in events]
    for kind in ("output_item.added", "function_call_arguments.delta",
                 "function_call_arguments.done", "output_item.done"):  # fmt: skip
        assert f"response.{kind}" in kinds
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    parts = {**result, "output": [{"type": "input_text", "text": "sunny"}]}
    for output in (result, parts):
        verify(post(AGENT, input=[*QUESTION, call, output], tools=[WEATHER]).json())
    for choice in ("auto", "none", {"type": "function", "name": "get_weather"},
                   {"type": "allowed_tools", "mode": "auto",
                    "tools": [{"type": "function", "name": "get_weather"}]}):  # fmt: skip
        verify(post(AGENT, input=QUESTION, tools=[WEATHER], tool_choice=choice).json())


@check
def image_input() -> None:
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{IMAGE}", "detail": "auto"}
    content = [{"type": "input_text", "text": "What do you see?"}, image]
    asked = [{"type": "message", "role": "user", "content": content}]
    verify(post(VISION, input=asked, max_output_tokens=16).json(), "incomplete")


@check
def multi_turn() -> None:
    named = [
        {"type": "message", "role": "user", "content": "My name is Alice."},
        {"type": "message", "role": "assistant", "content": "Hello Alice!", "id": "msg_1",
         "status": "completed", "phase": "final_answer"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "So."}]},
        {"type": "message", "role": "assistant", "content": [
            {"type": "output_text", "text": "Hi.", "annotations": []},
            {"type": "refusal", "refusal": "No."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "And?"}]},
    ]  # fmt: skip
    verify(post(AGENT, input=named).json())


@check
def settings() -> None:
    used = {
        "temperature": 0.5, "top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.25,
        "max_output_tokens": 16, "safety_identifier": "s",
        "prompt_cache_key": "k", "instructions": "Be brief.", "top_logprobs": 2,
        "metadata": {"a": "b"}, "parallel_tool_calls": False, "truncation": "disabled",
        "store": False, "background": False,
    }  # fmt: skip
    further = {
        "service_tier": "auto", "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["message.output_text.logprobs"],
        "stream_options": {"include_obfuscation": False},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
    }  # fmt: skip
    response = post(AGENT, input="hi", **used, **further).json()
    verify(response)
    assert {name: response[name] for name in used} == used


main()
