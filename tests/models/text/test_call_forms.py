from __future__ import annotations

import json
import keyword
import sys
from typing import Any

import pytest
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st

from duoka.base.answer_parts import AnswerPart
from duoka.models.text.messages import ToolCall

from . import answers
from .answers import FORMS, calls, content, read, reader, text_in, told, write

NAMES = sorted(FORMS)
BEIJING = ToolCall(name="get_weather", arguments={"city": "北京", "days": 2})
SEARCH = ToolCall(name="search-web", arguments={"query": 'a "b" \\ {c}', "n": [1, None, True]})
EMPTY = ToolCall(name="get", arguments={})

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
KEYS = st.from_regex(r"[a-z_]{1,8}", fullmatch=True).filter(lambda key: not keyword.iskeyword(key))
# Between tags texts stand as they are; a text is read as one where a schema says so.
WEATHER_CALLS = st.fixed_dictionaries(
    {},
    optional={
        "city": st.text(st.characters(exclude_characters="<\n", exclude_categories=["Cs"])),
        "days": st.integers(),
        "note": st.none(),
    },
).map(lambda arguments: ToolCall(name="get_weather", arguments=arguments))
ANY_CALLS = st.builds(
    ToolCall, name=st.sampled_from(sorted(answers.SCHEMAS)), arguments=st.dictionaries(KEYS, VALUES)
)


def cut(draw: st.DrawFn, text: str) -> list[str]:
    places = draw(st.lists(st.integers(0, len(text)), max_size=12).map(sorted))
    return [text[start:stop] for start, stop in zip([0, *places], [*places, None], strict=True)]


@pytest.mark.parametrize("name", NAMES)
@fuzz()
@given(data=st.data())
def test_what_a_family_writes_is_read_however_it_is_cut(name: str, data: st.DataObject) -> None:
    is_tagged = name in ("glm4.5", "qwen3-coder")
    said = data.draw(st.lists(WEATHER_CALLS if is_tagged else ANY_CALLS, min_size=1, max_size=3))
    text = write(name, said)
    pieces = data.draw(st.composite(cut)(text))
    answer = reader(FORMS[name])
    whole = read(answer, [text])
    assert read(reader(FORMS[name]), pieces) == whole
    assert calls(whole) == said
    assert content(whole) == ""
    assert answer.num_calls == len(said)


@pytest.mark.parametrize("name", NAMES)
def test_content_and_reasoning_around_calls(name: str) -> None:
    turn = FORMS[name].turn
    before = "" if name == "llama" else f"I look it up.\n{turn}"
    text = f"\n<think>\nthe <tool_call> of\n</think>\n\n{before}{write(name, [BEIJING, EMPTY])}"
    parts = read(reader(FORMS[name]), list(text))
    assert text_in(parts, "reasoning") == "the <tool_call> of"
    assert content(parts) == ("" if name == "llama" else "I look it up.")
    assert calls(parts) == [BEIJING, EMPTY]


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_told_as_they_come(name: str) -> None:
    call = ToolCall(name="get_weather", arguments={"city": "x" * 50, "note": "y" * 50})
    text = write(name, [call])
    answer = reader(FORMS[name])
    early = answer.feed(text[: text.index("yy")])
    if name == "chatglm3":  # a line of Python is known when it ends
        assert early == []
    else:
        assert early[0] == AnswerPart("tool_name", "get_weather")
        assert "x" * 50 in early[1].text
    assert calls([*early, *answer.feed(text[text.index("yy") :]), *answer.finish()]) == [call]


@pytest.mark.parametrize("name", NAMES)
def test_other_names_and_no_tools(name: str) -> None:
    other = write(name, [ToolCall(name="rm", arguments={"x": 1})])
    known = write(name, [BEIJING])
    for text, schemas in ((other, None), (known, {})):
        parts = read(reader(FORMS[name], schemas=schemas), [text])
        assert parts == [AnswerPart("content", text.strip())]


BROKEN = {
    "chatglm3": "get_weather\n ```python\ntool_call(city=open('x'))\n```",
    "glm4": 'get_weather\n["city"]',
    "glm4.5": "<tool_call>get_weather\n<arg>city</arg></tool_call>",
    "qwen3-coder": "<tool_call>\n<function=get_weather>\ncity\n</function>",
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": 1}\n</tool_call>',
    "llama": '{"name": "get_weather", "temperature": 3}',
    "mistral": '[TOOL_CALLS] [{"arguments": {}}]',
    "mistral-named": "[TOOL_CALLS]get_weather[ARGS]city",
}


