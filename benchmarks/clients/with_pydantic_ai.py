"""pydantic-ai over chats, responses and messages."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

from anthropic import AsyncAnthropic
from checks import (
    AGENT,
    IMAGE,
    KEY,
    LLAMA,
    MODEL,
    THINKER,
    VISION,
    Answer,
    add,
    check,
    main,
    refused_later,
)
from openai import AsyncOpenAI
from pydantic_ai import Agent, BinaryContent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


def models(url: str = LLAMA, key: str = KEY, name: str = MODEL) -> Iterator[Any]:
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
        yield kind(name, provider=OpenAIProvider(openai_client=client))
    client = AsyncAnthropic(base_url=url, api_key=key, max_retries=0)
    yield AnthropicModel(name, provider=AnthropicProvider(anthropic_client=client))


def settings(**options: Any) -> Any:
    return {"max_tokens": 100, "temperature": 0, **options}


@check
async def chat_and_stream() -> None:
    for model in models():
        agent = Agent(model, instructions="Be brief.", model_settings=settings())
        result = await agent.run("hi")
        assert result.output
        assert result.usage.output_tokens == 100
        async with agent.run_stream("hi") as streamed:
            texts = [text async for text in streamed.stream_text(delta=True)]
        assert "".join(texts).strip() == result.output.strip()
        again = await agent.run("and?", message_history=result.all_messages())
        assert again.output


@check
async def stop_seed_and_penalties() -> None:
    for model in list(models())[:1]:
        agent = Agent(model, model_settings=settings(
            seed=1, stop_sequences=["zz"], presence_penalty=0.1, frequency_penalty=0.1, top_p=0.9,
            logit_bias={"65": 1}, parallel_tool_calls=False, openai_logprobs=True,
            openai_top_logprobs=2,
        ))  # fmt: skip
        assert (await agent.run("hi")).output


@check
async def structured_outputs() -> None:
    for model in models():
        for kind in (ToolOutput(Answer), NativeOutput(Answer, strict=True)):
            agent = Agent(model, output_type=kind, model_settings=settings(max_tokens=300))
            assert isinstance((await agent.run("hi")).output, Answer)


@check
async def tools_in_rounds() -> None:
    for model in models(AGENT):
        agent = Agent(model, tools=[add], model_settings=settings())
        assert (await agent.run("2 + 2?")).output == "It is ['3']."
        for kind in (ToolOutput(Answer), NativeOutput(Answer)):
            agent = Agent(model, tools=[add], output_type=kind, model_settings=settings())
            assert (await agent.run("2 + 2?")).output == Answer(is_it=True, other=False)
            async with agent.run_stream("2 + 2?") as streamed:
                assert await streamed.get_output() == Answer(is_it=True, other=False)


@check
async def images() -> None:
    image = BinaryContent(base64.b64decode(IMAGE), media_type="image/png")
    for model in models(VISION):
        result = await Agent(model, model_settings=settings(max_tokens=9)).run(["What?", image])
        assert result.usage.input_tokens > 10


@check
async def thinking() -> None:
    off = ({"openai_reasoning_effort": "none"}, {"openai_reasoning_effort": "none"},
           {"anthropic_thinking": {"type": "disabled"}})  # fmt: skip
    for model, options in zip(models(THINKER), off, strict=True):
        agent = Agent(model, model_settings=settings(**options))
        assert (await agent.run("hi")).output
    for model in models(THINKER):
        agent = Agent(model, model_settings=settings(extra_body={"thinking_token_budget": 5}))
        result = await agent.run("hi")
        assert result.output
        parts = [part.part_kind for part in result.new_messages()[-1].parts]
        assert parts == ["thinking", "text"]
        assert (await agent.run("and?", message_history=result.all_messages())).output


@check
async def errors() -> None:
    for options, question, part in (
        ({"key": "wrong"}, "hi", "401"),
        ({"name": "gpt-5"}, "hi", "404"),
        ({}, "hi" * 2000, "tokens"),
    ):
        for model in models(**options):
            await refused_later(Agent(model, model_settings=settings()).run(question), part)


main()
