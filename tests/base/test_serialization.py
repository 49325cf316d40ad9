"""The JSON form: what comes back equals what went in, and nothing else comes in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duoka.base.serialization import OMIT_DEFAULT, from_dict, parse_json_object, to_dict
from duoka.errors import FormatError, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    name: str
    size: int
    ratio: float = 0.5
    flag: bool = False

    def __post_init__(self) -> None:
        if self.size < 0:
            raise UsageError(f"size is {self.size}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    leaves: tuple[Leaf, ...]
    pair: tuple[int, str] = (1, "one")
    best: Leaf | None = None
    choice: int | None | Literal["auto"] = "auto"
    kind: Literal["a", "b"] = "a"
    by_name: Mapping[str, tuple[float, ...]] | None = None


WHOLE = st.integers(-(2**63), 2**63 - 1)
LEAVES = st.builds(
    Leaf,
    name=st.text(),
    size=st.integers(0, 2**63 - 1),
    ratio=st.floats(allow_nan=False, allow_infinity=False),
    flag=st.booleans(),
)
TREES = st.builds(
    Tree,
    leaves=st.lists(LEAVES, max_size=3).map(tuple),
    pair=st.tuples(WHOLE, st.text()),
    best=st.none() | LEAVES,
    choice=st.none() | WHOLE | st.just("auto"),
    kind=st.sampled_from(["a", "b"]),
    by_name=st.none()
    | st.dictionaries(st.text(), st.lists(st.floats(-1e9, 1e9), max_size=3).map(tuple), max_size=3),
)


@given(TREES)
def test_round_trip_through_json_text(tree: Tree) -> None:
    assert from_dict(Tree, json.loads(json.dumps(to_dict(tree)))) == tree


def test_an_integer_serves_as_a_float() -> None:
    leaf = from_dict(Leaf, {"name": "x", "size": 1, "ratio": 2, "flag": True})
    assert leaf.ratio == 2.0
    assert type(leaf.ratio) is float


def _tree(**changes: Any) -> dict[str, Any]:
    leaf = {"name": "x", "size": 1, "ratio": 0.5, "flag": False}
    tree = to_dict(Tree(leaves=(Leaf(name="x", size=1),), best=Leaf(name="y", size=2)))
    return tree | {"leaves": [leaf]} | changes


LEAF = {"name": "x", "size": 1, "ratio": 0.5, "flag": False}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "Tree: expected an object, got list []"),
        (_tree(extra=1), "Tree.extra: unknown field"),
        (_tree(leaves=None), "Tree.leaves: expected a list, got null None"),
        (_tree(leaves=[LEAF, LEAF | {"size": 1.0}]), "Tree.leaves[1].size: expected an integer"),
        (_tree(leaves=[LEAF | {"size": True}]), "Tree.leaves[0].size: expected an integer"),
        (_tree(leaves=[LEAF | {"size": 2**63}]), "Tree.leaves[0].size: expected an integer of 64"),
        (_tree(pair=[-(2**63) - 1, ""]), "Tree.pair[0]: expected an integer of 64 bits"),
        (_tree(leaves=[LEAF | {"size": -1}]), "Tree.leaves[0]: size is -1"),
        (_tree(leaves=[LEAF | {"flag": 0}]), "Tree.leaves[0].flag: expected true or false"),
        (_tree(leaves=[LEAF | {"ratio": "1"}]), "Tree.leaves[0].ratio: expected a finite number"),
        (_tree(leaves=[LEAF | {"ratio": 10**400}]), "Tree.leaves[0].ratio: expected a finite"),
        (_tree(leaves=[{"name": "x"}]), "Tree.leaves[0].size: the field is missing"),
        (_tree(pair=[1, "a", 2]), "Tree.pair: expected 2 items, got 3"),
        (_tree(best=3), "Tree.best: expected an object, got number 3"),
        (_tree(choice="some"), "Tree.choice: expected an integer, got text 'some'; expected one"),
        (_tree(kind="c"), "Tree.kind: expected one of 'a', 'b', got text 'c'"),
        (_tree(by_name={"k": [None]}), "Tree.by_name['k'][0]: expected a finite number"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_path(data: object, message: str) -> None:
    with pytest.raises(FormatError) as caught:
        from_dict(Tree, data)
    assert str(caught.value).startswith(message)
    assert caught.value.hint


@pytest.mark.parametrize("name", ["leaves", "pair", "best", "choice", "kind", "by_name"])
def test_a_missing_field_is_named_even_if_it_has_a_default(name: str) -> None:
    data = _tree()
    del data[name]
    with pytest.raises(FormatError, match=rf"^Tree\.{name}: the field is missing"):
        from_dict(Tree, data)


def test_long_values_are_cut_in_messages() -> None:
    with pytest.raises(FormatError) as caught:
        from_dict(Tree, _tree(kind="x" * 1000))
    assert len(str(caught.value)) < 120


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        (b"\xff\xfe\xff", "not valid JSON"),
        ("[1]", "contains a JSON list"),
        ("null", "contains a JSON null"),
        ('{"a": 1, "b": 2, "a": 3}', "the key 'a' occurs twice"),
        ('{"a": {"b": 1, "b": 1}}', "the key 'b' occurs twice"),
        ('{"a": NaN}', "NaN"),
        ('{"a": -Infinity}', "Infinity"),
        ('{"a":' * 100_000, "nested too deeply"),
    ],
)
def test_bad_json_is_refused(text: str | bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        parse_json_object(text, "the file")


def test_good_json_is_parsed() -> None:
    assert parse_json_object('{"a": [1, {"b": null}]}', "the file") == {"a": [1, {"b": None}]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    name: str
    added: Leaf | None = field(default=None, metadata=OMIT_DEFAULT)


def test_an_optional_field_is_left_out_at_its_default() -> None:
    old = {"name": "a"}
    assert to_dict(Grown(name="a")) == old
    assert from_dict(Grown, old) == from_dict(Grown, {**old, "added": None}) == Grown(name="a")
    new = Grown(name="a", added=Leaf(name="b", size=1))
    assert to_dict(new)["added"]["size"] == 1
    assert from_dict(Grown, to_dict(new)) == new
    with pytest.raises(FormatError, match=r"Grown.name: the field is missing"):
        from_dict(Grown, {"added": None})
    with pytest.raises(FormatError, match=r"Grown.added.size: expected an integer"):
        from_dict(Grown, {**old, "added": {**to_dict(new)["added"], "size": "1"}})
