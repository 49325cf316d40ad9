"""LangChain's ChatOpenAI, over chats and over responses, and its agents."""

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
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

ADD = tool(add)


def model(url: str = LLAMA, **options: Any) -> ChatOpenAI:
    settings: dict[str, Any] = {"model": MODEL, "api_key": KEY, "max_retries": 0, "max_tokens": 60}
    settings |= {"base_url": f"{url}/v1", "temperature": 0}
    return ChatOpenAI(**{**settings, **options})


@check
def chat() -> None:
    answer = model(seed=1, top_p=0.9, presence_penalty=0.1, logit_bias={65: 1}).invoke(
        [SystemMessage("Be brief."), HumanMessage("hi", name="Ann")]
    )
    assert answer.usage_metadata["output_tokens"] == 60
    assert answer.response_metadata["finish_reason"] == "length"
    assert answer.content


@check
def stream() -> None:
    chunks = list(model(stream_usage=True).stream("hi"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.content == model().invoke("hi").content
    assert whole.usage_metadata["output_tokens"] == 60


@check
async def asynchronous() -> None:
    answer = await model().ainvoke("hi")
    streamed = [chunk.content async for chunk in model().astream("hi")]
    assert "".join(streamed) == answer.content
    assert [a.content for a in await model().abatch(["hi", "hi"])] == [answer.content] * 2


@check
def batch() -> None:
    texts = [f"question {number}" for number in range(6)]
    answers = model().batch(texts)
    assert [a.content for a in answers] == [model().invoke(text).content for text in texts]


@check
def stop_n_logprobs() -> None:
    whole = model().invoke("hi").content
    assert model(stop=[whole[5:7]]).invoke("hi").content == whole[: whole.find(whole[5:7])].strip()
    many = model(n=3, temperature=1).generate([[HumanMessage("hi")]])
    assert len({generation.text for generation in many.generations[0]}) == 3
    told = model(logprobs=True, top_logprobs=2).invoke("hi").response_metadata["logprobs"]
    assert len(told["content"]) == 60


@check
def tools_required_and_named() -> None:
    for choice in ("any", "required", "add", True):
        bound = model().bind_tools([ADD], tool_choice=choice, parallel_tool_calls=False)
        answer = bound.invoke("hi")
        assert [call["name"] for call in answer.tool_calls or answer.invalid_tool_calls] == ["add"]
    assert not model().bind_tools([ADD], tool_choice="none").invoke("hi").tool_calls


def rounds(**options: Any) -> None:
    bound, messages = model(AGENT, **options).bind_tools([ADD]), [HumanMessage("2 + 2?")]
    for _ in range(2):
        answer = bound.invoke(messages)
        (call,) = answer.tool_calls
        messages += [answer, ADD.invoke(call)]
        assert isinstance(messages[-1], ToolMessage)
    assert bound.invoke(messages).text == "It is ['3']."


@check
def tools_auto_in_rounds() -> None:
    rounds()


@check
def structured_outputs() -> None:
    for method in ("json_schema", "function_calling"):
        for strict in (None, True):
            answer = model(max_tokens=200).with_structured_output(
                Answer, method=method, strict=strict
            )
            assert isinstance(answer.invoke("hi"), Answer)
    schema = Answer.model_json_schema()
    raw = model(max_tokens=200).with_structured_output(schema, include_raw=True).invoke("hi")
    assert raw["parsed"].keys() == {"is_it", "other"}
    streamed = list(model(max_tokens=200).with_structured_output(Answer).stream("hi"))
    assert isinstance(streamed[-1], Answer)


@check
def agents() -> None:
    agent = create_agent(model(AGENT), [ADD], system_prompt="Add.")
    state = agent.invoke({"messages": [HumanMessage("2 + 2?")]})
    assert state["messages"][-1].text == "It is ['3']."
    for strategy in (ProviderStrategy(Answer), ToolStrategy(Answer)):
        agent = create_agent(model(AGENT), [ADD], response_format=strategy)
        state = agent.invoke({"messages": [HumanMessage("2 + 2?")]})
        assert state["structured_response"] == Answer(is_it=True, other=False)
    agent = create_agent(model(max_tokens=200), response_format=ProviderStrategy(Answer))
    state = agent.invoke({"messages": [HumanMessage("hi")]})
    assert isinstance(state["structured_response"], Answer)


@check
def responses() -> None:
    options: dict[str, Any] = {"use_responses_api": True, "output_version": "responses/v1"}
    answer = model(**options).invoke([SystemMessage("Be brief."), HumanMessage("hi")])
    assert answer.usage_metadata["output_tokens"] == 60
    assert "".join(chunk.text for chunk in model(**options).stream("hi"))
    long = model(**options, max_tokens=200)
    assert isinstance(long.with_structured_output(Answer).invoke("hi"), Answer)
    bound = model(**options).bind_tools([ADD], tool_choice="any")
    assert (bound.invoke("hi").tool_calls or bound.invoke("hi").invalid_tool_calls)[0][
        "name"
    ] == "add"
    rounds(**options)
    rounds(**options, include=["reasoning.encrypted_content"], reasoning={"summary": "auto"})


@check
def images() -> None:
    for part in (
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{IMAGE}"}},
        {"type": "image", "base64": IMAGE, "mime_type": "image/png"},
    ):
        message = HumanMessage([{"type": "text", "text": "What?"}, part])
        for use_responses_api in (False, True):
            seeing = model(VISION, max_tokens=9, use_responses_api=use_responses_api)
            assert seeing.invoke([message]).usage_metadata["input_tokens"] > 10
    refused(lambda: model().invoke([message]), "takes no images")


@check
def thinking() -> None:
    # ChatOpenAI drops `reasoning_content`, so that only the answer is seen.
    assert not model(THINKER).invoke("hi").text
    for options in (
        {"reasoning_effort": "none"},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        {"extra_body": {"thinking_token_budget": 5}},
        {"reasoning": {"effort": "none"}},
    ):
        assert model(THINKER, **options).invoke("hi").text


@check
def errors() -> None:
    refused(lambda: model(api_key="wrong").invoke("hi"), "invalid_api_key")
    refused(lambda: model(model="gpt-5").invoke("hi"), "model_not_found", MODEL)
    refused(lambda: model().invoke("hi" * 2000), "context_length_exceeded")
    refused(lambda: OpenAIEmbeddings(
        base_url=f"{LLAMA}/v1", api_key=KEY, check_embedding_ctx_length=False, max_retries=0
    ).embed_query("hi"), "404")  # fmt: skip


@check
def completions() -> None:
    completer = OpenAI(
        base_url=f"{LLAMA}/v1", api_key=KEY, model=MODEL, max_tokens=9, temperature=0, max_retries=0
    )
    answer = completer.invoke("Once upon")
    assert "".join(completer.stream("Once upon")) == answer
    assert completer.batch(["Once upon"] * 3) == [answer] * 3


main()
