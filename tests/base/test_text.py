from __future__ import annotations

import pytest

from duoka.base.text import choose, containing, is_within, longest_prefix, prefixes
from duoka.errors import UsageError

KNOWN = ("green", "red")


def test_a_name_is_chosen() -> None:
    assert choose("colour", "red", KNOWN) == "red"


@pytest.mark.parametrize("text", ["", "Red", "red ", "blue\x1b", None, ["red"], 3])
def test_all_else_is_refused_with_what_is_known(text: str) -> None:
    with pytest.raises(UsageError, match=r"colour .+ is unknown") as caught:
        choose("colour", text, KNOWN)
    assert caught.value.hint == "supported: green, red"


def test_names_that_contain_a_name() -> None:
    assert [*prefixes("a.b.c")] == ["a.b.c", "a.b", "a", ""]
    assert [*containing("a.b.c")] == ["a.b", "a"]
    assert [*prefixes("")] == [""]
    assert [*containing("a")] == []


@pytest.mark.parametrize(
    ("name", "entry"), [("a.b.c", "a.b"), ("a.b", "a.b"), ("a.bc", "a"), ("ab", None), ("", None)]
)
def test_the_longest_prefix_ends_at_a_dot(name: str, entry: str | None) -> None:
    assert longest_prefix(name, {"a", "a.b", "b"}) == entry
    assert longest_prefix(name, {"a", "a.b", ""}) == (entry or "")
    assert entry is None or is_within(name, entry)
