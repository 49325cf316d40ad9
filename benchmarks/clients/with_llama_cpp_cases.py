"""What llama.cpp's tests of its server ask through OpenAI's and Anthropic's clients.

The cases follow those of tools/server/tests/unit in ggml-org/llama.cpp that hold for any server.
"""

from __future__ import annotations

from typing import Any

import httpx
from anthropic import Anthropic
from checks import AGENT, KEY, LLAMA, MODEL, check, main
from openai import OpenAI

MESSAGES: Any = [
    {"role": "system", "content": "Book"},
    {"role": "user", "content": "What is the best book"},
]
TEXT = "I believe the meaning of life is"
CLIENT = OpenAI(base_url=f"{LLAMA}/v1", api_key=KEY, max_retries=0)


def post(path: str, **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {KEY}"}
    return httpx.post(f"{LLAMA}{path}", json=body, headers=headers, timeout=120)


@check
def chat_completion() -> None:
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "the best book"}]
    for content in ("Hey", parts):
        asked: Any = [MESSAGES[0], {"role": "user", "content": content}]
        answer = CLIENT.chat.completions.create(
            model=MODEL, messages=asked, max_tokens=8, seed=42, temperature=0.8
        )
        assert "cmpl" in answer.id
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 8
        assert answer.choices[0].finish_reason == "length"


@check
def chat_completion_stream() -> None:
    ids, text, roles = set(), "", 0
    for chunk in CLIENT.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=8, stream=True
    ):
        (choice,) = chunk.choices
        ids.add(chunk.id)
        roles += choice.delta.role is not None
        if choice.finish_reason is None:
            text += choice.delta.content or ""
        else:
            assert choice.delta.content is None
            assert choice.finish_reason == "length"
    assert (len(ids), roles) == (1, 1)
    assert text


@check
def logprobs() -> None:
    asked: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 5, "temperature": 0}
    asked |= {"logprobs": True, "top_logprobs": 10}
    whole = CLIENT.chat.completions.create(**asked).choices[0]
    streamed = [
        token
        for chunk in CLIENT.chat.completions.create(stream=True, **asked)
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content or ()
    ]
    assert whole.logprobs is not None
    assert [t.token for t in streamed] == [t.token for t in whole.logprobs.content or ()]
    for token in streamed:
        assert token.logprob <= 0
        assert token.bytes is not None
        assert len(token.top_logprobs) == 10


@check
def response_formats() -> None:
    for form, is_valid in (
        ({"type": "json_schema", "json_schema": {"schema": {"const": "foooooo"}}}, True),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "42"}}}, True),
        ({"type": "json_object"}, True),
        ({"type": "sound"}, False),
        ({"type": "json_schema"}, False),
        ({"type": "json_schema", "json_schema": {"schema": {"type": "hiccup"}}}, False),
    ):
        answer = post(
            "/v1/chat/completions", messages=MESSAGES, response_format=form, max_tokens=20
        )
        assert (answer.status_code == 200) == is_valid, (form, answer.text)
        if "foo" in str(form):
            assert answer.json()["choices"][0]["message"]["content"] == '"foooooo"'


@check
def invalid_messages() -> None:
    for messages in (
        None, "string", [123], [{}], [{"role": 123}], [{"role": "system", "content": 123}],
        [{"role": "system", "content": "test"}, {}],
        [MESSAGES[1], {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "a"}],
    ):  # fmt: skip
        answer = post("/v1/chat/completions", messages=messages)
        assert answer.status_code == 400, (messages, answer.text)
        assert answer.json()["error"]["message"]


@check
def logit_bias_excludes_tokens() -> None:
    tokens = post("/tokenize", prompt="aeiou").json()["tokens"]
    answer = CLIENT.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=64,
        logit_bias={str(token): -100 for token in tokens},
    )  # fmt: skip
    assert not set(answer.choices[0].message.content or "") & set("aeiou")


@check
def completions() -> None:
    asked: Any = {"model": MODEL, "prompt": TEXT, "max_tokens": 8}
    answer = CLIENT.completions.create(**asked)
    assert answer.choices[0].finish_reason == "length"
    text = "".join(
        chunk.choices[0].text
        for chunk in CLIENT.completions.create(**asked, stream=True)
        if chunk.choices[0].finish_reason is None
    )
    assert text == answer.choices[0].text
    stops = CLIENT.completions.create(**asked, stop=["User:\n", "Assistant:\n"], stream=True)
    assert "".join(chunk.choices[0].text for chunk in stops) == text


