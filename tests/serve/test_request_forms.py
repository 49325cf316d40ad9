"""Requests as official clients may write them: each field, nulls, wrong types, and other bodies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from types import NoneType
from typing import Any, cast, get_args, get_type_hints

import httpx2
import pytest
import scripted
from abuse import CHAT, COMPLETIONS, VALID
from pydantic import BaseModel
from sdk_fields import FORMS, HI
from served import Served

from duoka.serve.app import make_app
from duoka.serve.forms import HINTS
from duoka.serve.messages import EngineRequest, Event
from duoka.serve.pool import EnginePool
from duoka.serve.service import Service

COUNT = "/v1/messages/count_tokens"
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": None}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TALK: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "r"},
    ],
    "max_tokens": 1,
}
SHORT: dict[str, Any] = {"messages": HI, "max_tokens": 1}
TOOLS = [{"type": "function", "function": FUNCTION}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{path: (path, body) for path, body in VALID.items()},
    "stream": (CHAT, {**SHORT, "stream": True}),
    "tools": (CHAT, {**TALK, "tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": True}),
    "forced": (CHAT, {**SHORT, "tools": TOOLS,
                      "tool_choice": {"type": "function", "function": {"name": "f"}}}),
    "schema": (CHAT, {**SHORT, "response_format": {
        "type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}}),
    "regex": (CHAT, {**SHORT, "response_format": {"type": "regex", "regex": "a"}}),
    "image": (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}], "max_tokens": 1}),
    "texts": (COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 1, "suffix": "", "echo": True,
                            "stop": "x"}),
    "items": ("/v1/responses", {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "a"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
        ],
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": {"type": "function", "name": "f"},
        "max_output_tokens": 1,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "include": ["message.output_text.logprobs"],
        "metadata": {"a": "b"},
    }),
    "blocks": ("/v1/messages", {
        "model": "",
        "max_tokens": 1,
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "a", "signature": "b"},
                {"type": "text", "text": "x", "citations": None},
                {"type": "tool_use", "id": "c", "name": "f", "input": {}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c", "is_error": False,
                 "content": [{"type": "text", "text": "a"}]},
            ]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}, "description": "d"}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
        "metadata": {"user_id": "a"},
    }),
    "tokens of tools": ("/tokenize", {"messages": HI, "tools": TOOLS}),
}  # fmt: skip
WRONG: list[Any] = [
    *(None, True, 0, 1e308, 10**30, "", "\0", [], {}, [None], [{}], {"a": 1}),
    *({"type": {}}, {"type": "function"}, [{"type": []}]),
]


def post(path: str, *bodies: Any, **options: Any) -> list[httpx2.Response]:
    """What a scripted server answers."""
    app, _ = scripted.app_of(scripted.begun(), scripted.delta("a"), scripted.ended())
    return scripted.post(app, path, *bodies, **options)


def fields_of(path: str) -> Mapping[str, Any]:
    """The fields of an official client's type."""
    return get_type_hints(FORMS[path][0])


def names_of(form: type[BaseModel]) -> set[str]:
    """The fields of a form, as clients name them."""
    return {field.alias or name for name, field in form.model_fields.items()}


@pytest.mark.parametrize("path", FORMS)
def test_a_field_that_is_null_is_absent(path: str) -> None:
    _, form, body = FORMS[path]
    required = {
        field.alias or name for name, field in form.model_fields.items() if field.is_required()
    }
    nullable = {name for name, kind in fields_of(path).items() if NoneType in get_args(kind)}
    nullable |= {"stream"} & fields_of(path).keys() | names_of(form)
    nulls = dict.fromkeys(nullable - required)
    answers = post(path, {**body, **nulls}, *({**body, name: None} for name in nulls))
    assert {answer.status_code for answer in answers} == {200}
    assert answers[0].headers["content-type"] == "application/json"


def test_a_field_within_a_field_may_be_null() -> None:
    tool = {"type": "function", "function": {**FUNCTION, "description": None}}
    said = {"role": "user", "content": "hi", "name": None}
    (answer,) = post(
        CHAT,
        {
            "messages": [said],
            "stream": True,
            "stream_options": {"include_usage": None},
            "tools": [tool],
        },
    )
    assert (answer.status_code, answer.text.count("usage")) == (200, 0)


@pytest.mark.parametrize("path", FORMS)
def test_each_field_of_an_official_client_is_known_or_refused_by_name(path: str) -> None:
    _, form, body = FORMS[path]
    for name in fields_of(path).keys() - names_of(form) - HINTS:
        (answer,) = post(path, {**body, name: "x"})
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert f"{name} is not supported; " in error["message"]
        assert error.get("param", name) == name


def wrong(value: Any) -> Iterator[Any]:
    """The same with a wrong type in one place, one after another."""
    yield from WRONG
    if isinstance(value, dict):
        for name in value:
            yield from ({**value, name: other} for other in wrong(value[name]))
            yield {key: item for key, item in value.items() if key != name}
        yield {**value, "no_such_field": 1}
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from ([*value[:at], other, *value[at + 1 :]] for other in wrong(item))


