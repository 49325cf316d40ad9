"""OpenAI's agents SDK, over chats and over responses."""

from __future__ import annotations

from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
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
from openai.types.shared import Reasoning

set_tracing_disabled(True)
ADD = function_tool(add)
LONG = {"max_tokens": 200}


@function_tool
def choose(is_it: bool) -> str:
    """Choose."""
    return str(is_it)


KINDS = (OpenAIChatCompletionsModel, OpenAIResponsesModel)


def agents(
    url: str = LLAMA, key: str = KEY, settings: Any = None, kinds: Any = KINDS, **options: Any
) -> Any:
    """An agent over each API.

    The SDK takes a response that a limit of tokens has ended for an error, so that texts of the
    random models are of chats only.
    """
    chosen = ModelSettings(**{"max_tokens": 60, "temperature": 0, **(settings or {})})
    for kind in kinds:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
        model = kind(model=MODEL, openai_client=client)
        yield Agent(**{"name": "a", "instructions": "Be brief.", "model": model,
                       "model_settings": chosen, **options})  # fmt: skip


@check
async def chat_and_stream() -> None:
    for agent in agents(kinds=KINDS[:1]):
        result = await Runner.run(agent, "hi")
        assert result.context_wrapper.usage.output_tokens == 60
    for agent in (*agents(AGENT), *agents(kinds=KINDS[:1])):
        result = await Runner.run(agent, "hi")
        streamed = Runner.run_streamed(agent, "hi")
        events = [event async for event in streamed.stream_events()]
        assert len(events) > 5
        assert streamed.final_output == result.final_output


@check
async def settings() -> None:
    further = {
        "top_p": 0.9, "parallel_tool_calls": False, "metadata": {"a": "b"}, "store": False,
        "include_usage": True, "verbosity": "low", "top_logprobs": 2,
        "prompt_cache_retention": "24h", "extra_body": {"chat_template_kwargs": {}},
    }  # fmt: skip
    for agent in (
        *agents(settings=further, tools=[ADD], kinds=KINDS[:1]),
        *agents(AGENT, settings=further, tools=[ADD]),
    ):
        assert (await Runner.run(agent, "hi")).final_output


@check
async def tools_required_and_named() -> None:
    for choice in ("required", "choose"):
        for agent in agents(
            settings={"tool_choice": choice, "max_tokens": 200}, tools=[choose],
            tool_use_behavior="stop_on_first_tool",
        ):  # fmt: skip
            assert (await Runner.run(agent, "hi")).final_output


@check
async def tools_auto_in_rounds() -> None:
    for agent in agents(AGENT, tools=[ADD]):
        result = await Runner.run(agent, "2 + 2?")
        assert result.final_output == "It is ['3']."
        again = await Runner.run(agent, [*result.to_input_list(), {"role": "user", "content": "?"}])
        assert again.final_output == "It is ['3']."
        streamed = Runner.run_streamed(agent, "2 + 2?")
        async for _ in streamed.stream_events():
            pass
        assert streamed.final_output == "It is ['3']."
        session = SQLiteSession("a")
        for question in ("2 + 2?", "and?"):
            result = await Runner.run(agent, question, session=session)
        assert result.final_output == "It is ['3']."


@check
async def structured_outputs() -> None:
    for agent in agents(output_type=Answer, settings=LONG):
        assert isinstance((await Runner.run(agent, "hi")).final_output, Answer)
    for agent in agents(AGENT, output_type=Answer, tools=[ADD]):
        result = await Runner.run(agent, "2 + 2?")
        assert result.final_output == Answer(is_it=True, other=False)


@check
async def handoffs() -> None:
    for other, agent in zip(agents(), agents(), strict=True):
        agent.handoffs = [other.clone(name="other")]
        agent.model_settings = ModelSettings(tool_choice="required", max_tokens=200, temperature=0)
        assert (await Runner.run(agent, "hi")).last_agent.name == "other"


@check
async def images() -> None:
    part = {"type": "input_image", "image_url": f"data:image/png;base64,{IMAGE}", "detail": "auto"}
    content = [{"type": "input_text", "text": "What?"}, part]
    for agent in agents(VISION, settings={"max_tokens": 9}, kinds=KINDS[:1]):
        result = await Runner.run(agent, [{"role": "user", "content": content}])
        assert result.context_wrapper.usage.input_tokens > 10


@check
async def thinking() -> None:
    off = {"reasoning": Reasoning(effort="none", summary="auto")}
    for agent in agents(THINKER, settings=off, kinds=KINDS[:1]):
        assert (await Runner.run(agent, "hi")).final_output
    for agent in agents(THINKER, settings=off | LONG, output_type=Answer):
        assert isinstance((await Runner.run(agent, "hi")).final_output, Answer)


@check
async def errors() -> None:
    for agent in agents(key="wrong"):
        await refused_later(Runner.run(agent, "hi"), "invalid_api_key")
    for agent in agents():
        await refused_later(Runner.run(agent, "hi" * 2000), "context_length_exceeded")
        agent.model.model = "gpt-5"
        await refused_later(Runner.run(agent, "hi"), "model_not_found")


main()
