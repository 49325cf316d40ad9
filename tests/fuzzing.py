"""How many random inputs a test is fed: few by `make test`, more by `make test-all` and at night.

`make fuzz` feeds ten thousand to each reader of what others wrote: files, prompts, options. A test
that is to run there has ``@fuzz()`` above its ``@given(…)``; or the marker ``fuzz`` and
``settings(max_examples=examples())``.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st

Test = TypeVar("Test", bound=Callable[..., Any])


def examples(default: int = 100) -> int:
    """DUOKA_FUZZ_EXAMPLES if that is set; else this number, or a share of it by the profile."""
    wanted = max(default * settings().max_examples // 100, min(default, 10))
    return int(os.environ.get("DUOKA_FUZZ_EXAMPLES") or wanted)


def fuzz(default: int = 100) -> Callable[[Test], Test]:
    """Mark a property as fuzzing, and give it as many examples as are wanted."""

    def decorate(test: Test) -> Test:
        marked: Test = pytest.mark.fuzz(settings(max_examples=examples(default))(test))
        return marked

    return decorate


_NASTY: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e308, 5e-324),
    *("", "0", "\x00", "\ud800", "cuda:0", "cpu", "../..", "a" * 300, "模型", "vgpu:1", "-1"),
    *([], {}, [[]], [None], {"": None}, {"a": {"a": {"a": []}}}),
]


def told_of(error: Exception, start: str, most_characters: int) -> None:
    """Assert that an error says something, and not everything."""
    assert str(error).startswith(start)
    assert 0 < len(str(error)) <= most_characters


@st.composite
def damaged(draw: st.DrawFn, valid: Any, most: int = 3) -> Any:
    """A JSON value with a few of its parts replaced, left out, doubled or moved."""
    value = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, most))):
        value = _damage(draw, value)
    return value


def _damage(draw: st.DrawFn, value: Any) -> Any:
    """Walk down a random path; change what is found at its end."""
    is_end = not isinstance(value, dict | list) or not value or draw(st.integers(0, 5)) == 0
    if is_end:
        # A copy: what is damaged once more must not change what the next example draws from.
        nasty = st.sampled_from(_NASTY).map(copy.deepcopy)
        return draw(nasty | st.integers() | st.floats() | st.text(max_size=8))
    if isinstance(value, dict):
        key = draw(st.sampled_from(sorted(value)))
        what = draw(st.sampled_from(("deeper", "deeper", "deeper", "drop", "rename", "swap")))
        if what == "deeper":
            value[key] = _damage(draw, value[key])
        elif what == "swap":
            other = draw(st.sampled_from(sorted(value)))
            value[key], value[other] = value[other], value[key]
        else:
            kept = value.pop(key)
            if what == "rename":
                value[draw(st.sampled_from((key + "s", key.upper(), "")))] = kept
        return value
    index = draw(st.integers(0, len(value) - 1))
    what = draw(st.sampled_from(("deeper", "deeper", "deeper", "drop", "double", "swap")))
    if what == "deeper":
        value[index] = _damage(draw, value[index])
    elif what == "drop":
        del value[index]
    elif what == "double":
        value.insert(index, copy.deepcopy(value[index]))
    else:
        other = draw(st.integers(0, len(value) - 1))
        value[index], value[other] = value[other], value[index]
    return value


@st.composite
def damaged_text(draw: st.DrawFn, valid: str) -> str:
    """A text with a piece of it cut out, repeated or replaced."""
    start = draw(st.integers(0, len(valid)))
    stop = min(len(valid), start + draw(st.integers(0, 40)))
    new = draw(
        st.sampled_from(("", valid[start:stop] * 2, "}", "]", '"', ",", "\\", "1e999", "NaN"))
        | st.text(max_size=4)
    )
    return valid[:start] + new + valid[stop:]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
