"""LangChain's ChatAnthropic, and its agents."""

from __future__ import annotations

from typing import Any

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
    refused,
)
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool

ADD = tool(add)


def model(url: str = LLAMA, **options: Any) -> ChatAnthropic:
    settings: dict[str, Any] = {"model": MODEL, "api_key": KEY, "max_retries": 0, "max_tokens": 60}
    return ChatAnthropic(base_url=url, **{**settings, **options})


@check
def chat() -> None:
    answer = model(temperature=0, top_k=5, top_p=0.9).invoke(
        [SystemMessage([{"type": "text", "text": "Be brief.",
                         "cache_control": {"type": "ephemeral"}}]), HumanMessage("hi")]
    )  # fmt: skip
    assert answer.usage_metadata["output_tokens"] == 60
    assert answer.response_metadata["stop_reason"] == "max_tokens"


@check
async def streams() -> None:
    whole = model().invoke("hi").content
    assert "".join(chunk.text for chunk in model().stream("hi")) == whole
    assert "".join([chunk.text async for chunk in model().astream("hi")]) == whole
    assert [a.content for a in await model().abatch(["hi"] * 3)] == [whole] * 3


@check
def stop() -> None:
    whole = model().invoke("hi").content
    answer = model(stop_sequences=[whole[5:7]]).invoke("hi")
    assert answer.content == whole[: whole.find(whole[5:7])].strip()
    assert answer.response_metadata["stop_reason"] == "stop_sequence"


@check
def tools_required_and_named() -> None:
    for choice in ("any", "add", {"type": "tool", "name": "add"}):
        bound = model().bind_tools([ADD], tool_choice=choice, parallel_tool_calls=False)
        assert [call["name"] for call in bound.invoke("hi").tool_calls] == ["add"]


@check
def tools_auto_in_rounds() -> None:
    for options in (
        {},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1500},
    ):
        bound, messages = model(AGENT, **options).bind_tools([ADD]), [HumanMessage("2 + 2?")]
        for _ in range(2):
            answer = bound.invoke(messages)
            (call,) = answer.tool_calls
            messages += [answer, ADD.invoke(call)]
        assert bound.invoke(messages).text == "It is ['3']."


@check
def structured_outputs() -> None:
    for method in ("json_schema", "function_calling"):
        structured = model(max_tokens=200).with_structured_output(Answer, method=method)
        assert isinstance(structured.invoke("hi"), Answer)


@check
def agents() -> None:
    for strategy in (ProviderStrategy(Answer), ToolStrategy(Answer)):
        agent = create_agent(model(AGENT), [ADD], response_format=strategy)
        state = agent.invoke({"messages": [HumanMessage("2 + 2?")]})
        assert state["structured_response"] == Answer(is_it=True, other=False)


@check
def images() -> None:
    for part in (
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{IMAGE}"}},
        {"type": "image", "base64": IMAGE, "mime_type": "image/png"},
    ):
        message = HumanMessage([{"type": "text", "text": "What?"}, part])
        assert model(VISION, max_tokens=9).invoke([message]).usage_metadata["input_tokens"] > 10


@check
def thinking() -> None:
    (block,) = model(THINKER).invoke("hi").content
    assert block["type"] == "thinking"
    answer = model(THINKER, thinking={"type": "disabled"}).invoke("hi")
    assert isinstance(answer.content, str)
    blocks = model(THINKER, thinking={"type": "enabled", "budget_tokens": 5}).invoke("hi").content
    assert [block["type"] for block in blocks] == ["thinking", "text"]
    answer = model(THINKER, thinking={"type": "adaptive"}, effort="low").invoke("hi")
    assert answer.content[0]["type"] == "thinking"


@check
def counts() -> None:
    assert model().get_num_tokens_from_messages([HumanMessage("hi")], tools=[ADD]) > 2


@check
def errors() -> None:
    refused(lambda: model(api_key="wrong").invoke("hi"), "authentication_error")
    refused(lambda: model(model="claude").invoke("hi"), "not_found_error", MODEL)
    refused(lambda: model().invoke("hi" * 2000), "invalid_request_error", "tokens")


main()
