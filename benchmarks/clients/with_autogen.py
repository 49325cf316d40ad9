"""AutoGen's OpenAIChatCompletionClient, its agents and teams."""

from __future__ import annotations

import asyncio
import base64
import io
from typing import Any

import autogen_core
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.messages import MultiModalMessage
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core.models import SystemMessage, UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
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
from PIL import Image

ADD = FunctionTool(add, "Add two numbers.", name="add")
STRICT = FunctionTool(add, "Add two numbers.", name="add", strict=True)
HI = [SystemMessage(content="Be brief."), UserMessage(content="hi", source="Ann")]


def client(url: str = LLAMA, **options: Any) -> OpenAIChatCompletionClient:
    info = dict.fromkeys(("vision", "function_calling", "json_output", "structured_output"), True)
    return OpenAIChatCompletionClient(
        base_url=f"{url}/v1",
        **{"model": MODEL, "api_key": KEY, "max_retries": 0, "max_tokens": 60, "temperature": 0,
           "model_info": {**info, "family": "unknown", "multiple_system_messages": True},
           **options},
    )  # fmt: skip


@check
async def chat_and_stream() -> None:
    answer = await client().create(HI)
    assert answer.usage.completion_tokens == 60
    parts = [part async for part in client().create_stream(HI)]
    assert "".join(part for part in parts if isinstance(part, str)) == answer.content
    assert parts[-1].usage.completion_tokens == 60 or not parts[-1].usage.completion_tokens
    parts = [
        part
        async for part in client(include_name_in_message=True).create_stream(HI, include_usage=True)
    ]
    assert parts[-1].usage.completion_tokens == 60


@check
async def stop_logprobs() -> None:
    answer = await client(logprobs=True, top_logprobs=2, stop=["zz"], seed=3).create(HI)
    assert len(answer.logprobs) == 60


@check
async def tools_required_and_named() -> None:
    for tool, choice in ((ADD, "required"), (ADD, ADD), (STRICT, STRICT)):
        answer = await client().create(HI, tools=[tool], tool_choice=choice)
        assert not isinstance(answer.content, str)
        assert {call.name for call in answer.content} == {"add"}
    assert isinstance((await client().create(HI, tools=[ADD], tool_choice="none")).content, str)


@check
async def structured_outputs() -> None:
    answer = await client(max_tokens=200).create(HI, json_output=Answer)
    Answer.model_validate_json(answer.content)
    await client().create(HI, json_output=True)
    agent = AssistantAgent("a", client(max_tokens=200), output_content_type=Answer)
    result = await agent.run(task="hi")
    assert isinstance(result.messages[-1].content, Answer)


@check
async def agents() -> None:
    for options in ({}, {"reflect_on_tool_use": True}, {"model_client_stream": True}):
        agent = AssistantAgent("a", client(AGENT), tools=[ADD], max_tool_iterations=5, **options)
        result = await agent.run(task="2 + 2?")
        assert result.messages[-1].content == "It is ['3']."
    agent = AssistantAgent(
        "a", client(AGENT), tools=[STRICT], max_tool_iterations=5, output_content_type=Answer
    )
    result = await agent.run(task="2 + 2?")
    assert result.messages[-1].content == Answer(is_it=True, other=False)


@check
async def teams() -> None:
    members = [AssistantAgent(name, client(max_tokens=5)) for name in ("a", "b")]
    team = RoundRobinGroupChat(members, termination_condition=MaxMessageTermination(4))
    result = await team.run(task="hi")
    assert [message.source for message in result.messages] == ["user", "a", "b", "a"]


@check
async def images() -> None:
    picture = autogen_core.Image(Image.open(io.BytesIO(base64.b64decode(IMAGE))))
    agent = AssistantAgent("a", client(VISION, max_tokens=9))
    result = await agent.run(task=MultiModalMessage(content=["What?", picture], source="user"))
    assert result.messages[-1].models_usage.prompt_tokens > 10


@check
async def thinking() -> None:
    answer = await client(THINKER).create(HI)
    assert answer.thought
    body = {"chat_template_kwargs": {"enable_thinking": False}}
    answer = await client(THINKER).create(HI, extra_create_args={"extra_body": body})
    assert answer.content
    assert not answer.thought


@check
async def cancellation_and_errors() -> None:
    token = autogen_core.CancellationToken()
    task = asyncio.ensure_future(client(max_tokens=1900).create(HI, cancellation_token=token))
    await asyncio.sleep(0.3)
    token.cancel()
    await refused_later(task)
    await refused_later(client(api_key="wrong").create(HI), "invalid_api_key")
    await refused_later(client(model="gpt-5").create(HI), "model_not_found")
    long = [UserMessage(content="hi" * 2000, source="a")]
    await refused_later(client().create(long), "context_length")


main()