@pytest.mark.parametrize("name", NAMES)
def test_what_only_looks_like_a_call_is_content(name: str) -> None:
    text = BROKEN[name]
    assert read(reader(FORMS[name]), list(text)) == [AnswerPart("content", text)]


@pytest.mark.parametrize("name", NAMES)
def test_calls_that_break_off(name: str) -> None:
    text = write(name, [BEIJING])
    cut_off = text[: text.index("days") + 3].strip()
    answer = reader(FORMS[name])
    parts = read(answer, [cut_off])
    assert (calls(parts), answer.num_calls) == ([], 0)
    if name != "chatglm3":
        assert parts[0] == AnswerPart("tool_name", "get_weather")


@pytest.mark.parametrize("is_forced", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_calls_that_a_limit_cuts_leave_no_mark_of_theirs(name: str, is_forced: bool) -> None:
    text = write(name, [BEIJING, SEARCH]).strip()
    whole = told(read(reader(FORMS[name]), [text]))
    marker = FORMS[name].markers[0] if name != "llama" and FORMS[name].markers else ""
    for end in range(len(text)):
        answer = reader(FORMS[name], is_forced=is_forced)
        streamed = read(answer, text[:end], is_cut=True)
        at_once = read(reader(FORMS[name], is_forced=is_forced), [text[:end]], is_cut=True)
        assert streamed == at_once
        for (called, arguments), (name_of_it, all_of_them) in zip(
            told(streamed), whole, strict=False
        ):
            assert called == name_of_it
            assert all_of_them.startswith(arguments)
        said = content(streamed)
        if is_forced:
            assert said == ""
        elif marker:  # of which a part alone may be a text
            assert said == "" or (said != marker and marker.startswith(said))
        else:  # a message may begin so
            assert text[:end].rstrip().endswith(said)
            assert answer.num_calls == len(told(streamed)) or not said


@pytest.mark.parametrize("name", [name for name in NAMES if name != "llama"])
def test_a_call_after_a_broken_one(name: str) -> None:
    turn = FORMS[name].turn
    text = f"{BROKEN[name]}{turn}\n{write(name, [BEIJING])}"
    assert calls(read(reader(FORMS[name]), list(text))) == [BEIJING]


def test_keys_in_any_order_and_arguments_in_a_text() -> None:
    for said in (
        {"arguments": {"city": "北京", "days": 2}, "name": "get_weather"},
        {"name": "get_weather", "arguments": '{"city": "北京", "days": 2}'},
        {"type": "function", "id": 1, "parameters": BEIJING.arguments, "name": "get_weather"},
    ):
        text = f"<tool_call>{json.dumps(said)}</tool_call>"
        parts = read(reader(FORMS["hermes"]), [text])
        assert (calls(parts), content(parts)) == ([BEIJING], "")
    for odd in ('{"name": "get", "name": "get", "arguments": {}}', '{"arguments": {}}', "{}"):
        parts = read(reader(FORMS["hermes"]), [f"<tool_call>{odd}"])
        assert parts[0] == AnswerPart("content", f"<tool_call>{odd}")


@pytest.mark.parametrize("name", ["hermes", "glm4.5", "qwen3-coder"])
def test_a_tag_that_should_have_ended_a_call_begins_the_next(name: str) -> None:
    begin = {"hermes": "", "glm4.5": "get", "qwen3-coder": "<function=get>"}[name]
    if name == "hermes":
        first = write(name, [EMPTY]).removesuffix("</tool_call>")
        expected = [EMPTY, BEIJING]
    else:
        first, expected = f"<tool_call>{begin}", [BEIJING]
    parts = read(reader(FORMS[name]), list(first + write(name, [BEIJING])))
    assert calls(parts) == expected
    assert content(parts) == ("" if name == "hermes" else first)


def test_arguments_that_hold_a_key_twice_are_not_whole() -> None:
    answer = reader(FORMS["glm4"])
    assert told(read(answer, ['get\n{"a": 1, "a": 2}'])) == [("get", '{"a": 1, "a": 2}')]
    assert answer.num_calls == 0


def test_values_between_tags_by_their_schema() -> None:
    pairs = {"city": "123", "days": "3", "note": "null", "other": "[1]", "more": "x y"}
    written = "".join(
        f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in pairs.items()
    )
    parts = read(reader(FORMS["glm4.5"]), [f"<tool_call>get_weather{written}</tool_call>"])
    (call,) = calls(parts)
    assert call.arguments == {"city": "123", "days": 3, "note": None, "other": [1], "more": "x y"}


def test_an_older_form_behind_mistrals_token() -> None:
    for text in (
        '[TOOL_CALLS]get_weather{"city": "北京", "days": 2}',
        '[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS] {"city": "北京", "days": 2}',
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "北京", "days": 2}}]',
    ):
        assert calls(read(reader(FORMS["mistral-named"]), [text])) == [BEIJING]


