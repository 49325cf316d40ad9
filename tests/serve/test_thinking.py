"""Thinking, switched on and off and limited for each request, in every API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import scripted
from abuse import CHAT, settled
from anthropic import Anthropic
from chromium import Chromium
from openai import OpenAI
from served import Served, serving
from tuning import TEMPLATE, write_model

from duoka.base.prompt_settings import PromptSettings

HI: Any = [{"role": "user", "content": "hi"}]
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"model": "", "max_tokens": 9, "messages": HI},
    COUNT: {"model": "", "messages": HI},
}
OFF: list[dict[str, Any]] = [
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"chat_template_kwargs": {"thinking": False}},
    {"enable_thinking": False},
    {"reasoning_effort": "none"},
    {"thinking": {"type": "disabled"}},
    {"reasoning": {"effort": "none"}},
    {"reasoning": {"enabled": False}},
]
ON: list[dict[str, Any]] = [
    {"thinking": {"type": "adaptive"}},
    {"chat_template_kwargs": {"enable_thinking": True}},
    {"reasoning": {"enabled": True, "summary": "auto"}},
]
LIMITED: list[dict[str, Any]] = [
    {"thinking": {"budget_tokens": 5}},
    {"reasoning": {"max_tokens": 5}},
    {"thinking_token_budget": 5},
    {"thinking_budget": 5},
    {"thinking_budget_tokens": 5},
    {"chat_template_kwargs": {"thinking_budget": 5}},
]
# The prompt opens the block of reasoning, as DeepSeek-R1's does, and nothing switches it off.
OPENED = TEMPLATE.replace("<|assistant|>{%", "<|assistant|><think>\n{%")
OPENED = OPENED.replace("{{ message.content }}", "{{ message.content.split('</think>')[-1] }}")


def settings_of(path: str, **fields: Any) -> PromptSettings:
    """The settings that a request has for the engine."""
    app, pool = scripted.app_of(scripted.begun(), scripted.ended())
    (answer,) = scripted.post(app, path, {**BODIES[path], **fields})
    assert answer.status_code == 200, answer.text
    return pool.asks[-1].prompt.settings


@pytest.mark.parametrize("path", BODIES)
def test_every_api_takes_the_fields_of_all_clients(path: str) -> None:
    assert settings_of(path) == PromptSettings()
    for fields in OFF:
        assert settings_of(path, **fields).is_thinking is False
    for fields in ON:
        assert settings_of(path, **fields).is_thinking is True
    for fields in LIMITED:
        assert settings_of(path, **fields) == PromptSettings(budget_tokens=5)
    high = PromptSettings(is_thinking=True, effort="high")
    assert settings_of(path, reasoning_effort="high") == high
    assert settings_of(path, reasoning={"effort": "high"}) == high
    off = settings_of(path, reasoning_effort="high", enable_thinking=False)
    assert off == PromptSettings(is_thinking=False, effort="high")
    further = {"language": "de", "mode": "x", "enable_thinking": None}
    assert settings_of(path, chat_template_kwargs=further) == PromptSettings(
        variables={"language": "de", "mode": "x"}
    )


def test_the_effort_of_a_message_is_no_switch() -> None:
    settings = settings_of(
        MESSAGES,
        thinking={"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
        output_config={"effort": "max"},
    )
    assert settings == PromptSettings(is_thinking=True, effort="max", budget_tokens=1024)
    assert settings_of(MESSAGES, output_config={"effort": "low"}).is_thinking is None


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"enable_thinking": True, "thinking": {"type": "disabled"}},
            "thinking contradicts",
        ),
        ({"enable_thinking": True, "reasoning_effort": "none"}, "none contradicts thinking"),
        ({"thinking_budget": 5, "reasoning": {"max_tokens": 6}}, "thinking_budget contradicts"),
        ({"reasoning": {"exclude": True}}, "reasoning.exclude"),
        ({"thinking_budget": -1}, "thinking_budget: "),
        ({"reasoning_effort": "huge"}, "reasoning_effort: "),
    ],
)
def test_contradictions_and_wrong_values_are_refused(fields: Any, text: str) -> None:
    for path, body in BODIES.items():
        app, _ = scripted.app_of(scripted.begun(), scripted.ended())
        (answer,) = scripted.post(app, path, {**body, **fields})
        assert answer.status_code == 400
        assert text in answer.json()["error"]["message"]


def write_opened(directory: Path) -> Path:
    """A model whose prompts open the block of reasoning."""
    write_model("shallow", directory)
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    path.write_text(json.dumps({**config, "chat_template": OPENED}))
    return directory


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_opened(tmp_path_factory.mktemp("opened") / "opened")


@pytest.fixture(scope="module")
def thinker(
    opened: Path, tmp_path_factory: pytest.TempPathFactory, forking_python: Path
) -> Iterator[Served]:
    """A server of a model that thinks until it is stopped."""
    log = tmp_path_factory.mktemp("thinker") / "log"
    with serving(opened, log, python=forking_python) as server:
        yield server


def prompt_of(server: Served, **fields: Any) -> str:
    """The text of a chat's prompt."""
    with httpx2.Client(base_url=server.url) as http:
        tokens = http.post("/tokenize", json={"messages": HI, **fields}).json()["tokens"]
        return str(http.post("/detokenize", json={"tokens": tokens}).json()["prompt"])


