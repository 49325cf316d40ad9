from __future__ import annotations

import threading

import pytest

from duoka.checkpoint.hub.snapshot import at_once


@pytest.mark.parametrize("most", [1, 3, 100])
def test_results_are_in_the_order_of_the_names(most: int) -> None:
    names = [str(number) for number in range(20)]
    found = at_once(lambda name: int(name) ** 2, names, most=most)
    assert list(found.items()) == [(name, int(name) ** 2) for name in names]
    assert at_once(int, [], most=most) == {}


def test_after_an_error_nothing_more_is_begun() -> None:
    begun: list[str] = []

    def fail(name: str) -> None:
        begun.append(name)
        raise ValueError(name)

    with pytest.raises(ValueError, match="0"):
        at_once(fail, [str(number) for number in range(1000)], most=1)
    assert begun == ["0"]


def test_they_run_at_once() -> None:
    together = threading.Barrier(4, timeout=60)
    assert len(at_once(lambda name: together.wait(), list("abcd"), most=4)) == 4
