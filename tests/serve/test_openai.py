"""Chats and completions: OpenAI's official client takes everything, and it is the engine's answer.

The client validates strictly; what the server answers is held against `duoka.Engine` in this
process, which has a plan of its own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai import OpenAI
from openai.types import Completion
from served import Served
from tuning import make_tokenizer

import duoka
from duoka.engine import Completion as EngineCompletion
from duoka.engine import Engine, Grammar, SamplingParams
from duoka.models.text.messages import ChatMessage

HI: Any = [{"role": "user", "content": "hi"}]
TEXT = "Once upon"
SCHEMA = {
    "type": "object",
    "properties": {"is_it": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
    "required": ["is_it", "kind"],
    "additionalProperties": False,
}
# What is asked, in OpenAI's words and in the engine's.
PARAMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0}, {}),
    ({"temperature": 1.5, "seed": 3}, {"temperature": 1.5, "seed": 3}),
    ({"temperature": 1, "seed": -1}, {"temperature": 1.0, "seed": 2**63 - 1}),
    ({"temperature": 1, "top_p": 0.5, "seed": 3}, {"temperature": 1.0, "top_p": 0.5, "seed": 3}),
    ({"temperature": 0, "presence_penalty": 2}, {"presence_penalty": 2.0}),
    ({"temperature": 0, "frequency_penalty": -2}, {"frequency_penalty": -2.0}),
    ({"temperature": 0, "logit_bias": {"40": 100}}, {"logit_bias": {40: 100.0}}),
    ({"temperature": 1, "seed": 3, "extra_body": {"top_k": 2, "min_p": 0.1}},
     {"temperature": 1.0, "seed": 3, "top_k": 2, "min_p": 0.1}),
    ({"temperature": 0, "extra_body": {"repetition_penalty": 0.5, "min_tokens": 4}},
     {"repetition_penalty": 0.5, "min_new_tokens": 4}),
    ({"temperature": 1.5, "seed": 4, "extra_body": {"ignore_eos": True}},
     {"temperature": 1.5, "seed": 4, "min_new_tokens": 16}),
]  # fmt: skip


@pytest.fixture(scope="module")
def engine(llama: Path) -> Iterator[Engine]:
    workload = duoka.Workload(batch=4, prompt_tokens=96, new_tokens=32)
    with Engine(duoka.plan(llama, "virtual:1x256MiB", workload), processes=False) as engine:
        yield engine


def chat_answers(engine: Engine, n: int = 1, **params: Any) -> list[EngineCompletion]:
    chosen = SamplingParams(**{"temperature": 0, "max_new_tokens": 16, **params})
    return engine.generate([[ChatMessage(role="user", content="hi")]], chosen, n=n)


def text_answers(
    engine: Engine, prompt: str = TEXT, n: int = 1, **params: Any
) -> list[EngineCompletion]:
    chosen = SamplingParams(**{"temperature": 0, "max_new_tokens": 16, **params})
    return engine.generate([tokens_of(prompt)], chosen, n=n)


def tokens_of(text: str) -> list[int]:
    ids: list[int] = make_tokenizer().encode(text)
    return ids


def continued(client: OpenAI, **request: Any) -> list[Any]:
    """The pieces of a completion, each as strictly valid as can be.

    OpenAI's description, and its client's types with it, say that a completion always has a reason
    why it ended; of the pieces of a stream that its server sends, the last one alone has. Ours are
    like those.
    """
    with OpenAI(base_url=client.base_url, api_key="x", max_retries=0) as loose:
        chunks = list(loose.completions.create(stream=True, **request))
    for chunk in chunks:
        content = chunk.model_dump(exclude_unset=True)
        for choice in content["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        Completion.model_validate(content)
    return chunks


def texts(answers: Sequence[EngineCompletion]) -> list[str]:
    """As people are shown them."""
    return [answer.text for answer in answers]


@pytest.mark.parametrize(("asked", "params"), PARAMS, ids=str)
def test_parameters_of_chats(
    client: OpenAI, engine: Engine, asked: dict[str, Any], params: dict[str, Any]
) -> None:
    request: Any = {"model": "llama", "messages": HI, "max_completion_tokens": 16, **asked}
    answer = client.chat.completions.create(**request)
    (choice,) = answer.choices
    (expected,) = chat_answers(engine, **params)
    assert (choice.message.content or "").strip() == expected.text
    assert choice.finish_reason == expected.finish
    assert answer.usage is not None
    usage = (answer.usage.prompt_tokens, answer.usage.completion_tokens)
    assert usage == (expected.prompt_tokens, len(expected.tokens))
    assert answer.usage.total_tokens == sum(usage)
    chunks = list(client.chat.completions.create(stream=True, **request))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == choice.message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == expected.finish
    assert all(chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize(("asked", "params"), PARAMS, ids=str)
def test_parameters_of_completions(
    client: OpenAI, engine: Engine, asked: dict[str, Any], params: dict[str, Any]
) -> None:
    request: Any = {"model": "llama", "prompt": TEXT, "max_tokens": 16, **asked}
    (choice,) = client.completions.create(**request).choices
    (expected,) = text_answers(engine, **params)
    assert (choice.text, choice.finish_reason) == (expected.text, expected.finish)
    chunks = continued(client, **request)
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    assert chunks[-1].choices[0].finish_reason == expected.finish


def test_texts_to_stop_at(client: OpenAI, engine: Engine) -> None:
    (whole,) = chat_answers(engine)
    for stop in (whole.text[5:7], ["never", whole.text[5:7], whole.text[8:]]):
        (expected,) = chat_answers(engine, stop=(stop,) if isinstance(stop, str) else tuple(stop))
        assert len(expected.text) < len(whole.text)
        request: Any = {"model": "llama", "messages": HI, "max_tokens": 16, "temperature": 0}
        (choice,) = client.chat.completions.create(stop=stop, **request).choices
        assert (choice.message.content or "").strip() == expected.text
        assert choice.finish_reason == "stop"
        chunks = client.chat.completions.create(stop=stop, stream=True, **request)
        content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert content == choice.message.content


def test_several_answers(client: OpenAI, engine: Engine) -> None:
    expected = texts(chat_answers(engine, n=3, temperature=1.0, seed=5))
    assert len(set(expected)) == 3
    request: Any = {"model": "llama", "messages": HI, "max_tokens": 16}
    request |= {"n": 3, "seed": 5, "temperature": 1}
    answer = client.chat.completions.create(**request)
    assert [(choice.message.content or "").strip() for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    content = ["", "", ""]
    usages = []
    for chunk in client.chat.completions.create(
        stream=True, stream_options={"include_usage": True}, **request
    ):
        usages.append(chunk.usage)
        for choice in chunk.choices:
            content[choice.index] += choice.delta.content or ""
    assert [text.strip() for text in content] == expected
    assert answer.usage is not None
    assert usages[:-1] == [None] * (len(usages) - 1)
    assert usages[-1].completion_tokens == answer.usage.completion_tokens


def test_several_prompts(client: OpenAI, engine: Engine) -> None:
    prompts = [TEXT, "There was"]
    expected = [text for prompt in prompts for text in texts(text_answers(engine, prompt, n=2,
                temperature=1.0, seed=5))]  # fmt: skip
    request: Any = {"model": "llama", "max_tokens": 16, "n": 2, "seed": 5, "temperature": 1}
    for asked in (prompts, [tokens_of(prompt) for prompt in prompts]):
        answer = client.completions.create(prompt=asked, **request)
        assert [choice.text.strip() for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        content = [""] * 4
        for chunk in continued(client, prompt=asked, **request):
            content[chunk.choices[0].index] += chunk.choices[0].text
        assert [text.strip() for text in content] == expected


@pytest.mark.parametrize("prompt", [TEXT, tokens_of(TEXT)], ids=["text", "tokens"])
def test_a_prompt_can_be_repeated(client: OpenAI, engine: Engine, prompt: Any) -> None:
    request: Any = {"model": "llama", "prompt": prompt, "max_tokens": 16, "temperature": 0}
    (expected,) = text_answers(engine)
    (choice,) = client.completions.create(echo=True, **request).choices
    assert choice.text.startswith(TEXT)
    assert choice.text.removeprefix(TEXT) == expected.text
    chunks = continued(client, echo=True, **request)
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text


@pytest.mark.parametrize("stop", [None, 1], ids=["to the end", "stopped"])
def test_log_probabilities_of_chats(client: OpenAI, engine: Engine, stop: int | None) -> None:
    (plain,) = chat_answers(engine)
    stops = () if stop is None else (plain.text[7:9],)
    (expected,) = chat_answers(engine, logprobs=3, stop=stops)
    request: Any = {"model": "llama", "messages": HI, "max_tokens": 16, "temperature": 0}
    request |= {"logprobs": True, "top_logprobs": 3, "stop": list(stops)}
    (choice,) = client.chat.completions.create(**request).choices
    assert choice.logprobs is not None
    told = choice.logprobs.content or []
    assert [entry.logprob for entry in told] == pytest.approx(
        [token.logprob for token in expected.tokens], abs=1e-4
    )
    assert [len(entry.top_logprobs) for entry in told] == [3] * len(expected.tokens)
    if stop is None:
        content = b"".join(bytes(entry.bytes or ()) for entry in told).decode(errors="replace")
        assert content.strip() == expected.text
        assert any(entry.token == "\ufffd" for entry in told), "some are no whole character"
        assert all(bytes(entry.bytes or ()) != "\ufffd".encode() for entry in told)
    streamed = [
        entry
        for chunk in client.chat.completions.create(stream=True, **request)
        for entry in (chunk.choices[0].logprobs and chunk.choices[0].logprobs.content) or ()
    ]
    assert streamed == told


def test_log_probabilities_of_completions(client: OpenAI, engine: Engine) -> None:
    (expected,) = text_answers(engine, logprobs=2)
    request: Any = {"model": "llama", "prompt": TEXT, "max_tokens": 16, "temperature": 0}
    (choice,) = client.completions.create(logprobs=2, **request).choices
    told = choice.logprobs
    assert told is not None
    assert told.token_logprobs == pytest.approx(
        [token.logprob for token in expected.tokens], abs=1e-4
    )
    assert [len(best) for best in told.top_logprobs or ()] == [2] * len(expected.tokens)
    broken = [token for token in told.tokens or () if token.startswith("bytes:\\x")]
    assert broken, "some are no whole character"
    chunks = continued(client, logprobs=2, **request)
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    assert [token for part in parts if part for token in part.tokens or ()] == told.tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_formats(client: OpenAI, engine: Engine, kind: str, stream: bool) -> None:
    json_schema = {"name": "x", "schema": SCHEMA, "strict": True}
    form: Any = {"type": kind} | ({"json_schema": json_schema} if kind == "json_schema" else {})
    grammar = Grammar.from_response_format(form)
    # Such a model would go on with spaces for ever.
    biases = dict.fromkeys(tokens_of(" \t\r\n"), -100.0)
    (expected,) = chat_answers(engine, grammar=grammar, max_new_tokens=64, logit_bias=biases)
    request: Any = {"model": "llama", "messages": HI, "max_tokens": 64, "temperature": 0}
    request |= {"response_format": form, "logit_bias": biases}
    if stream:
        chunks = list(client.chat.completions.create(stream=True, **request))
        content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    else:
        (choice,) = client.chat.completions.create(**request).choices
        content = choice.message.content or ""
    assert content == expected.text
    assert content.startswith("{")
    if kind == "json_schema":
        answer = json.loads(content)
        assert answer.keys() == {"is_it", "kind"}
        assert isinstance(answer["is_it"], bool)
        assert answer["kind"] in ("a", "b")


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object) == ("llama", "model")
    assert client.models.retrieve("llama") == model
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt/5")
    assert caught.value.code == "model_not_found"


CALLS: dict[str, Any] = {
    "chat": lambda client, **request: client.chat.completions.create(
        **{"model": "llama", "messages": HI, "max_tokens": 5, **request}
    ),
    "completions": lambda client, **request: client.completions.create(
        **{"model": "llama", "prompt": TEXT, "max_tokens": 5, **request}
    ),
    "responses": lambda client, **request: client.responses.create(
        **{"model": "llama", "input": "hi", "max_output_tokens": 16, **request}
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_another_model_is_unknown(client: OpenAI, call: str, stream: bool) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        CALLS[call](client, model="gpt-5", stream=stream)
    error = caught.value
    assert (error.code, error.param, error.type) == (
        "model_not_found",
        "model",
        "not_found_error",
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("call", "request_", "param", "number"),
    [
        ("chat", {"messages": [{"role": "user", "content": "hi" * 100}]}, "messages", 203),
        ("completions", {"prompt": "hi" * 100}, "prompt", 200),
        ("responses", {"input": "hi" * 100}, "input", 203),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_too_long_is_refused(
    client: OpenAI, call: str, request_: dict[str, Any], param: str, number: int, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError, match=f"{number} tokens.*128") as caught:
        CALLS[call](client, stream=stream, **request_)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", param)


@pytest.mark.parametrize(
    ("call", "request_", "param"),
    [
        ("chat", {"messages": []}, "messages"),
        ("chat", {"messages": "hi"}, "messages"),
        ("chat", {"temperature": 3}, "temperature"),
        ("chat", {"temperature": "warm"}, "temperature"),
        ("chat", {"top_p": 1.1}, "top_p"),
        ("chat", {"n": 0}, "n"),
        ("chat", {"n": 17}, "n"),
        ("chat", {"stop": 3}, "stop"),
        ("chat", {"stop": ["a"] * 17}, "stop"),
        ("chat", {"stop": "a" * 257}, "stop"),
        ("chat", {"stop": [1]}, "stop.0"),
        ("chat", {"seed": 0.5}, "seed"),
        ("chat", {"presence_penalty": -3}, "presence_penalty"),
        ("chat", {"frequency_penalty": 3}, "frequency_penalty"),
        ("chat", {"logit_bias": {"word": 1}}, "logit_bias.word"),
        ("chat", {"max_tokens": 0}, "max_tokens"),
        ("chat", {"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ("chat", {"top_logprobs": 2}, "top_logprobs"),
        ("chat", {"tool_choice": "required"}, "tool_choice"),
        ("chat", {"tool_choice": "perhaps"}, "tool_choice"),
        ("chat", {"store": True}, "store"),
        ("chat", {"modalities": ["audio"]}, "modalities.0"),
        ("chat", {"stream_options": {"x": 1}, "stream": True}, "stream_options.x"),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": ""}, "prompt"),
        ("completions", {"prompt": 3}, "prompt"),
        ("completions", {"prompt": [["a"]]}, "prompt.0.0"),
        ("completions", {"logprobs": 21}, "logprobs"),
        ("completions", {"best_of": 2}, "best_of"),
        ("completions", {"suffix": "."}, "suffix"),
    ],
    ids=str,
)
def test_bad_values_are_named(
    client: OpenAI, call: str, request_: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        CALLS[call](client, **request_)
    assert (caught.value.param, caught.value.type) == (param, "invalid_request_error")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("call", "request_"),
    [
        ("chat", {"response_format": {"type": "xml"}}),
        ("chat", {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}),
        ("chat", {"response_format": {"type": "json_schema",
                  "json_schema": {"name": "x", "schema": {"type": "nothing"}}}}),
        ("chat", {"messages": [{"role": "nobody", "content": "a"}]}),
        ("chat", {"messages": [*HI, {"role": "assistant", "content": "a"}]}),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url",
                  "image_url": {"url": "data:image/png;base64,AA=="}}]}]}),
        ("completions", {"prompt": [2**20]}),
        ("chat", {"logit_bias": {"40": 101}}),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_engine_refuses_is_an_error_and_no_stream(
    client: OpenAI, call: str, request_: dict[str, Any], stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        CALLS[call](client, stream=stream, **request_)
    assert caught.value.type == "invalid_request_error"


def test_tokens(served: Served) -> None:
    def post(path: str, content: Any) -> Any:
        response = httpx2.post(f"{served.url}{path}", json=content)
        assert response.status_code == 200, response.text
        return response.json()

    tokens = post("/tokenize", {"model": "llama", "prompt": TEXT})
    expected = tokens_of(TEXT)
    assert tokens == {"count": len(expected), "max_model_len": 128, "tokens": expected}
    assert post("/detokenize", {"tokens": expected}) == {"prompt": TEXT}
    chat = post("/tokenize", {"messages": HI})
    spelled = post("/detokenize", {"tokens": chat["tokens"]})
    assert spelled == {"prompt": "<|user|>hi<|end|><|assistant|>"}
    refused = httpx2.post(f"{served.url}/tokenize", json={"prompt": "a", "messages": HI})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")


def test_how_it_is(served: Served) -> None:
    for path in ("/health", "/ready"):
        assert httpx2.get(f"{served.url}{path}").status_code == 200
    assert httpx2.get(f"{served.url}/version").json() == {"version": duoka.__version__}
    idle = 'vllm:num_requests_running{engine="0",model_name="llama"} 0.0'
    deadline = time.monotonic() + 60  # what an earlier test broke off may still be running
    while idle not in (metrics := httpx2.get(f"{served.url}/metrics").text):
        assert time.monotonic() < deadline, metrics
        time.sleep(0.05)
    assert 'duoka:engine_up{engine="0",model_name="llama"} 1.0' in metrics
    assert httpx2.get(f"{served.url}/no/such/path").json()["error"]["type"] == "not_found_error"
    refused = httpx2.get(f"{served.url}/v1/chat/completions")
    assert refused.status_code == 405
    assert refused.json()["error"]["message"] == "Method Not Allowed"
    assert served.log.read_text().count("Traceback") == 0
