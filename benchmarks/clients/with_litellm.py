"""litellm's providers `openai`, `hosted_vllm`, `text-completion-openai` and `anthropic`."""

from __future__ import annotations

from typing import Any

import litellm
from checks import (
    AGENT,
    HI,
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

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
CHATS = ("openai", "hosted_vllm")
ALL = (*CHATS, "anthropic")


def asked(provider: str = "openai", url: str = LLAMA, **options: Any) -> dict[str, Any]:
    base = url if provider == "anthropic" else f"{url}/v1"
    return {"model": f"{provider}/{MODEL}", "api_base": base, "api_key": KEY, "messages": HI,
            "max_tokens": 60, "temperature": 0, "num_retries": 0, "max_retries": 0,
            **options}  # fmt: skip


def text_of(stream: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


@check
def chat_and_stream() -> None:
    for provider in ALL:
        answer = litellm.completion(**asked(provider, stop=["zz"], top_p=0.9, user="u"))
        assert answer.usage.completion_tokens == 60
        stream = litellm.completion(
            **asked(provider, stream=True, stream_options={"include_usage": True},
                    stop=["zz"], top_p=0.9)
        )  # fmt: skip
        assert text_of(stream) == answer.choices[0].message.content


@check
async def asynchronous() -> None:
    for provider in ALL:
        answer = await litellm.acompletion(**asked(provider))
        stream = await litellm.acompletion(**asked(provider, stream=True))
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(parts) == answer.choices[0].message.content


@check
def batches_n_logprobs() -> None:
    options = asked()
    answers = litellm.batch_completion(**{**options, "messages": [HI] * 4})
    assert len({answer.choices[0].message.content for answer in answers}) == 1
    for provider in CHATS:
        many = litellm.completion(
            **asked(provider, n=3, temperature=1, logprobs=True, top_logprobs=2, seed=1)
        )
        assert len(many.choices) == 3
        assert len(many.choices[2].logprobs.content) == 60


@check
def tools_required_and_named() -> None:
    named = {"type": "function", "function": {"name": "add"}}
    for provider in ALL:
        for choice in ("required", named):
            answer = litellm.completion(
                **asked(provider, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
            )
            (call,) = answer.choices[0].message.tool_calls
            assert call.function.name == "add"


@check
def tools_auto_in_rounds() -> None:
    for provider in ALL:
        messages: list[Any] = [*HI]
        for number in range(2):
            answer = litellm.completion(
                **asked(provider, AGENT, messages=messages, tools=TOOLS, tool_choice="auto")
            )
            message = answer.choices[0].message
            (call,) = message.tool_calls
            result = {"role": "tool", "tool_call_id": call.id, "content": str(add(number, 2))}
            messages += [message, result]
        answer = litellm.completion(**asked(provider, AGENT, messages=messages, tools=TOOLS))
        assert answer.choices[0].message.content == "It is ['3']."


@check
def structured_outputs() -> None:
    for provider in ALL:
        answer = litellm.completion(**asked(provider, response_format=Answer, max_tokens=300))
        Answer.model_validate_json(answer.choices[0].message.content)
    form = {"type": "json_object"}
    litellm.completion(**asked(response_format=form))


@check
def images() -> None:
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{IMAGE}"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "What?"}, part]}]
    for provider in ALL:
        answer = litellm.completion(**asked(provider, VISION, messages=messages, max_tokens=9))
        assert answer.usage.prompt_tokens > 10


@check
def thinking() -> None:
    for provider in ALL:
        answer = litellm.completion(**asked(provider, THINKER))
        assert answer.choices[0].message.reasoning_content
    for provider in CHATS:
        body = {"chat_template_kwargs": {"enable_thinking": False}}
        for options in ({"extra_body": body}, {"reasoning_effort": "none"}):
            options["allowed_openai_params"] = ["reasoning_effort"]
            answer = litellm.completion(**asked(provider, THINKER, **options))
            assert answer.choices[0].message.content
    for option in ({"type": "disabled"}, {"type": "enabled", "budget_tokens": 5}):
        options = {"thinking": option, "allowed_openai_params": ["thinking"]}
        answer = litellm.completion(**asked("anthropic", THINKER, **options))
        assert answer.choices[0].message.content


@check
def completions() -> None:
    settings = {"api_key": KEY, "api_base": f"{LLAMA}/v1", "max_tokens": 9, "temperature": 0}
    name = f"text-completion-openai/{MODEL}"
    answer = litellm.text_completion(model=name, prompt="Once", logprobs=2, echo=True, **settings)
    assert answer.choices[0].text.startswith("Once")
    answers = litellm.text_completion(model=name, prompt=["Once", "upon"], **settings)
    assert len(answers.choices) == 2


@check
def responses() -> None:
    options = {"model": f"openai/{MODEL}", "api_key": KEY, "api_base": f"{LLAMA}/v1"}
    answer = litellm.responses(**options, input="hi", max_output_tokens=60, temperature=0)
    assert answer.usage.output_tokens
    stream = litellm.responses(**options, input="hi", max_output_tokens=60, stream=True)
    assert [event.type for event in stream][-1] in ("response.incomplete", "response.completed")


@check
async def messages() -> None:
    for provider in ("anthropic", "openai"):
        options = asked(provider)
        del options["num_retries"], options["max_retries"], options["temperature"]
        answer = await litellm.anthropic.messages.acreate(**options)
        assert answer["content"]


@check
def errors() -> None:
    for provider in ALL:
        refused(lambda: litellm.completion(**asked(provider, api_key="w")), "key")  # noqa: B023
        model = f"{provider}/nobody"
        refused(lambda: litellm.completion(**asked(provider, model=model)), "there is no model")  # noqa: B023
        long = [{"role": "user", "content": "hi" * 2000}]
        refused(lambda: litellm.completion(**asked(provider, messages=long)), "tokens")  # noqa: B023
    refused(lambda: litellm.embedding(
        model=f"openai/{MODEL}", input=["hi"], api_base=f"{LLAMA}/v1", api_key=KEY, max_retries=0
    ), "Not Found")  # fmt: skip


main()
