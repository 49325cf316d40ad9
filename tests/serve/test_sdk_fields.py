"""Each field of the official clients is taken, or stands in the table of refusals."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, Required

import pytest
import scripted
import sdk_fields
from pydantic import Field
from typing_extensions import TypedDict

from duoka.serve.forms import HINTS, Form


@pytest.mark.parametrize("name", sdk_fields.PAGES)
def test_the_table_of_refusals_is_that_of_the_clients(name: str) -> None:
    page = (sdk_fields.DOCS / name).read_text(encoding="utf-8")
    assert sdk_fields.table_in(page) == sdk_fields.write_table(name), (
        "a client has other fields: take them, or run python tests/sdk_fields.py"
    )
    for hint in HINTS:
        assert f"`{hint}`" in page, hint


@pytest.mark.parametrize("path", sdk_fields.FORMS)
def test_a_field_of_the_table_is_refused_and_a_hint_is_not(path: str) -> None:
    theirs, form, body = sdk_fields.FORMS[path]
    app, _ = scripted.app_of(scripted.begun(), scripted.delta("a"), scripted.ended())
    refused = {
        field: values[0] == "true" or "x"
        for (field, api), values in sdk_fields.all_refusals().items()
        if api == sdk_fields.APIS[path] and values in ([""], ["true"])
    }
    for name in refused.keys() & sdk_fields.fields_of(theirs).keys():
        value = refused[name]
        (answer,) = scripted.post(app, path, {**body, name: value})
        assert answer.status_code == 400, name
        assert name in answer.json()["error"]["message"]
    hints = dict.fromkeys(HINTS - sdk_fields.fields_of(form).keys(), "x")
    (answer,) = scripted.post(app, path, {**body, **hints})
    assert answer.status_code == 200, answer.text


class Choice(TypedDict, total=False):
    type: Required[Literal["a", "b"]]
    text: str
    mode: Literal["x", "y"]
    flag: bool
    number: int
    state: str
    extra: str
    cache_control: dict[str, Any]


class Other(TypedDict, total=False):
    type: Literal["c"]


class Params(TypedDict, total=False):
    items: Required[str | Iterable[Choice | Other]]
    free: Choice


class ChoiceForm(Form):
    type: Literal["a"]
    words: str = Field("", alias="text")
    mode: Literal["x"] | None = None
    flag: Literal[False] | None = None
    number: Literal[1] | None = None
    state: None = None


class ParamsForm(Form):
    items: str | list[ChoiceForm]
    free: dict[str, Any] | None = None


def test_refusals_are_found_at_any_depth() -> None:
    assert set(sdk_fields.refusals(Params, ParamsForm)) == {
        ("items", "c"),
        ("items.type", "b"),
        ("items.mode", "y"),
        ("items.flag", "true"),
        ("items.number", "other than 1"),
        ("items.state", ""),
        ("items.extra", ""),
    }
