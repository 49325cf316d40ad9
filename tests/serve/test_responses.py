"""Responses: the official client takes every event, and conversations become chats."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import TypeAdapter
from scripted import CALLS, MODEL, ScriptedPool, answer_of, app_of, begun, delta, ended, transport
from served import Served

from duoka.base.prompt_settings import PromptSettings
from duoka.serve.messages import Event, Failed, Turn
from duoka.serve.responses import Item, read_turns

TOOL: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}


def respond(events: Sequence[Event], **request: Any) -> tuple[Any, ScriptedPool]:
    """What the client makes of an answer that consists of these events."""

    def open_client(http: httpx2.AsyncClient) -> AsyncOpenAI:
        return AsyncOpenAI(
            base_url="http://test/v1",
            api_key="x",
            max_retries=0,
            http_client=http,
            _strict_response_validation=True,
        )

    return answer_of(events, open_client, lambda client: client.responses.create, **request)


def test_reasoning_text_and_calls_are_items() -> None:
    answer, _ = respond(CALLS, input="What is the weather?", tools=[TOOL])
    reasoning, message, *calls = answer.output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "Let me see.")
    assert (message.type, answer.output_text) == ("message", "I ask two.")
    assert [(call.name, call.arguments) for call in calls] == [
        ("weather", '{"city": "Beijing"}'),
        ("time", "{}"),
    ]
    assert len({call.call_id for call in calls}) == 2
    assert answer.status == "completed"
    assert answer.usage.input_tokens_details.cached_tokens == 3
    assert answer.usage.output_tokens_details.reasoning_tokens == len("Let me see.")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (7, 9)


def test_a_stream_says_what_a_whole_answer_says() -> None:
    whole, _ = respond(CALLS, input="a")
    events, _ = respond(CALLS, input="a", stream=True)
    ids = {"id", "call_id", "created_at", "completed_at"}

    def bare(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: bare(item) for key, item in value.items() if key not in ids}
        return [bare(item) for item in value] if isinstance(value, list) else value

    assert bare(events[-1].response.model_dump()) == bare(whole.model_dump())


def test_the_client_puts_a_stream_together() -> None:
    app, _ = app_of(*CALLS)

    async def ask() -> Any:
        async with transport(app) as http:
            client = AsyncOpenAI(base_url="http://test/v1", api_key="x", http_client=http)
            async with client.responses.stream(model=MODEL, input="a") as stream:
                return await stream.get_final_response()

    answer = asyncio.run(ask())
    assert answer.output_text == "I ask two."
    assert [item.type for item in answer.output][2:] == ["function_call"] * 2


def test_a_response_shows_the_values_that_were_used() -> None:
    used = {"temperature": 0.7, "top_p": 0.95, "max_output_tokens": None}
    answer, _ = respond([replace(begun(), params=used), ended()], input="a", max_output_tokens=9)
    assert (answer.temperature, answer.top_p, answer.max_output_tokens) == (0.7, 0.95, 9)
    assert answer.text.format.type == "text"
    assert (answer.tools, answer.tool_choice, answer.truncation) == ([], "auto", "disabled")
    assert (answer.top_logprobs, answer.parallel_tool_calls) == (0, True)
    given: Any = {
        "temperature": 0.5,
        "top_p": 0.25,
        "tools": [TOOL],
        "tool_choice": {"type": "function", "name": "weather"},
        "parallel_tool_calls": False,
        "metadata": {"a": "b"},
        "instructions": "Be short.",
        "user": "u",
        "top_logprobs": 2,
    }
    answer, _ = respond([begun(), ended()], input="a", text={"verbosity": "low"}, **given)
    shown = answer.model_dump(exclude_unset=True)
    given["tools"] = [{**TOOL, "description": None}]
    assert {name: shown[name] for name in given} == given
    assert answer.text.format.type == "text"


def test_input_tokens_are_counted(served: Served, client: OpenAI) -> None:
    for request in ({"input": "hi"}, {"input": [{"role": "user", "content": "hi"}], "tools": []}):
        fields: Any = {"model": served.model, "instructions": "Be short.", **request}
        counted = client.responses.input_tokens.count(**fields)
        usage = client.responses.create(max_output_tokens=1, **fields).usage
        assert usage is not None
        assert (counted.object, counted.input_tokens) == (
            "response.input_tokens",
            usage.input_tokens,
        )
    with pytest.raises(openai.BadRequestError, match="there are no messages"):
        client.responses.input_tokens.count(model=served.model)


def test_what_is_cut_is_incomplete() -> None:
    answer, _ = respond([begun(), delta("ab"), ended("length")], input="a")
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"


def test_an_answer_without_a_word_is_one() -> None:
    events, _ = respond([begun(), ended()], input="a", stream=True)
    assert events[-1].response.output_text == ""
    assert [item.type for item in events[-1].response.output] == ["message"]


def test_what_breaks_off_is_told_in_the_stream() -> None:
    failure = Failed(number=0, status=503, text="the engine has ended", code="engine_died")
    events, _ = respond([begun(), delta("ab"), failure], input="a", stream=True)
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.code == "server_error"
    assert "the engine has ended" in events[-1].response.error.message
    with pytest.raises(openai.InternalServerError) as caught:
        respond([begun(), delta("ab"), failure], input="a")
    assert (caught.value.status_code, caught.value.code) == (503, "engine_died")


def test_log_probabilities_are_told_where_they_are_asked_for() -> None:
    events = [begun(), delta("ab"), ended()]
    answer, pool = respond(events, input="a", include=["message.output_text.logprobs"])
    assert [told.token for told in answer.output[0].content[0].logprobs] == ["a", "b"]
    assert pool.asks[0].params["logprobs"] == 0
    streamed, pool = respond(events, input="a", top_logprobs=3, stream=True)
    told = [event for event in streamed if event.type == "response.output_text.delta"]
    assert [entry.token for event in told for entry in event.logprobs] == ["a", "b"]
    assert pool.asks[0].params["logprobs"] == 3
    without, _ = respond(events, input="a")
    assert without.output[0].content[0].logprobs == []


def test_what_is_asked_reaches_the_engine() -> None:
    schema = {"type": "object", "properties": {}}
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    answer, pool = respond(
        [begun(), ended()],
        input="a",
        instructions="Be short.",
        tools=[TOOL],
        tool_choice={"type": "function", "name": "weather"},
        parallel_tool_calls=False,
        max_output_tokens=5,
        temperature=0.5,
        top_p=0.25,
        text=form,
        reasoning={"effort": "high", "summary": "auto"},
        metadata={"k": "v"},
    )
    (ask,) = pool.asks
    function = {"name": "weather", "parameters": TOOL["parameters"], "strict": False}
    assert ask.prompt.messages == [
        Turn(role="system", content="Be short."),
        Turn(role="user", content="a"),
    ]
    assert ask.prompt.tools == [{"type": "function", "function": function}]
    assert ask.prompt.must_call
    assert not ask.prompt.parallel_tool_calls
    json_schema = {"name": "x", "schema": schema, "strict": True}
    assert ask.params == {
        "temperature": 0.5,
        "top_p": 0.25,
        "max_new_tokens": 5,
        "response_format": {"type": "json_schema", "json_schema": json_schema},
    }
    assert (answer.metadata, answer.instructions) == ({"k": "v"}, "Be short.")
    assert (answer.temperature, answer.top_p, answer.max_output_tokens) == (0.5, 0.25, 5)
    assert answer.tool_choice.name == "weather"
    assert answer.tools[0].name == "weather"
    assert answer.text.format.schema_ == schema
    assert not answer.parallel_tool_calls
    assert answer.reasoning.effort == "high"
    assert ask.prompt.settings == PromptSettings(is_thinking=True, effort="high")


def test_an_answer_can_be_sent_back() -> None:
    answer, _ = respond(CALLS, input="What is the weather?", tools=[TOOL])
    items = [item.model_dump(exclude_none=True) for item in answer.output]
    _, pool = respond(
        [begun(), ended()],
        input=[
            {"role": "user", "content": "What is the weather?"},
            *items,
            {"type": "function_call_output", "call_id": items[2]["call_id"], "output": "dry"},
            {"type": "function_call_output", "call_id": items[3]["call_id"], "output": "noon"},
            {"role": "developer", "content": [{"type": "input_text", "text": "Be short."}]},
        ],
    )
    names = [("weather", '{"city": "Beijing"}'), ("time", "{}")]
    calls = tuple(
        {"id": item["call_id"], "function": {"name": name, "arguments": text}}
        for item, (name, text) in zip(items[2:], names, strict=True)
    )
    assert pool.asks[0].prompt.messages == [
        Turn(role="user", content="What is the weather?"),
        Turn(role="assistant", content="I ask two.", reasoning="Let me see.", calls=calls),
        Turn(role="tool", call_id=calls[0]["id"], content="dry"),
        Turn(role="tool", call_id=calls[1]["id"], content="noon"),
        Turn(role="system", content="Be short."),
    ]


def test_images_belong_to_a_message() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "low"}
    text = {"type": "input_text", "text": "What is it?"}
    items = TypeAdapter(list[Item]).validate_python([{"role": "user", "content": [image, text]}])
    url = "data:image/png;base64,AA=="
    assert read_turns(items) == [Turn(role="user", content="What is it?", images=(url,))]


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 3}]}]},
         "input.0.content.0.text"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "input.0.arguments"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_wrong_is_named(request_: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        respond(CALLS, **{"input": "a", **request_})
    assert (caught.value.param, caught.value.type) == (param, "invalid_request_error")
    assert param in caught.value.message or "tool_choice" in caught.value.message


def test_a_real_model_answers(served: Served, client: OpenAI) -> None:
    said: Any = [{"role": "user", "content": "hi"}]
    chat = client.chat.completions.create(
        model=served.model, messages=said, max_tokens=12, temperature=0, logprobs=True
    )
    options: Any = {"max_output_tokens": 12, "temperature": 0, "top_logprobs": 0}
    whole = client.responses.create(model=served.model, input="hi", **options)
    assert whole.output_text == chat.choices[0].message.content
    assert (whole.temperature, whole.top_p) == (0, 1)
    events = list(client.responses.create(model=served.model, input=said, stream=True, **options))
    assert events[-1].response.output_text == whole.output_text
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == whole.output_text
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    expected = [entry.logprob for entry in logprobs.content]
    assert [entry.logprob for event in deltas for entry in event.logprobs] == expected


def test_events_come_in_their_order() -> None:
    events, _ = respond(CALLS, input="What is the weather?", tools=[TOOL], stream=True)
    part = ["response.output_item.added", "response.content_part.added"]
    end = ["response.content_part.done", "response.output_item.done"]
    arguments = "response.function_call_arguments"
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        *part,
        *["response.reasoning_text.delta"] * 2,
        "response.reasoning_text.done",
        *end,
        *part,
        *["response.output_text.delta"] * 2,
        "response.output_text.done",
        *end,
        *[part[0], *[f"{arguments}.delta"] * 2, f"{arguments}.done", end[1]],
        *[part[0], f"{arguments}.delta", f"{arguments}.done", end[1]],
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    places = [event.output_index for event in events if hasattr(event, "output_index")]
    assert places == sorted(places)
    assert set(places) == {0, 1, 2, 3}
    whole, last = events[-1].response, events[0].response
    assert (last.status, last.output) == ("in_progress", [])
    added = [event.item.id for event in events if event.type == part[0]]
    assert [item.id for item in whole.output] == added
    done = [event.item for event in events if event.type == end[1]]
    assert done == whole.output
