from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duoka.models.text.messages import (
    ToolCall,
    parse_python_call,
    write_json_call,
    write_python_call,
)


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def test_a_python_call() -> None:
    code = "tool_call(city='北京', days=-2, deep={'a': [1, None, True]}, note=\"it's\")"
    call = parse_python_call(" get_weather ", f"\n {fenced(code)}\n")
    assert call == ToolCall(
        name="get_weather",
        arguments={"city": "北京", "days": -2, "deep": {"a": [1, None, True]}, "note": "it's"},
    )
    assert parse_python_call("now", fenced("tool_call()")) == ToolCall(name="now", arguments={})
    multiline = "tool_call(\n    query='a\\nb',\n)"
    assert parse_python_call("search", fenced(multiline)) == ToolCall(
        name="search", arguments={"query": "a\nb"}
    )


HOSTILE_CODE = [
    "tool_call(x=__import__('os').system('id'))",
    "tool_call(x=open('/etc/passwd').read())",
    "tool_call(x=().__class__.__bases__)",
    "tool_call(x=[i for i in range(10**9)])",
    "tool_call(x=9**9**9)",
    "tool_call(x=f'{1}')",
    "tool_call(x=lambda: 0)",
    "tool_call(x=y)",
    "tool_call(**{'x': 1})",
    "tool_call(*[1])",
    "tool_call('positional')",
    "tool_call(x=1, x=2)",
    "tool_call(x=1); tool_call(x=2)",
    "tool_call(x=1)(y=2)",
    "os.system(x='id')",
    "exec(x='1')",
    "import os",
    "tool_call(x={[]: 1})",
    "tool_call(x=1",
    "tool_call(x=1e999)",
    "tool_call(x=[{'a': -1e999}])",
    "tool_call(x=2j)",
    "tool_call(x=...)",
    "tool_call(x='\x00')",
    "tool_call(x=" + "9" * 5000 + ")",
    "tool_call(x=" + "[" * 5000 + "]" * 5000 + ")",
    "tool_call(x=" + "-" * 50_000 + "1)",
    "tool_call(x=" + "+".join("1" * 9000) + ")",
    "",
]


@pytest.mark.parametrize("code", HOSTILE_CODE, ids=range(len(HOSTILE_CODE)))
def test_hostile_python_calls(code: str) -> None:
    assert parse_python_call("get_weather", fenced(code)) is None


@pytest.mark.parametrize("name", ["", "a b", "你好", "a" * 200, ".x", "x\x00", "../x", "<|user|>"])
def test_hostile_names(name: str) -> None:
    assert parse_python_call(name, fenced("tool_call(x=1)")) is None


def test_text_around_a_block_is_an_answer() -> None:
    assert parse_python_call("Example", "so:\n" + fenced("tool_call(x=1)")) is None
    assert parse_python_call("Example", "tool_call(x=1)") is None
    assert parse_python_call("Example", "x" * 10**6) is None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(arguments=st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), VALUES, max_size=4))
def test_what_is_written_is_read(arguments: dict[str, object]) -> None:
    import keyword

    call = ToolCall(
        name="do", arguments={k: v for k, v in arguments.items() if not keyword.iskeyword(k)}
    )
    assert json.loads(write_json_call(call)) == call.arguments
    assert parse_python_call("do", write_python_call(call)) == call
