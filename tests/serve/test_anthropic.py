"""Messages: Anthropic's official client takes every event, and conversations become chats."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from anthropic import Anthropic, AsyncAnthropic
from scripted import CALLS, MODEL, ScriptedPool, answer_of, app_of, begun, delta, ended, transport
from served import Served

from duoka.serve.limits import MOST_BODY_BYTES
from duoka.serve.messages import Event, Failed, Turn

TOOL: Any = {
    "name": "weather",
    "description": "Tells it.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
HI: Any = [{"role": "user", "content": "hi"}]


def send(events: Sequence[Event], **request: Any) -> tuple[Any, ScriptedPool]:
    """What the client makes of an answer that consists of these events."""

    def open_client(http: httpx2.AsyncClient) -> AsyncAnthropic:
        return AsyncAnthropic(
            base_url="http://test",
            api_key="x",
            max_retries=0,
            http_client=http,
            _strict_response_validation=True,
        )

    request = {"messages": HI, "max_tokens": 50, **request}
    return answer_of(events, open_client, lambda client: client.messages.create, **request)


def test_reasoning_text_and_calls_are_blocks() -> None:
    answer, _ = send(CALLS, tools=[TOOL])
    thinking, text, *calls = answer.content
    assert (thinking.type, thinking.thinking) == ("thinking", "Let me see.")
    assert thinking.signature
    assert (text.type, text.text) == ("text", "I ask two.")
    assert [(call.name, call.input) for call in calls] == [
        ("weather", {"city": "Beijing"}),
        ("time", {}),
    ]
    assert len({call.id for call in calls}) == 2
    assert (answer.stop_reason, answer.stop_sequence) == ("tool_use", None)
    usage = answer.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (4, 3, 9)
    assert usage.output_tokens_details.thinking_tokens == len("Let me see.")


def test_the_client_puts_a_stream_together() -> None:
    app, _ = app_of(*CALLS)

    async def ask() -> Any:
        async with transport(app) as http:
            client = AsyncAnthropic(base_url="http://test", api_key="x", http_client=http)
            async with client.messages.stream(model=MODEL, max_tokens=9, messages=HI) as stream:
                return await stream.get_final_message()

    def bare(message: Any) -> Any:
        content = [block.model_dump(exclude={"id"}) for block in message.content]
        return content, message.stop_reason, message.usage.output_tokens

    whole, _ = send(CALLS)
    assert bare(asyncio.run(ask())) == bare(whole)


@pytest.mark.parametrize(
    ("end", "reason", "text"),
    [
        (ended("stop"), "end_turn", None),
        (ended("length"), "max_tokens", None),
        (ended("stop", "END"), "stop_sequence", "END"),
    ],
)
def test_why_an_answer_ended(end: Event, reason: str, text: str | None) -> None:
    answer, pool = send([begun(), delta("ab"), end], stop_sequences=["END", "\n"])
    assert (answer.stop_reason, answer.stop_sequence) == (reason, text)
    assert pool.asks[0].params["stop"] == ("END", "\n")
    events, _ = send([begun(), delta("ab"), end], stream=True)
    assert (events[-2].delta.stop_reason, events[-2].delta.stop_sequence) == (reason, text)


def test_arguments_that_were_cut_are_given_as_they_are() -> None:
    cut = [begun(), delta("f", "tool_name"), delta('{"a": [1', "tool_arguments"), ended("length")]
    answer, _ = send(cut)
    assert answer.content[0].input == {"INVALID_JSON": '{"a": [1'}


def test_what_breaks_off_is_told_in_the_stream() -> None:
    failure = Failed(number=0, status=503, text="the engine has ended", code="engine_died")
    with pytest.raises(anthropic.APIStatusError, match="the engine has ended"):
        send([begun(), delta("ab"), failure], stream=True)
    with pytest.raises(anthropic.InternalServerError) as caught:
        send([begun(), delta("ab"), failure])
    error: Any = caught.value.body
    assert (error["type"], error["error"]["type"]) == ("error", "overloaded_error")


def test_what_is_asked_reaches_the_engine() -> None:
    schema = {"type": "object", "properties": {}}
    _, pool = send(
        [begun(), ended()],
        system=[{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}],
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        output_config={"format": {"type": "json_schema", "schema": schema}},
        thinking={"type": "enabled", "budget_tokens": 1024},
        metadata={"user_id": "somebody"},
        extra_body={"temperature": 0.5, "top_p": 0.25, "top_k": 3},
    )
    (ask,) = pool.asks
    prompt = ask.prompt
    assert prompt.messages == [
        Turn(role="system", content="Be short."),
        Turn(role="user", content="hi"),
    ]
    function = {
        "name": "weather",
        "description": "Tells it.",
        "parameters": TOOL["input_schema"],
    }
    assert prompt.tools == [{"type": "function", "function": function}]
    assert prompt.must_call
    assert not prompt.parallel_tool_calls
    assert ask.params == {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 3,
        "max_new_tokens": 50,
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
    }


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, (["weather", "rain"], False)),
        ({"type": "any"}, (["weather", "rain"], True)),
        ({"type": "none"}, ([], False)),
        ({"type": "tool", "name": "rain"}, (["rain"], True)),
    ],
)
def test_the_choice_of_tools(choice: Any, expected: tuple[list[str], bool]) -> None:
    tools = [TOOL, {**TOOL, "name": "rain"}]
    _, pool = send([begun(), ended()], tools=tools, tool_choice=choice)
    prompt = pool.asks[0].prompt
    assert ([tool["function"]["name"] for tool in prompt.tools], prompt.must_call) == expected


def test_an_answer_can_be_sent_back() -> None:
    answer, _ = send(CALLS, tools=[TOOL])
    first, second = (block.id for block in answer.content[2:])
    image = {"type": "base64", "media_type": "image/png", "data": "AA=="}
    results = [
        {"type": "tool_result", "tool_use_id": first, "content": "no such city", "is_error": True},
        {
            "type": "tool_result",
            "tool_use_id": second,
            "content": [{"type": "text", "text": "noon"}, {"type": "image", "source": image}],
        },
        {"type": "text", "text": "And now?"},
    ]
    messages = [*HI, answer.to_param(), {"role": "user", "content": results}]
    _, pool = send([begun(), ended()], messages=messages)
    names: list[Any] = [("weather", {"city": "Beijing"}), ("time", {})]
    calls = tuple(
        {"id": number, "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in zip((first, second), names, strict=True)
    )
    url = "data:image/png;base64,AA=="
    assert pool.asks[0].prompt.messages == [
        Turn(role="user", content="hi"),
        Turn(role="assistant", content="I ask two.", reasoning="Let me see.", calls=calls),
        Turn(role="tool", call_id=first, content="Error: no such city"),
        Turn(role="tool", call_id=second, content="noon"),
        Turn(role="user", content="And now?", images=(url,)),
    ]


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content: "),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role: "),
        ({"messages": [{"role": "user", "content": [{"type": "search_result"}]}]},
         "the type 'search_result' is unknown"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]},
         "messages.0.content.0.text: "),
        ({"messages": [{"role": "user", "content": [
            {"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
         "a block of type tool_use isn't allowed in a message of role user"),
        ({"messages": [{"role": "assistant", "content": [
            {"type": "tool_result", "tool_use_id": "a"}]}]},
         "a block of type tool_result isn't allowed in a message of role assistant"),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0"),
        ({"tool_choice": {"type": "any"}}, "tool_choice is not in tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "needs a name"),
        ({"tools": [TOOL], "tool_choice": {"type": "auto", "name": "weather"}}, "has no name"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences: "),
        ({"stop_sequences": [""]}, "stop_sequences.0: "),
        ({"extra_body": {"temperature": 1.5}}, "temperature: "),
        ({"extra_body": {"mcp_servers": [{}]}}, "mcp_servers is not supported"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_wrong_is_named(request_: dict[str, Any], text: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        send(CALLS, **request_)
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert text in body["error"]["message"]


@pytest.mark.parametrize("key", ["correct horse", "wrong"])
def test_the_key_is_checked(key: str) -> None:
    app, _ = app_of(*CALLS, key="correct horse")

    async def ask() -> Any:
        async with transport(app) as http:
            client = AsyncAnthropic(base_url="http://test", api_key=key, http_client=http)
            return await client.messages.create(model=MODEL, max_tokens=5, messages=HI)

    if key == "wrong":
        with pytest.raises(anthropic.AuthenticationError) as caught:
            asyncio.run(ask())
        body: Any = caught.value.body
        assert (body["type"], body["error"]["type"]) == ("error", "authentication_error")
    else:
        assert asyncio.run(ask()).stop_reason == "tool_use"


def test_a_body_that_is_too_large_is_refused_in_the_form_of_its_path() -> None:
    with pytest.raises(anthropic.APIStatusError) as caught:
        send(CALLS, system="x" * MOST_BODY_BYTES)
    body: Any = caught.value.body
    assert caught.value.status_code == 413
    assert (body["type"], body["error"]["type"]) == ("error", "request_too_large")


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Anthropic]:
    with Anthropic(
        base_url=served.url, api_key="x", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


GREEDY: Any = {"temperature": 0}


def test_a_real_model_answers(served: Served, client: Anthropic) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="x") as other:
        chat = other.chat.completions.create(
            model=served.model, messages=HI, max_tokens=12, temperature=0
        )
    whole = client.messages.create(
        model=served.model, max_tokens=12, messages=HI, extra_body=GREEDY
    )
    (block,) = whole.content
    assert block.type == "text"
    assert block.text == chat.choices[0].message.content
    assert whole.stop_reason == "max_tokens"
    with client.messages.stream(
        model=served.model, max_tokens=12, messages=HI, extra_body=GREEDY
    ) as stream:
        assert "".join(stream.text_stream) == block.text
    stop = block.text[6:8]
    stopped = client.messages.create(
        model=served.model,
        max_tokens=12,
        messages=HI,
        stop_sequences=["never", stop],
        extra_body=GREEDY,
    )
    (short,) = stopped.content
    assert short.type == "text"
    assert short.text == block.text[: block.text.index(stop)]
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)


def test_tokens_are_counted(served: Served, client: Anthropic) -> None:
    request: Any = {"model": served.model, "messages": HI, "system": "Be short."}
    counted = client.messages.count_tokens(**request)
    answer = client.messages.create(max_tokens=1, **request)
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_too_long_is_refused(served: Served, client: Anthropic, stream: bool) -> None:
    long: Any = [{"role": "user", "content": "hi" * 100}]
    with pytest.raises(anthropic.BadRequestError, match="203 tokens"):
        client.messages.create(model=served.model, max_tokens=5, messages=long, stream=stream)


def test_events_come_in_their_order() -> None:
    events, _ = send(CALLS, tools=[TOOL], stream=True)
    start, more, stop = (f"content_block_{name}" for name in ("start", "delta", "stop"))
    assert [event.type for event in events] == [
        "message_start",
        *[start, more, more, more, stop],
        *[start, more, more, stop] * 2,
        *[start, more, stop],
        "message_delta",
        "message_stop",
    ]
    blocks = [event for event in events if event.type.startswith("content_block")]
    assert [event.index for event in blocks] == [0] * 5 + [1] * 4 + [2] * 4 + [3] * 3
    kinds = [event.delta.type for event in blocks if event.type == more]
    assert kinds[:3] == ["thinking_delta"] * 2 + ["signature_delta"]
    assert kinds[3:] == ["text_delta"] * 2 + ["input_json_delta"] * 3
    assert (events[0].message.content, events[0].message.stop_reason) == ([], None)
    assert events[0].message.usage.input_tokens == 7
    assert events[-2].delta.stop_reason == "tool_use"
    assert events[-2].usage.output_tokens == 9