@check
def seeds() -> None:
    def ask(seed: int, temperature: float) -> str:
        return CLIENT.completions.create(
            model=MODEL, prompt=TEXT, max_tokens=20, seed=seed, temperature=temperature
        ).choices[0].text  # fmt: skip

    assert len({ask(42, 0) for _ in range(4)}) == 1
    assert len({ask(42, 1) for _ in range(3)}) == 1
    assert len({ask(seed, 1) for seed in range(4)}) == 4


@check
def too_long_a_prompt() -> None:
    assert post("/v1/completions", prompt=TEXT * 100).status_code == 400


@check
def tokens_as_prompts() -> None:
    tokens = post("/tokenize", prompt=TEXT).json()["tokens"]
    asked: Any = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    texts = [
        choice.text
        for prompt in (tokens, [tokens, tokens], TEXT)
        for choice in CLIENT.completions.create(prompt=prompt, **asked).choices
    ]
    assert len(texts) == 4
    assert len({*texts}) == 1
    assert post("/detokenize", tokens=tokens).json()["prompt"] == TEXT


@check
def responses() -> None:
    asked: Any = {"model": MODEL, "input": MESSAGES, "max_output_tokens": 8, "temperature": 0.8}
    answer = CLIENT.responses.create(**asked)
    assert answer.id.startswith("resp_")
    assert (answer.output[0].id or "").startswith("msg_")
    ids, texts = set(), ""
    for event in CLIENT.responses.create(**asked, stream=True):
        if event.type in ("response.created", "response.in_progress"):
            assert event.response.id.startswith("resp_")
        elif event.type == "response.output_item.added":
            ids.add(event.item.id)
        elif event.type == "response.output_text.delta":
            ids.add(event.item_id)
            texts += event.delta
        elif event.type == "response.incomplete":
            assert event.response.output_text == texts
    assert len(ids) == 1


@check
def formats_of_responses() -> None:
    for form, is_valid in (
        ({"type": "json_schema", "name": "test", "schema": {"const": "foooooo"}}, True),
        ({"type": "json_object"}, True),
        ({"type": "text"}, True),
        ({"type": "json_schema", "name": "test"}, False),
    ):
        answer = post("/v1/responses", input="Write", text={"format": form}, max_output_tokens=20)
        assert (answer.status_code == 200) == is_valid, answer.text


@check
def tool_results_without_offered_tools() -> None:
    for result in ("Sunny, 25°C", [{"type": "text", "text": "Sunny"}], "", None):
        message = Anthropic(base_url=LLAMA, api_key=KEY).messages.create(
            model=MODEL, max_tokens=50,
            messages=[
                {"role": "user", "content": "What's the weather?"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "test123",
                 "name": "get_weather", "input": {"location": "Paris"}}]},
                {"role": "user", "content": [{"type": "text", "text": "Here:"}, {
                 "type": "tool_result", "tool_use_id": "test123", "content": result,
                 "is_error": True}]},
            ],
        )  # fmt: skip
        assert message.content


@check
def required_tools() -> None:
    for name, key, value in (("test", "success", True), ("ipython", "code", "1")):
        parameters = {"type": "object", "properties": {key: {"const": value}}, "required": [key]}
        parameters["additionalProperties"] = False
        tool: Any = {"type": "function", "function": {"name": name, "parameters": parameters}}
        for stream in (False, True):
            asked: Any = {"model": MODEL, "messages": MESSAGES, "tools": [tool], "max_tokens": 256}
            asked |= {"tool_choice": "required", "temperature": 0, "parallel_tool_calls": False}
            if stream:
                with CLIENT.chat.completions.stream(**asked) as events:
                    message: Any = events.get_final_completion().choices[0].message
            else:
                message = CLIENT.chat.completions.create(**asked).choices[0].message
            assert [call.function.name for call in message.tool_calls] == [name]
            assert not message.content
            assert message.tool_calls[0].id


@check
def tools_that_are_not_called() -> None:
    tool: Any = {"type": "function", "function": {"name": "test", "parameters": {"type": "object"}}}
    for choice in ("none", "auto"):
        answer = CLIENT.chat.completions.create(
            model=MODEL, messages=MESSAGES, tools=[tool], tool_choice=choice, max_tokens=20
        )
        assert not answer.choices[0].message.tool_calls
    agent = OpenAI(base_url=f"{AGENT}/v1", api_key=KEY)
    assert agent.chat.completions.create(model=MODEL, messages=MESSAGES).choices[0].message.content


@check
def keys() -> None:
    for key in ("", "wrong"):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        answer = httpx.post(f"{LLAMA}/v1/completions", json={"prompt": "a"}, headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "authentication_error"
    for path in ("/health", "/v1/models"):
        allowed = httpx.get(f"{LLAMA}{path}", headers={"Authorization": f"Bearer {KEY}"})
        assert allowed.status_code == 200


main()