def test_a_block_that_the_template_opens_is_closed(thinker: Served) -> None:
    assert prompt_of(thinker).endswith("<think>\n")
    for fields in OFF:
        assert prompt_of(thinker, **fields).endswith("<think>\n\n</think>\n\n")
    assert prompt_of(thinker, thinking_budget=0).endswith("<think>\n\n</think>\n\n")


def test_the_status_says_whether_there_is_a_switch(thinker: Served, served: Served) -> None:
    statuses = [settled(server.url) for server in (thinker, served)]
    assert [status["switches_thinking"] for status in statuses] == [True, False]


def test_the_page_switches_it(thinker: Served, browser: Chromium) -> None:
    with browser.page(thinker.url) as page:
        page.wait("!document.getElementById('thinking').hidden")
        page.evaluate("localStorage.setItem('duoka.settings', '{\"maxTokens\": 9}')")
        for value, has_reasoning in (("default", True), ("off", False), ("on", True)):
            page.click("#new-chat")
            page.evaluate(
                f"document.getElementById('thinking').value = '{value}',"
                "document.getElementById('thinking').dispatchEvent(new Event('change'))"
            )
            page.ask("hi")
            page.wait_text(".turn.last .meta", "tokens")
            assert page.evaluate("document.querySelector('.reasoning').hidden") != has_reasoning


def test_off_on_and_limited_in_chats(thinker: Served) -> None:
    with OpenAI(base_url=f"{thinker.url}/v1", api_key="x", max_retries=0) as client:

        def ask(**fields: Any) -> tuple[str, str]:
            answer = client.chat.completions.create(
                model="", messages=HI, max_tokens=60, temperature=0, extra_body=fields
            )
            message: Any = answer.choices[0].message
            return getattr(message, "reasoning_content", ""), message.content

        reasoning, content = ask()
        assert reasoning
        assert not content
        nothing, content = ask(enable_thinking=False)
        assert not nothing
        assert content
        limited, content = ask(thinking={"type": "enabled", "budget_tokens": 5})
        assert reasoning.startswith(limited)
        assert 0 < len(limited) <= 5
        assert content
        stream = client.chat.completions.create(
            model="",
            messages=HI,
            max_tokens=60,
            temperature=0,
            stream=True,
            extra_body={"thinking_token_budget": 5},
        )
        deltas: list[Any] = [chunk.choices[0].delta for chunk in stream]
        texts = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        assert texts == limited
        assert "".join(delta.content or "" for delta in deltas) == content


def test_limited_in_responses_and_messages(thinker: Served) -> None:
    with OpenAI(base_url=f"{thinker.url}/v1", api_key="x", max_retries=0) as client:
        answer = client.responses.create(
            model="",
            input="hi",
            max_output_tokens=60,
            reasoning={"effort": "low"},
            extra_body={"thinking_budget": 5},
        )
        assert [item.type for item in answer.output] == ["reasoning", "message"]
        assert answer.reasoning is not None
        assert answer.reasoning.effort == "low"
        answer = client.responses.create(
            model="", input="hi", max_output_tokens=60, reasoning={"effort": "none"}
        )
        assert [item.type for item in answer.output] == ["message"]
    with Anthropic(base_url=thinker.url, api_key="x", max_retries=0) as anthropic:
        message = anthropic.messages.create(
            model="",
            messages=HI,
            max_tokens=60,
            thinking={"type": "enabled", "budget_tokens": 5},
        )
        assert [block.type for block in message.content] == ["thinking", "text"]
        message = anthropic.messages.create(
            model="", messages=HI, max_tokens=60, thinking={"type": "disabled"}
        )
        assert [block.type for block in message.content] == ["text"]


def test_a_structured_answer_follows_closed_reasoning(thinker: Served) -> None:
    body = {"messages": HI, "response_format": {"type": "regex", "regex": "[0-9]{3}"}}
    answer = httpx2.post(f"{thinker.url}{CHAT}", json=body).json()
    message = answer["choices"][0]["message"]
    assert message["content"].isdigit()
    assert "reasoning_content" not in message


def test_a_variable_that_the_template_lacks_is_refused(thinker: Served) -> None:
    for name in ("language", "messages", "tokenize", "chat_template", "eos_token"):
        body = {"messages": HI, "chat_template_kwargs": {name: "x"}}
        error = httpx2.post(f"{thinker.url}{CHAT}", json=body).json()["error"]
        assert error["param"] == "chat_template_kwargs"
        assert error["message"].startswith(f"the model's chat template has no variable '{name}'")


def test_off_by_default_and_on_by_request(
    opened: Path, tmp_path: Path, forking_python: Path
) -> None:
    log = tmp_path / "log"
    with serving(opened, log, "--reasoning", "off", python=forking_python) as server:
        assert prompt_of(server).endswith("</think>\n\n")
        assert prompt_of(server, enable_thinking=True).endswith("<think>\n")
        assert prompt_of(server, reasoning_effort="high").endswith("<think>\n")
