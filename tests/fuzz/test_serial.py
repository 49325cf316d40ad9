"""The reader of all of duoka's JSON, on types of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fuzzing import JSON, damaged, damaged_text, fuzz, told_of
from hypothesis import given
from hypothesis import strategies as st

from duoka.base.serialization import from_dict, parse_json_object, to_dict
from duoka.errors import FormatError


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    name: str
    number: int | None
    share: float
    kind: Literal["a", "b", 3]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    leaves: tuple[Leaf, ...]
    pair: tuple[int, str]
    named: Mapping[str, Leaf | int]
    on: bool = True


LEAF = Leaf(name="x", number=None, share=0.5, kind=3)
VALID = to_dict(Tree(leaves=(LEAF, LEAF), pair=(1, "y"), named={"": LEAF, "n": 7}))


def check(told: object) -> None:
    try:
        tree = from_dict(Tree, told)
    except FormatError as error:
        told_of(error, "Tree", 1000)
        return
    assert isinstance(tree, Tree)
    assert json.loads(json.dumps(to_dict(tree))) == json.loads(json.dumps(told))


@fuzz()
@given(damaged(VALID) | JSON)
def test_values(told: Any) -> None:
    check(told)


@fuzz()
@given(damaged_text(json.dumps(VALID)) | st.text() | st.binary())
def test_texts(text: str | bytes) -> None:
    try:
        told = parse_json_object(text, "it")
    except FormatError:
        return
    # What is taken is JSON to a strict reader too, and an object; and no key is lost.
    assert isinstance(told, dict)
    json.dumps(told, allow_nan=False)
    check(told)
