"""How many replicas there may be, and on which kinds of nodes."""

from __future__ import annotations

import pytest

from duoka.errors import InfeasibleError, UsageError
from duoka.serve.on_ray.bounds import deal, read_bounds


def test_bounds_are_read() -> None:
    assert read_bounds(None) is None
    assert read_bounds("auto") is None
    assert read_bounds("3") == (3, 3)
    assert read_bounds("2-12") == (2, 12)


@pytest.mark.parametrize("text", ["", "0", "3-2", "-2", "2-", "1-2-3", "two", "²", "123456"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no number of replicas"):
        read_bounds(text)


def test_each_kind_has_replicas_in_turn() -> None:
    assert deal(None, [3, 1]) == [(3, 3), (1, 1)]
    assert deal((3, 3), [3, 1]) == [(2, 2), (1, 1)]
    assert deal((1, 1), [3, 1]) == [(1, 1), (0, 0)]
    assert deal((2, 4), [3, 1]) == [(1, 3), (1, 1)]


def test_the_first_kind_may_have_more_than_there_is_room_for() -> None:
    assert deal((2, 9), [3, 1]) == [(1, 8), (1, 1)]
    assert deal((4, 9), [3, 1]) == [(3, 8), (1, 1)]


def test_more_than_there_is_room_for_at_once_is_refused() -> None:
    with pytest.raises(InfeasibleError, match="5 replicas don't fit these nodes; 4 do"):
        deal((5, 5), [3, 1])


def test_no_kind_may_have_none() -> None:
    with pytest.raises(UsageError, match="2 kinds of nodes") as raised:
        deal((1, 3), [3, 1])
    assert raised.value.hint == "--replicas 2-3"