def test_a_python_tag_before_an_object_and_before_a_program() -> None:
    text = '<|python_tag|>{"name": "get", "parameters": {}}'
    assert calls(read(reader(FORMS["llama"]), [text])) == [EMPTY]
    program = "<|python_tag|>print(1)"
    assert read(reader(FORMS["llama"]), [program]) == [AnswerPart("content", program)]


MARKS = [
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|assistant|>", "<think>"),
    *("</think>", "<function=get>", "<parameter=a>", "</parameter>", "</function>", "```python\n"),
    *("get_weather", "get", "\n", " ", "{", "}", "[", "]", '"', ":", ",", ";", "\\", "<", "1"),
    *('{"name": "get", "arguments": ', '{"name": "get", "parameters": {', "tool_call(", ")"),
    *("```", "true", "-", "\x00", "模", "\ud800"),
]


@pytest.mark.parametrize("name", NAMES)
@fuzz()
@given(data=st.data())
def test_hostile_texts_are_read_however_they_are_cut(name: str, data: st.DataObject) -> None:
    marks = data.draw(st.lists(st.sampled_from(MARKS) | st.text(max_size=3), max_size=30))
    text = "".join(marks)
    is_reasoning = data.draw(st.booleans())
    whole, parts = (
        read(reader(FORMS[name], is_reasoning=is_reasoning), pieces)
        for pieces in ([text], data.draw(st.composite(cut)(text)))
    )
    assert parts == whole
    if not told(parts):
        kept, said = text, text_in(parts, "reasoning") + content(parts)
        for mark in ("<|assistant|>", "<think>", "</think>"):
            kept, said = kept.replace(mark, ""), said.replace(mark, "")
        assert "".join(said.split()) == "".join(kept.split())


HOSTILE: dict[str, Any] = {
    "brackets": '<tool_call>{"name": "get", "arguments": {"a": ' + "[" * 200_000,
    "strings": '<tool_call>{"name": "get", "arguments": {"a": "' + "x" * 200_000,
    "marks": "<tool_call>" * 20_000,
    "halves": "<tool_cal" * 20_000,
    "space": "get_weather" + " " * 200_000,
    "lines": "\n" * 200_000,
    "numbers": "[TOOL_CALLS]get[ARGS]{" + '"a": ' + "1" * 200_000,
    "pairs": "<tool_call>get" + "<arg_key>a</arg_key><arg_value>1</arg_value>" * 5_000,
    "turns": "get\n<|assistant|>" * 10_000,
    "fences": "get\n```python\n" + "`" * 200_000,
    "semicolons": '{"name": "get", "parameters": {}};' * 6_000,
}


def num_calls_of(text: str, name: str) -> int:
    """How many functions of Python are called for a text; time would say more of the machine."""
    number = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal number
        number += event in ("call", "c_call")

    answer = reader(FORMS[name])
    sys.setprofile(count)
    try:
        parts = [*answer.feed(text), *answer.finish()]
    finally:
        sys.setprofile(None)
    assert len(told(parts)) <= 128
    return number


@pytest.mark.parametrize("hostile", sorted(HOSTILE))
@pytest.mark.parametrize("name", NAMES)
def test_work_grows_with_the_text(name: str, hostile: str) -> None:
    text = HOSTILE[hostile]
    half, whole = text[: len(text) // 20], text[: len(text) // 10]
    assert num_calls_of(whole, name) <= 2.5 * num_calls_of(half, name) + 5_000


def test_a_call_without_end_is_content() -> None:
    text = '<tool_call>{"name": "' + "x" * 2**20
    assert read(reader(FORMS["hermes"]), [text]) == [AnswerPart("content", text)]
