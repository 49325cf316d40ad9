from __future__ import annotations

import pytest

from duoka.base.text import choose
from duoka.errors import UsageError

KNOWN = ("green", "red")


def test_a_name_is_chosen() -> None:
    assert choose("colour", "red", KNOWN) == "red"


@pytest.mark.parametrize("text", ["", "Red", "red ", "blue\x1b", None, ["red"], 3])
def test_all_else_is_refused_with_what_is_known(text: str) -> None:
    with pytest.raises(UsageError, match=r"colour .+ is unknown") as caught:
        choose("colour", text, KNOWN)
    assert caught.value.hint == "known are green, red"
