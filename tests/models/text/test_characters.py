from __future__ import annotations

import json

import pytest
from fuzzing import JSON, damaged_text, fuzz
from hypothesis import given
from hypothesis import strategies as st

from duoka.models.text.characters import CharacterReader, Characters, NoCall


def taken(text: str) -> tuple[int, bool]:
    """The number of characters that a value can have, and whether it is whole then."""
    kept: list[str] = []
    script = read_value(CharacterReader(), kept)
    next(script)
    try:
        for char in text:
            script.send(char)
    except StopIteration:
        return len(kept), True
    except NoCall:
        pass
    return len(kept), False


def read_value(reader: CharacterReader, kept: list[str]) -> Characters:
    first = yield from reader.take()
    return (yield from reader.json_value(first, kept.append))


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=lambda name: {}[name])
    except (ValueError, KeyError):
        return False
    return True


@fuzz()
@given(value=JSON, indent=st.none() | st.integers(0, 2))
def test_what_is_written_can_come(value: object, indent: int | None) -> None:
    text = json.dumps([value], indent=indent).replace("NaN", "0").replace("Infinity", "1")
    assert taken(text + "x") == (len(text), True)


@fuzz()
@given(data=st.data(), value=JSON)
def test_damaged_texts_are_whole_where_they_are_json(data: st.DataObject, value: object) -> None:
    text = data.draw(damaged_text(json.dumps({"a": value}, allow_nan=True))).lstrip(" \t\n\r")
    size, is_whole = taken(text + "\x00")
    assert is_json(text[:size]) == is_whole
    if is_json(text) and isinstance(json.loads(text), dict):
        assert (size, is_whole) == (len(text.rstrip()), True)


@pytest.mark.parametrize("number", ["0", "-1.5e+10", "12", "0.25E-3"])
def test_a_number_alone_ends_before_what_follows(number: str) -> None:
    for end in (",", "}", " ", "x"):
        assert taken(number + end) == (len(number), True)
    assert taken(number) == (len(number), False)


@pytest.mark.parametrize("text", ["01", "-", "1.", "1e", "--1", "+1", ".5", "nul", "[1,]", '{"a"}'])
def test_what_is_no_json(text: str) -> None:
    assert not taken(text + " ")[1]


def test_depth_and_length_have_limits() -> None:
    assert taken("[" * 64 + "]" * 64) == (128, True)
    assert taken("[" * 65) == (64, False)
    assert taken("1" * 1000) == (400, False)
