"""The fields of the official clients' parameter types that the server refuses.

``python tests/sdk_fields.py`` writes the table of refusals in docs/serving.md and its Chinese twin
anew; a new version of a client shows as a difference.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import typing_extensions
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsBase
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses.input_token_count_params import InputTokenCountParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from pydantic import BaseModel

from duoka.serve.anthropic import CountTokensRequest, MessagesRequest
from duoka.serve.forms import HINTS
from duoka.serve.requests import ChatCompletionRequest, CompletionRequest
from duoka.serve.responses import InputTokensRequest, ResponsesRequest

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = "serving.md", "serving.zh-CN.md"
_CHINESE = {"| field | refused | API |": "| 字段 | 拒绝的值 | API |", "| any value |": "| 任何值 |"}
HI = [{"role": "user", "content": "hi"}]
# For each path: the parameters' type, the server's form of it, and the smallest body.
FORMS: dict[str, tuple[type[Any], type[BaseModel], dict[str, Any]]] = {
    "/v1/chat/completions": (chat_create_params.CompletionCreateParamsBase, ChatCompletionRequest,
                             {"messages": HI}),
    "/v1/completions": (completion_create_params.CompletionCreateParamsBase, CompletionRequest,
                        {"prompt": "a"}),
    "/v1/responses": (ResponseCreateParamsBase, ResponsesRequest, {"input": "a"}),
    "/v1/responses/input_tokens": (InputTokenCountParams, InputTokensRequest, {"input": "a"}),
    "/v1/messages": (MessageCreateParamsBase, MessagesRequest,
                     {"model": "", "max_tokens": 2, "messages": HI}),
    "/v1/messages/count_tokens": (MessageCountTokensParams, CountTokensRequest,
                                  {"model": "", "messages": HI}),
}  # fmt: skip
# The names of the APIs in the table.
_API_NAMES = "chat", "completions", "responses", "input_tokens", "messages", "count_tokens"
APIS = dict(zip(FORMS, _API_NAMES, strict=True))
_WRAPPERS = (typing.Annotated, typing.Required, typing_extensions.Required)
_NAMES = ("type", "role")  # the fields by which types of a union are told apart


def members(hint: Any) -> Iterator[Any]:
    """The types that a value, or an item of a list, may have: classes, literals, and others."""
    origin, arguments = get_origin(hint), get_args(hint)
    if isinstance(hint, typing_extensions.TypeAliasType):
        yield from members(hint.__value__)
    elif origin in _WRAPPERS:
        yield from members(arguments[0])
    elif origin in (Union, types.UnionType):
        for argument in arguments:
            yield from members(argument)
    elif isinstance(origin, type) and issubclass(origin, Iterable) and origin is not dict:
        yield from members(arguments[0]) if not issubclass(origin, Mapping) else [hint]
    else:
        yield hint


def fields_of(kind: Any) -> dict[str, Any]:
    """The type of each field of a TypedDict or a pydantic model, by its name in JSON."""
    hints = get_type_hints(kind, include_extras=True)
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return hints
    return {form.alias or name: hints[name] for name, form in kind.model_fields.items()}


def literals(hint: Any) -> set[Any]:
    return {
        value
        for member in members(hint)
        if get_origin(member) is Literal
        for value in get_args(member)
    } - {None}


def name_of(kind: Any) -> str:
    """The type or role of an object of the official client."""
    hints = fields_of(kind)
    names = [sorted(map(str, literals(hints[name]))) for name in _NAMES if name in hints]
    return ", ".join(names[0]) if names and names[0] else kind.__name__


def matches(kind: Any, form: type[BaseModel]) -> bool:
    """Whether a form may read objects of a type of the client."""
    theirs, ours = fields_of(kind), fields_of(form)
    return all(
        literals(theirs[name]) & literals(ours[name])
        for name in _NAMES
        if name in theirs.keys() & ours.keys() and literals(theirs[name]) and literals(ours[name])
    )


def refusals(theirs: Any, ours: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Each field, or value of a field, of a client's type that a form refuses."""
    own_members = list(members(ours))
    if any(member is Any or get_origin(member) is dict for member in own_members):
        return
    if {*own_members} == {types.NoneType}:
        yield path, ""
        return
    forms = [m for m in own_members if isinstance(m, type) and issubclass(m, BaseModel)]
    for member in members(theirs):
        if typing_extensions.is_typeddict(member):
            yield from refused_fields(member, forms, path)
    yield from refused_values(theirs, ours, path)


def refused_fields(kind: Any, forms: list[type[BaseModel]], path: str) -> Iterator[tuple[str, str]]:
    """Each field that no form for an object of the client takes; its type if there is no form."""
    fitting = [form for form in forms if matches(kind, form)]
    if not fitting:
        yield path, name_of(kind)
        return
    for name, hint in fields_of(kind).items():
        inner = f"{path}.{name}".lstrip(".")
        annotations = [fields_of(form)[name] for form in fitting if name in fields_of(form)]
        if annotations:
            yield from refusals(hint, Union[tuple(annotations)], inner)  # noqa: UP007
        elif name not in HINTS:
            yield inner, ""


def refused_values(theirs: Any, ours: Any, path: str) -> Iterator[tuple[str, str]]:
    """Each value of the client that is none of the literals that a form takes."""
    their_members, own_members, own_values = list(members(theirs)), {*members(ours)}, literals(ours)
    if bool in their_members and bool not in own_members:
        yield from (
            (path, str(value).lower()) for value in (True, False) if value not in own_values
        )
    if own_values and not own_members & {str, int}:
        yield from ((path, str(value)) for value in literals(theirs) - own_values)
        if {*their_members} & {str, int}:
            yield path, f"other than {', '.join(map(repr, own_values))}"


def all_refusals() -> dict[tuple[str, str], list[str]]:
    """The refused values of each field, by API and field; a field without values as a whole."""
    table: dict[tuple[str, str], list[str]] = {}
    for api, (theirs, ours, _) in FORMS.items():
        for path, value in dict.fromkeys(refusals(theirs, ours)):
            table.setdefault((path, APIS[api]), []).append(value)
    return table


def write_table(page: str = PAGES[0]) -> str:
    """The table of refusals in Markdown."""
    rows: dict[tuple[str, str], list[str]] = {}
    for (path, api), values in all_refusals().items():
        text = ", ".join(f"`{value}`" for value in sorted(values)) if any(values) else "any value"
        rows.setdefault((path, text), []).append(api)
    lines = ["| field | refused | API |", "|---|---|---|"]
    lines += [f"| `{path}` | {text} | {', '.join(apis)} |" for (path, text), apis in rows.items()]
    table = "\n".join(lines) + "\n"
    for english, chinese in _CHINESE.items() if page.endswith(".zh-CN.md") else ():
        table = table.replace(english, chinese)
    return table


_TABLE = re.compile(r"\| (?:field|字段) \| [^|]+ \| API \|\n(?:\|.*\n)+")


def table_in(text: str) -> str:
    match = _TABLE.search(text)
    return match[0] if match else ""


if __name__ == "__main__":
    for name in PAGES:
        page, table = DOCS / name, write_table(name)
        page.write_text(_TABLE.sub(lambda _, table=table: table, page.read_text()))
