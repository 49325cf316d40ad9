"""What the server answers in its four forms, whole and as streams: a small model, and a script.

`served.txt` is of `duoka serve` with a model that talks in bytes. `scripted.txt` is of an engine
that says what no small model says: reasoning, calls, failures.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import served
import tuning
from scripted import CALLS, MODEL, app_of, begun, delta, ended, transport

from duoka.serve.messages import Failed

from . import records

CHAT, TEXT, RESPONSES, MESSAGES = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
)  # fmt: skip
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"is_it": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
    "required": ["is_it", "kind"],
    "additionalProperties": False,
}
DRY = {
    "type": "object",
    "properties": {"dry": {"type": "boolean"}},
    "required": ["dry"],
    "additionalProperties": False,
}
RAIN = {"name": "rain", "description": "Tells it.", "parameters": DRY}
TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "3+3?"},
]
CALLED = [
    {"role": "user", "content": "rain?"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "call_1", "type": "function",
         "function": {"name": "rain", "arguments": '{"dry": true}'}}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "no"},
]  # fmt: skip
GREEDY = {"model": "llama", "temperature": 0}
# Name, path and body; those with `stream` among the forms are asked both ways.
ASKED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("plain", CHAT, {"messages": HI, "max_tokens": 12}),
    ("sampled by a seed", CHAT, {"messages": HI, "max_tokens": 12, "temperature": 1.2, "seed": 5,
                                 "top_p": 0.9, "top_k": 20}),
    ("stop strings", CHAT, {"messages": HI, "max_tokens": 40, "temperature": 1, "seed": 3,
                            "stop": ["6L", "zz"]}),
    ("log-probabilities", CHAT, {"messages": HI, "max_tokens": 4, "logprobs": True,
                                 "top_logprobs": 2}),
    ("a schema", CHAT, {"messages": HI, "max_tokens": 60, "response_format": {
        "type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}}),
    ("a regular expression", CHAT, {"messages": HI, "max_tokens": 30, "response_format": {
        "type": "regex", "regex": "(yes|no), sir"}}),
    ("a forced call", CHAT, {"messages": HI, "max_tokens": 110, "tool_choice": "required",
                             "parallel_tool_calls": False,
                             "tools": [{"type": "function", "function": RAIN}]}),
    ("a forced call that is cut", CHAT, {"messages": HI, "max_tokens": 38,
                                         "tool_choice": "required",
                                         "tools": [{"type": "function", "function": RAIN}]}),
    ("a conversation with a call", CHAT, {"messages": CALLED, "max_tokens": 6,
                                          "tools": [{"type": "function", "function": RAIN}]}),
    ("several answers, and their tokens", CHAT, {"messages": TALK, "max_tokens": 6, "n": 2,
                                                 "temperature": 1, "seed": 1,
                                                 "stream_options": {"include_usage": True}}),
    ("penalties and a bias", CHAT, {"messages": HI, "max_tokens": 6, "presence_penalty": 1,
                                    "frequency_penalty": -1, "logit_bias": {"40": 5}}),
    ("plain", TEXT, {"prompt": "Once upon", "max_tokens": 12}),
    ("prompts, echoed", TEXT, {"prompt": ["ab", "cd"], "max_tokens": 4, "echo": True}),
    ("log-probabilities of tokens", TEXT, {"prompt": [72, 73], "max_tokens": 3, "logprobs": 2}),
    ("stop strings", TEXT, {"prompt": "x", "max_tokens": 40, "temperature": 1, "seed": 3,
                            "stop": "Op"}),
    ("plain", RESPONSES, {"input": "hi", "max_output_tokens": 12}),
    ("instructions", RESPONSES, {"input": TALK[1:], "instructions": "Be short.",
                                 "max_output_tokens": 8}),
    ("a schema", RESPONSES, {"input": "hi", "max_output_tokens": 60, "text": {
        "format": {"type": "json_schema", "name": "it", "schema": SCHEMA}}}),
    ("a forced call", RESPONSES, {"input": "hi", "max_output_tokens": 110,
                                  "parallel_tool_calls": False,
                                  "tools": [{"type": "function", **RAIN, "strict": True}],
                                  "tool_choice": {"type": "function", "name": "rain"}}),
    ("plain", MESSAGES, {"messages": HI, "max_tokens": 12}),
    ("a system's words and stop strings", MESSAGES, {
        "messages": TALK[1:], "system": "Be short.", "max_tokens": 40, "stop_sequences": ["e"]}),
    ("a forced call", MESSAGES, {
        "messages": HI, "max_tokens": 110,
        "tools": [{"name": "rain", "input_schema": DRY}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}),
)  # fmt: skip
REFUSED: tuple[tuple[str, str, Any], ...] = (
    ("another model", CHAT, {"model": "other", "messages": HI}),
    ("an unknown field", CHAT, {"messages": HI, "colour": "red"}),
    ("too many tokens", CHAT, {"messages": [{"role": "user", "content": "x" * 300}]}),
    ("no messages", CHAT, {"messages": []}),
    ("a wrong type", CHAT, {"messages": HI, "temperature": "hot"}),
    ("a tool that isn't there", CHAT, {"messages": HI, "tool_choice": "required"}),
    ("a bad schema", CHAT, {"messages": HI, "response_format": {"type": "regex", "regex": "("}}),
    ("no JSON", CHAT, "{"),
    ("an empty prompt", TEXT, {"prompt": ""}),
    ("a token that isn't there", TEXT, {"prompt": [99999], "max_tokens": 2}),
    ("echo and log-probabilities", TEXT, {"prompt": "a", "echo": True, "logprobs": 1}),
    ("another model", RESPONSES, {"model": "other", "input": "hi"}),
    ("an unknown field", RESPONSES, {"input": "hi", "colour": "red"}),
    ("too many tokens", RESPONSES, {"input": "x" * 300}),
    ("another model", MESSAGES, {"model": "other", "messages": HI, "max_tokens": 4}),
    ("no limit", MESSAGES, {"messages": HI}),
    ("too many tokens", MESSAGES, {"messages": [{"role": "user", "content": "x" * 300}],
                                   "max_tokens": 4}),
    ("tokens", "/tokenize", {"prompt": "hello"}),
    ("tokens of a chat", "/tokenize", {"messages": HI}),
    ("their text", "/detokenize", {"tokens": [72, 73]}),
    ("no such address", "/v1/nothing", {}),
)  # fmt: skip
_FAILED = Failed(number=0, status=503, text="the engine has ended", code="engine_died")
SCRIPTS = {
    "reasoning, text and two calls": CALLS,
    "an answer that fails": (begun(), delta("ab"), _FAILED),
    "an answer that a stop string ends": (begun(), delta("ab"), ended("stop", "END")),
    "an answer without a word": (begun(), ended()),
    "arguments that are cut": (
        begun(), delta("f", "tool_name"), delta('{"a": [1', "tool_arguments"), ended("length"),
    ),
}  # fmt: skip
_BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "logprobs": True},
    TEXT: {"prompt": "a"},
    RESPONSES: {"input": "a"},
    MESSAGES: {"messages": HI, "max_tokens": 50},
}
_SECONDS = 1200  # a busy machine is slow
_ID = re.compile(r"\b(chatcmpl|cmpl|resp|msg|rs|fc|call|toolu|item)(-|_)[0-9a-f]{8,}\b")
_LONG = re.compile(r"-?\b\d+\.\d{6,}(?:e-?\d+)?")
_TIME = re.compile(r'("(?:created|created_at|completed_at)": ?)[0-9.]+')


def write(made: Path) -> None:
    """Ask the server, and the script."""
    records.write(made / "served.txt", dict(_served()))
    records.write(made / "scripted.txt", dict(_scripted()))


def _served() -> Iterator[tuple[str, str]]:
    directory = tuning.write_model("llama", Path.cwd() / "llama")
    patient = mock.patch.multiple(served, _START_SECONDS=_SECONDS, _END_SECONDS=_SECONDS)
    with patient, served.serving(directory, Path.cwd() / "log") as server:
        address = urlsplit(server.url).netloc
        for name, path, body in ASKED:
            for stream in (False, True):
                extra = {"stream": stream} if stream else {}
                whole = GREEDY | body | extra
                if not stream:
                    whole.pop("stream_options", None)
                form = "stream" if stream else "whole"
                yield f"{path} {name}, {form}", _post(address, path, whole)
        for name, path, body in REFUSED:
            yield f"{path} {name}", _post(address, path, body)
        for path in ("/health", "/ready", "/v1/models", "/v1/models/other", "/version"):
            yield f"GET {path}", _post(address, path, None)


def _post(address: str, path: str, body: Any) -> str:
    connection = HTTPConnection(address, timeout=_SECONDS)
    text = body if isinstance(body, str) else json.dumps(body)
    headers = {"Content-Type": "application/json"}
    if body is None:
        connection.request("GET", path)
    else:
        connection.request("POST", path, text, headers)
    response = connection.getresponse()
    content = response.read().decode()
    kind = response.headers.get("Content-Type", "")
    connection.close()
    return f"{response.status} {kind}\n{_normalised(content)}"


def _scripted() -> Iterator[tuple[str, str]]:
    for name, events in SCRIPTS.items():
        for path, body in _BODIES.items():
            for stream in (False, True):
                app, _ = app_of(*events)
                whole = {"model": MODEL, **body, **({"stream": True} if stream else {})}

                async def ask(app: Any = app, path: str = path, whole: Any = whole) -> Any:
                    async with transport(app) as http:
                        return await http.post(f"http://test{path}", json=whole)

                answer = asyncio.run(ask())
                kind = answer.headers.get("Content-Type", "")
                form = "stream" if stream else "whole"
                text = f"{answer.status_code} {kind}\n{_normalised(answer.text)}"
                yield f"{path} {name}, {form}", text


def _normalised(text: str) -> str:
    """Ids by their order, and no times."""
    ids: dict[str, str] = {}

    def numbered(match: re.Match[str]) -> str:
        return ids.setdefault(match[0], f"<{match[1]} {len(ids) + 1}>")

    text = _LONG.sub(lambda match: f"{float(match[0]):.5g}", text)
    return records.normalised(_TIME.sub(r"\1<time>", _ID.sub(numbered, text)))
