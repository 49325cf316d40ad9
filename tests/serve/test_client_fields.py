"""Fields that other servers and clients have: hints, empty values, prefilled answers, documents."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
import scripted
from abuse import CHAT, COMPLETIONS
from anthropic import Anthropic
from openai import OpenAI
from sdk_fields import FORMS
from served import Served
from tuning import SPECIAL

from duoka.serve.messages import Turn

HI: Any = [{"role": "user", "content": "hi"}]
PREFILLED: Any = [*HI, {"role": "assistant", "content": "It is "}]
CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}
MESSAGES = "/v1/messages"
NAMES = ("get-weather", "2nd_tool", "-x")


def ask_of(path: str, body: dict[str, Any]) -> Any:
    """The prompt that a request has for the engine, with its parameters."""
    app, pool = scripted.app_of(scripted.begun(), scripted.ended())
    (answer,) = scripted.post(app, path, body)
    assert answer.status_code == 200, answer.text
    return pool.asks[-1]


def post(served: Served, path: str, **fields: Any) -> Any:
    return httpx2.post(f"{served.url}{path}", json=fields).json()


@pytest.mark.parametrize("path", FORMS)
def test_what_is_null_or_empty_is_absent_whatever_its_name(path: str) -> None:
    _, form, body = FORMS[path]
    names = {field.alias or name for name, field in form.model_fields.items()} - body.keys()
    plain = ask_of(path, body)
    for empty in (None, "", [], {}):
        asked = ask_of(path, {**body, **dict.fromkeys([*names, "no_such_field"], empty)})
        assert (asked.prompt, asked.params) == (plain.prompt, plain.params)


def test_a_thread_can_begin_but_not_go_on() -> None:
    """Its later requests have the new messages only."""
    body = {"model": "", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
    begun = ask_of(MESSAGES, body | {"thread": {"type": "create"}}).prompt
    assert begun == ask_of(MESSAGES, body).prompt
    app, _ = scripted.app_of(scripted.begun(), scripted.ended())
    thread = {"type": "continue", "previous_message_id": "msg_1"}
    (refused,) = scripted.post(app, MESSAGES, body | {"thread": thread})
    error = refused.json()["error"]
    assert refused.status_code == 400
    assert "send all messages" in error["message"]
    assert error["details"] == {"error_code": "thread_unsupported_request"}


def test_hints_within_messages_and_tools_have_no_effect() -> None:
    marked = {"cache_control": {"type": "ephemeral"}, "prompt_cache_breakpoint": {"mode": "x"}}
    tool = {"name": "f", "parameters": {"type": "object"}}
    chat = ask_of(CHAT, {
        "messages": [{"role": "user", "name": "Ann", "content": [
            {"type": "text", "text": "hi", **marked}]}],
        "tools": [{"type": "function", "function": {**tool, "defer_loading": True},
                   "defer_loading": True, **marked}],
    }).prompt  # fmt: skip
    assert chat.messages == [Turn(role="user", content="hi")]
    assert chat.tools == [{"type": "function", "function": tool}]
    message = ask_of(MESSAGES, {
        "model": "", "max_tokens": 2,
        "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
        "tools": [{"name": "f", "input_schema": {"type": "object"}, "defer_loading": True,
                   "allowed_callers": ["direct"], "input_examples": [{}], **marked}],
        "messages": [
            *HI,
            {"role": "assistant", "content": [
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I ask.", "citations": [{"type": "char_location"}]},
                {"type": "tool_use", "id": "c", "name": "f", "input": {},
                 "caller": {"type": "direct"}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": "r", **marked}]},
        ],
    }).prompt  # fmt: skip
    assert message.tools == [{"type": "function", "function": tool}]
    assert [turn.content for turn in message.messages] == ["hi", "I ask.", "r"]
    assert message.messages[1].reasoning == ""


def test_a_message_may_have_a_type() -> None:
    typed = [{**message, "type": kind} for message in PREFILLED for kind in ("text", "message")]
    assert len(ask_of(CHAT, {"messages": typed}).prompt.messages) == 4
    app, _ = scripted.app_of()
    (answer,) = scripted.post(app, CHAT, {"messages": [{**HI[0], "type": "function_call"}]})
    assert answer.json()["error"]["param"] == "messages.0.type"


def test_what_bills_claude_code_is_no_part_of_a_prompt() -> None:
    header = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=36ee5;"}
    text = {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}}
    body = {"model": "", "max_tokens": 2, "messages": HI}
    for system, expected in (([header, text], ["You are Claude Code.", "hi"]), ([header], ["hi"])):
        turns = ask_of(MESSAGES, {**body, "system": system}).prompt.messages
        assert [turn.content for turn in turns] == expected


def test_a_tool_that_was_found_is_named() -> None:
    found = {"type": "tool_reference", "tool_name": "rain"}
    call = {"type": "tool_use", "id": "c", "name": "search", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [found]}
    messages = [
        *HI,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    turns = ask_of(MESSAGES, {"model": "", "max_tokens": 2, "messages": messages}).prompt.messages
    assert turns[-1] == Turn(role="tool", content="rain", call_id="c")


def test_penalties_are_taken_in_all_apis() -> None:
    penalties = {"presence_penalty": 0.5, "frequency_penalty": -1.0}
    for path, (_, _, body) in FORMS.items():
        if not path.endswith("tokens"):
            assert ask_of(path, {**body, **penalties}).params.items() >= penalties.items()
    app, _ = scripted.app_of(scripted.begun(), scripted.ended())
    (answer,) = scripted.post(app, "/v1/responses", {"input": "hi", **penalties})
    assert answer.json().items() >= penalties.items()


def test_a_choice_among_some_tools() -> None:
    functions = [{"name": name, "parameters": {"type": "object"}} for name in ("a", "b", "c")]
    for mode, must_call in (("auto", False), ("required", True)):
        names = [{"type": "function", "name": name} for name in ("c", "a")]
        nested = [{"type": "function", "function": {"name": name}} for name in ("c", "a")]
        chat = ask_of(CHAT, {
            "messages": HI,
            "tools": [{"type": "function", "function": function} for function in functions],
            "tool_choice": {"type": "allowed_tools",
                            "allowed_tools": {"mode": mode, "tools": nested}},
        }).prompt  # fmt: skip
        response = ask_of("/v1/responses", {
            "input": "hi",
            "tools": [{"type": "function", **function} for function in functions],
            "tool_choice": {"type": "allowed_tools", "mode": mode, "tools": names},
        }).prompt  # fmt: skip
        for prompt in (chat, response):
            assert [tool["function"]["name"] for tool in prompt.tools] == ["a", "c"]
            assert prompt.must_call is must_call
    app, _ = scripted.app_of(scripted.begun(), scripted.ended())
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "d"}]}
    tools = [{"type": "function", **function} for function in functions]
    body = {"input": "hi", "tools": tools, "tool_choice": choice}
    (answer,) = scripted.post(app, "/v1/responses", body)
    assert answer.json()["error"]["message"] == "tool_choice is not in tools; available: a, b, c"


def test_documents_are_shown_as_text() -> None:
    text = {"type": "text", "media_type": "text/plain", "data": "All is well."}
    parts = {"type": "content", "content": [{"type": "text", "text": "So it is."}]}
    content = [
        {"type": "document", "source": text, "title": "Report", "context": "Of 2025",
         "citations": {"enabled": False}},
        {"type": "document", "source": parts},
        {"type": "text", "text": "How is it?"},
    ]  # fmt: skip
    body = {"model": "", "max_tokens": 2, "messages": [{"role": "user", "content": content}]}
    (turn,) = ask_of(MESSAGES, body).prompt.messages
    assert turn.content == "Report\n\nOf 2025\n\nAll is well.\n\nSo it is.\n\nHow is it?"
    app, _ = scripted.app_of()
    pdf = {"type": "base64", "media_type": "application/pdf", "data": "AA=="}
    file = [{"role": "user", "content": [{"type": "document", "source": pdf}]}]
    (answer,) = scripted.post(app, MESSAGES, {**body, "messages": file})
    assert answer.status_code == 400
    assert "source" in answer.json()["error"]["message"]


def test_tools_have_names_as_at_openai(served: Served) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in NAMES]
    for name in NAMES:
        choice = {"type": "function", "function": {"name": name}}
        answer = post(served, CHAT, messages=HI, tools=tools, tool_choice=choice, max_tokens=40)
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == name


def test_an_answer_is_continued_where_it_ends(served: Served) -> None:
    ids = post(served, "/tokenize", messages=PREFILLED, **CONTINUED)["tokens"]
    text = post(served, "/detokenize", tokens=ids)["prompt"]
    assert text.endswith("<|assistant|>It is ")
    settings = {"max_tokens": 12, "temperature": 0}
    expected = post(served, COMPLETIONS, prompt=ids, **settings)["choices"][0]["text"].rstrip()
    with OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:
        chat = client.chat.completions.create(
            model="", messages=PREFILLED, max_tokens=12, temperature=0, extra_body=CONTINUED
        )
        assert (chat.choices[0].message.content or "").rstrip() == expected
    with Anthropic(base_url=served.url, api_key="x", max_retries=0) as anthropic:
        message = anthropic.messages.create(model="", messages=PREFILLED, max_tokens=12)
        (block,) = message.content
        assert block.type == "text"
        assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == len(ids)
    for fields, reason in (
        ({"messages": PREFILLED}, "the last message is the assistant's own"),
        ({"messages": HI, **CONTINUED}, "only a message of the assistant without tool calls"),
        ({"messages": HI, "add_generation_prompt": False}, "add_generation_prompt must be"),
    ):
        assert post(served, CHAT, **fields)["error"]["message"].startswith(reason)


def test_stop_tokens_and_special_tokens(served: Served) -> None:
    user = 256 + SPECIAL.index("<|user|>")
    body = {"messages": HI, "max_tokens": 2, "logit_bias": {str(user): 100}, "temperature": 0}
    (choice,) = post(served, CHAT, **body)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    (choice,) = post(served, CHAT, **body, skip_special_tokens=False)["choices"]
    assert choice["message"]["content"] == "<|user|>" * 2
    answer = post(served, CHAT, **body, stop_token_ids=[user])
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 0
    error = post(served, CHAT, **body, stop_token_ids=[10**6])["error"]
    assert error["param"] == "stop_token_ids"
