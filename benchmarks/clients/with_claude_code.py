"""Requests of Claude Code as public issues show them, sent as they are.

Sources: anthropics/claude-code issues 24168, 63469 and 68900, vllm-project/vllm issue 44000,
ggml-org/llama.cpp pull request 20623.
"""

from __future__ import annotations

from typing import Any

import httpx
from checks import AGENT, IMAGE, KEY, LLAMA, MODEL, THINKER, check, main

HEADERS = {
    "x-api-key": KEY,
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,context-management-2025-06-27",
    "anthropic-dangerous-direct-browser-access": "true",
    "user-agent": "claude-cli/2.1.177 (external, cli)",
    "x-app": "cli",
    "x-stainless-lang": "js",
}
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"a": {"type": "integer", "description": "a"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"name": "add", "description": "Adds.", "input_schema": SCHEMA, "eager_input_streaming": True},
    {"name": "mcp__memory__read_graph", "description": "Reads.", "input_schema": {"type": "object"},
     "defer_loading": True, **CACHED},
]  # fmt: skip
REMINDER = "<system-reminder>\nAs you answer, be brief.\n</system-reminder>"


def system(number: int = 0) -> list[dict[str, Any]]:
    header = (
        f"x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={number:05x};"
    )
    return [
        {"type": "text", "text": header},
        {
            "type": "text",
            "text": "You are Claude Code, Anthropic's official CLI for Claude.",
            **CACHED,
        },
        {"type": "text", "text": "You help with software. " * 10, **CACHED},
    ]


def body(**fields: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": REMINDER}, {"type": "text", "text": "hi", **CACHED}]
    return {
        "model": MODEL,
        "max_tokens": 60,
        "messages": [{"role": "user", "content": content}],
        "system": system(),
        "tools": TOOLS,
        "metadata": {"user_id": '{"device_id":"0","account_uuid":"","session_id":"1"}'},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
        "temperature": 1,
        **fields,
    }


def post(asked: Any, url: str = LLAMA, path: str = "/v1/messages?beta=true") -> httpx.Response:
    answer = httpx.post(f"{url}{path}", json=asked, headers=HEADERS, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer


@check
def a_first_request() -> None:
    answer = post(body())
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.rstrip().endswith('"message_stop"}')
    assert "tool_use" in post(body(), AGENT).text


@check
def the_billing_header_does_not_prevent_the_prefix_cache() -> None:
    usages = [
        post(body(system=system(number), stream=False)).json()["usage"] for number in range(2)
    ]
    assert usages[1]["cache_read_input_tokens"] > 200, usages
    assert usages[1]["input_tokens"] < 50, usages


@check
def the_probes_at_its_start() -> None:
    quota = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "quota"}],
             "metadata": {"user_id": "u"}}  # fmt: skip
    assert post(quota).json()["stop_reason"] == "max_tokens"
    schema = {
        "type": "object",
        "properties": {"is_it": {"type": "boolean"}},
        "required": ["is_it"],
        "additionalProperties": False,
    }
    title = body(tools=[], thinking={"type": "disabled"}, stream=False, output_config={
        "format": {"type": "json_schema", "schema": schema}})  # fmt: skip
    assert "is_it" in post(title).json()["content"][0]["text"]


@check
def counting() -> None:
    counted = {name: value for name, value in body().items() if name in (
        "model", "messages", "tools", "system", "thinking", "context_management", "output_config",
        "metadata")}  # fmt: skip
    answer = post(counted, path="/v1/messages/count_tokens?beta=true").json()
    assert answer["input_tokens"] > 200


@check
def rounds_with_results_and_reminders() -> None:
    result = [
        {
            "type": "tool_result",
            "tool_use_id": "toolu_1",
            "content": "3",
            "is_error": False,
            **CACHED,
        },
        {"type": "text", "text": REMINDER},
    ]
    said = [
        {"type": "thinking", "thinking": "I reckon.", "signature": ""},
        {"type": "text", "text": "I add."},
        {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1, "b": 2},
         "caller": {"type": "direct"}},
    ]  # fmt: skip
    messages = [
        *body()["messages"],
        {"role": "assistant", "content": said},
        {"role": "user", "content": result},
        {"role": "assistant", "content": [{"type": "text", "text": "(no content)"}]},
        {"role": "user", "content": "and?"},
    ]
    for url in (LLAMA, AGENT):
        post(body(messages=messages), url)


@check
def system_messages_among_the_messages() -> None:
    """Since 2.1.154."""
    later = {"role": "system", "content": [{"type": "text", "text": "Plan mode is on.", **CACHED}]}
    post(body(messages=[*body()["messages"], later]))
    post(body(messages=[later, *body()["messages"], {"role": "assistant", "content": "Yes."}, later,
                        {"role": "user", "content": "go on"}]))  # fmt: skip


@check
def pictures_in_results() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": IMAGE}
    messages = [
        *body()["messages"],
        {"role": "assistant", "content": [
            {"type": "tool_use", "id": "t", "name": "add", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [
            {"type": "image", "source": source}]}]},
    ]  # fmt: skip
    post(body(messages=messages), AGENT)


@check
def thinking_with_a_budget() -> None:
    budget = {"type": "enabled", "budget_tokens": 31999}
    assert "thinking_delta" in post(body(thinking=budget, max_tokens=60), THINKER).text
    assert "thinking_delta" not in post(body(thinking={"type": "disabled"}), THINKER).text


@check
def fields_without_an_effect_here() -> None:
    post(body(mcp_servers=[], service_tier="auto", container=None, speed="fast",
              inference_geo=None, betas=[], top_p=None))  # fmt: skip


@check
def what_it_asks_of_the_server() -> None:
    assert httpx.get(f"{LLAMA}/v1/models", headers=HEADERS).status_code == 200
    assert httpx.get(f"{LLAMA}/v1/models/{MODEL}", headers=HEADERS).status_code == 200
    head = httpx.head(f"{LLAMA}/", headers=HEADERS)
    assert head.status_code == 200, head.status_code


@check
def results_of_its_tool_search() -> None:
    """All tools are in the prompt anyway."""
    found = [{"type": "tool_reference", "tool_name": "mcp__memory__read_graph"}]
    messages = [
        *body()["messages"],
        {"role": "assistant", "content": [
            {"type": "tool_use", "id": "t", "name": "add", "input": {"a": 1, "b": 2}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t", "content": found}]},
    ]  # fmt: skip
    post(body(messages=messages), AGENT)


main()