@pytest.mark.parametrize("name", BODIES)
def test_wrong_types_are_refused_or_answered_and_never_a_fault(served: Served, name: str) -> None:
    path, body = BODIES[name]
    headers = {"Content-Type": "application/json"}
    with httpx2.Client(base_url=served.url, headers=headers) as http:
        for value in wrong(body):
            for limit in {"max_tokens", "max_output_tokens"} & body.keys():
                if isinstance(value, dict) and value.get(limit) in (None, "", [], {}):
                    value[limit] = 1  # the answer would fill the context
            answer = http.post(path, content=json.dumps(value))
            assert answer.status_code in (200, 400, 404), (value, answer.text)
            assert answer.text
            if answer.status_code == 400 and not path.startswith("/v1/messages"):
                assert answer.json()["error"]["param"], value
            if answer.headers["content-type"].startswith("text/event-stream"):
                assert answer.text.endswith(("[DONE]\n\n", "}}\n\n", '"message_stop"}\n\n'))
                assert '"error": {' not in answer.text


BROKEN: dict[str, tuple[bytes, str]] = {
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "not UTF-8: .* byte 0xff in position 0"),
    "UTF-16 without a mark": ('{"a": 1}'.encode("utf-16-le"), r"not valid JSON: .*line 1 column 2"),
    "UTF-32": ('{"a": 1}'.encode("utf-32"), "not UTF-8: .* byte 0xff in position 0"),
    "UTF-32, big": ('{"a": 1}'.encode("utf-32-be"), "not valid JSON: .*line 1 column 1"),
    "half a pair": (b'{"messages": "\\udc00"}', "not UTF-8: .*surrogates not allowed"),
    "Latin-1": ('{"messages": "é"}'.encode("latin-1"), "not UTF-8: .* byte 0xe9 in position 14"),
    "no colon": (b'{"messages":\n [{"role" 1}]}', r"not valid JSON: .*line 2 column 11"),
    "nothing": (b"", "not valid JSON: .*line 1 column 1"),
    "a list": (b"[]", "expected an object"),
    "NaN": (b'{"temperature": NaN}', "NaN is not a JSON number"),
    "infinity": (b'{"temperature": 1e999}', "1e999 doesn't fit in 64 bits"),
    "twice": (b'{"n": 1, "n": 2}', "the key 'n' occurs twice"),
}


@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize("name", BROKEN)
def test_a_body_that_is_no_json_is_told_where(path: str, name: str) -> None:
    content, reason = BROKEN[name]
    headers = {"Content-Type": "application/json"}
    (answer,) = post(path, None, content=content, headers=headers)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error.get("param", "body") == "body"
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(error["message"])


def test_a_byte_order_mark_is_no_fault() -> None:
    content = json.dumps({"messages": HI}).encode("utf-8-sig")
    (answer,) = post(CHAT, None, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "a/json"])
def test_another_content_type_is_named(kind: str) -> None:
    headers = {"Content-Type": kind} if kind else {}
    (answer,) = post(CHAT, None, content=json.dumps({"messages": HI}), headers=headers)
    assert answer.status_code == 415
    message = f"Content-Type is {kind or 'missing'}; send JSON with Content-Type: application/json"
    assert answer.json()["error"]["message"] == message


def test_a_defect_within_a_stream_is_told() -> None:
    class Failing(scripted.ScriptedPool):
        async def submit(
            self, request: EngineRequest, tokens: int, key: str = ""
        ) -> AsyncGenerator[Event, None]:
            yield scripted.begun()
            raise ZeroDivisionError

    app = make_app(Service(cast(EnginePool, Failing(())), scripted.MODEL))

    async def ask() -> httpx2.Response:
        quiet = httpx2.ASGITransport(app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=quiet) as http:
            return await http.post(f"http://localhost{CHAT}", json={"messages": HI, "stream": True})

    answer = asyncio.run(ask())
    assert answer.status_code == 200
    last = json.loads(answer.text.strip().rpartition("data: ")[2])
    assert last["error"]["code"] == "internal_error"
    assert last["error"]["message"] == "a defect in duoka: ZeroDivisionError"


def refused(served: Served, path: str, body: Any) -> tuple[int, str, str | None]:
    answer = httpx2.post(f"{served.url}{path}", json=body)
    error = answer.json()["error"]
    return answer.status_code, error["message"], error.get("param")


def test_an_image_for_a_model_of_text_is_refused_as_such(served: Served) -> None:
    for url in ("data:image/png;base64,AA==", "http://example.org/a.png"):
        image = {"type": "image_url", "image_url": {"url": url}}
        body = {"messages": [{"role": "user", "content": [image]}]}
        code, text, param = refused(served, CHAT, body)
        assert (code, param) == (400, "messages")
        assert text == "messages[0]: this model takes no images; omit the images"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": [1, 10**6]}, "prompt"),
        (COMPLETIONS, {"prompt": [1, 10**6], "echo": True}, "prompt"),
        (CHAT, {"messages": HI, "logit_bias": {str(10**6): 1}}, "logit_bias"),
        ("/detokenize", {"tokens": [1, 10**6]}, "tokens"),
    ],
)
def test_a_token_that_no_model_has_is_the_clients_error(
    served: Served, path: str, body: Any, param: str
) -> None:
    code, text, at = refused(served, path, body)
    assert (code, at) == (400, param)
    assert text.startswith("token 1000000 is invalid; the token ids of this model are 0 to ")


def test_what_an_engine_refuses_names_its_field(served: Served) -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "nothing"}}
    for path, body, param in (
        (
            CHAT,
            {"messages": HI, "response_format": {"type": "regex", "regex": "("}},
            "response_format",
        ),
        (CHAT, {"messages": [*HI, {"role": "assistant", "content": "a"}]}, "messages"),
        ("/v1/responses", {"input": "a", "text": {"format": form}}, "text.format"),
        ("/tokenize", {"prompt": "a" * 10**6}, "prompt"),
    ):
        code, _, at = refused(served, path, body)
        assert (code, at) == (400, param)
