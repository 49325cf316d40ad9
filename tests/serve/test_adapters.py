"""Adapters that requests choose by the name of the model, in all forms of requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from adapters import sizes_of, write_adapter
from anthropic import Anthropic
from openai import OpenAI
from served import Served, serving

import duoka
from duoka.engine import Engine, SamplingParams
from duoka.models.text.messages import ChatMessage

NAMES = ("sql", "org/chat:v2")
HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def directories(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, sizes = tmp_path_factory.mktemp("adapters"), sizes_of(llama, "q_proj", "up_proj")
    return {name: write_adapter(root / str(at), sizes) for at, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def adapted(
    llama: Path,
    directories: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    forking_python: Path,
) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("server") / "log"
    options = [f"--adapter={name}={directory}" for name, directory in directories.items()]
    with serving(llama, log, *options, python=forking_python) as server:
        yield server


@pytest.fixture(scope="module")
def openai_client(adapted: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{adapted.url}/v1", api_key="x", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def texts(llama: Path, directories: dict[str, Path]) -> dict[str, str]:
    """What the model answers without an adapter, and with each one merged into its weights."""
    workload = duoka.Workload(batch=4, prompt_tokens=96, new_tokens=32)
    plan = duoka.plan(llama, "virtual:1x256MiB", workload)
    answers = {}
    for name, directory in {"llama": None, **directories}.items():
        with Engine(plan, processes=False, adapter=directory) as engine:
            chat = [ChatMessage(role="user", content="hi")]
            answers[name] = engine.submit(chat, SamplingParams(max_new_tokens=8)).result().text
    assert len(set(answers.values())) == 3
    return answers


def test_the_models_name_chooses(
    adapted: Served, openai_client: OpenAI, texts: dict[str, str]
) -> None:
    tell: dict[str, Any] = {"temperature": 0}
    for name, text in texts.items():
        chat = openai_client.chat.completions.create(model=name, messages=HI, max_tokens=8, **tell)
        assert chat.model == name
        assert (chat.choices[0].message.content or "").strip() == text
        stream = openai_client.chat.completions.create(
            model=name, messages=HI, max_tokens=8, stream=True, **tell
        )
        chunks = list(stream)
        assert {chunk.model for chunk in chunks} == {name}
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
        assert "".join(pieces).strip() == text
        response = openai_client.responses.create(
            model=name, input="hi", max_output_tokens=8, **tell
        )
        assert (response.model, response.output_text.strip()) == (name, text)
        with Anthropic(base_url=adapted.url, api_key="x", max_retries=0) as client:
            message: Any = client.messages.create(
                model=name, messages=HI, max_tokens=8, extra_body=tell
            )
        assert (message.model, message.content[0].text.strip()) == (name, text)
    plain = [
        openai_client.completions.create(model=name, prompt="ab", max_tokens=8, **tell)
        for name in texts
    ]
    assert [answer.model for answer in plain] == list(texts)
    assert len({answer.choices[0].text for answer in plain}) == 3


def test_adapters_are_listed_with_their_model(adapted: Served, openai_client: OpenAI) -> None:
    listed = [model.model_dump() for model in openai_client.models.list()]
    assert [(model["id"], model.get("parent")) for model in listed] == [
        ("llama", None),
        *((name, "llama") for name in NAMES),
    ]
    assert openai_client.models.retrieve(NAMES[1]).model_dump() == listed[2]
    assert "adapters, chosen by the name of the model: sql, org/chat:v2" in adapted.log.read_text()


def test_an_unknown_name_is_openais_error(adapted: Served, openai_client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        openai_client.chat.completions.create(model="slq", messages=HI)
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    assert "'llama', or with an adapter 'sql', or with an adapter" in caught.value.message
    with pytest.raises(openai.NotFoundError):
        openai_client.models.retrieve("slq")
    body = {"model": "slq", "messages": HI, "max_tokens": 5}
    answer = httpx2.post(f"{adapted.url}/v1/messages", json=body)
    assert answer.status_code == 404
    assert json.loads(answer.text)["error"]["type"] == "not_found_error"


def test_prefixes_are_shared_under_one_adapter_alone(openai_client: OpenAI) -> None:
    def num_cached(name: str) -> int:
        answer = openai_client.completions.create(model=name, prompt="x" * 80, max_tokens=1)
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        return 0 if details is None else details.cached_tokens or 0

    assert [num_cached(name) for name in ("sql", "llama", "sql", "llama")] == [0, 0, 64, 64]
