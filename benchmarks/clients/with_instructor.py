"""instructor, in its modes for OpenAI's and Anthropic's clients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import anthropic
import instructor
import openai
from checks import HI, KEY, LLAMA, MODEL, THINKER, Answer, check, main, refused
from instructor import Mode

OPENAI = {"base_url": f"{LLAMA}/v1", "api_key": KEY, "max_retries": 0}
ASK: dict[str, Any] = {"model": MODEL, "messages": HI, "response_model": Answer, "max_retries": 0}
CHAT = {**ASK, "temperature": 0, "max_tokens": 300}


@check
def modes_of_openai() -> None:
    for mode in (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON, Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(**OPENAI), mode=mode)
        if mode != Mode.JSON:  # which only asks for JSON, of whatever schema
            assert isinstance(client.chat.completions.create(**CHAT), Answer)
            answer, raw = client.chat.completions.create_with_completion(**CHAT)
            assert raw.usage.completion_tokens
            assert isinstance(answer, Answer)
        else:
            refused(lambda: client.chat.completions.create(**CHAT))  # noqa: B023


@check
def modes_of_responses() -> None:
    client = instructor.from_openai(openai.OpenAI(**OPENAI), mode=Mode.RESPONSES_TOOLS)
    asked = {"model": MODEL, "input": "hi", "response_model": Answer, "max_output_tokens": 300}
    assert isinstance(client.responses.create(**asked, temperature=0, max_retries=0), Answer)


@check
def several_tools() -> None:
    client = instructor.from_openai(openai.OpenAI(**OPENAI), mode=Mode.PARALLEL_TOOLS)
    asked = {**CHAT, "response_model": Iterable[Answer | Other]}
    with contextlib.suppress(TypeError):  # tool_choice is auto, and the model calls none
        list(client.chat.completions.create(**asked))


class Other(Answer):
    """Another tool."""


@check
def partial_and_iterable_streams() -> None:
    client = instructor.from_openai(openai.OpenAI(**OPENAI), mode=Mode.TOOLS)
    parts = list(client.chat.completions.create_partial(**CHAT))
    assert isinstance(parts[-1].is_it, bool)


@check
async def asynchronous() -> None:
    client = instructor.from_openai(openai.AsyncOpenAI(**OPENAI), mode=Mode.TOOLS)
    assert isinstance(await client.chat.completions.create(**CHAT), Answer)


@check
def modes_of_anthropic() -> None:
    client = anthropic.Anthropic(base_url=LLAMA, api_key=KEY, max_retries=0)
    for mode in (Mode.ANTHROPIC_TOOLS, Mode.TOOLS):
        asked = {**ASK, "max_tokens": 300}
        tools = instructor.from_anthropic(client, mode=mode)
        assert isinstance(tools.messages.create(**asked), Answer)


@check
def from_provider() -> None:
    client = instructor.from_provider(f"openai/{MODEL}", base_url=f"{LLAMA}/v1", api_key=KEY)
    asked = {name: value for name, value in CHAT.items() if name != "model"}
    assert isinstance(client.chat.completions.create(**asked), Answer)


@check
def retries_send_the_refused_call_back() -> None:
    client = instructor.from_openai(openai.OpenAI(**OPENAI), mode=Mode.TOOLS)

    class Never(Answer):
        def model_post_init(self, _: Any) -> None:
            raise ValueError("never")

    asked = {**CHAT, "response_model": Never, "max_retries": 2}
    refused(lambda: client.chat.completions.create(**asked), "never")


@check
def a_thinking_model() -> None:
    options = {**OPENAI, "base_url": f"{THINKER}/v1"}
    for mode in (Mode.TOOLS, Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(**options), mode=mode)
        assert isinstance(client.chat.completions.create(**CHAT), Answer)


main()
