"""What runs in a fork: results and errors come back, everything else stays as it was."""

from __future__ import annotations

import os

import pytest
import torch

from duoka import virtual
from duoka.virtual import UnknownValueError
from duoka.virtual.known_values import unknown_value

KNOWN: list[int] = []


def test_a_result_comes_back_and_nothing_else_does() -> None:
    def run(number: int) -> tuple[int, int]:
        KNOWN.append(number)
        return os.getpid(), number + len(KNOWN)

    process, result = virtual.apart(run, 2)
    assert result == 3
    assert process != os.getpid()
    assert not KNOWN


def test_backward_works_there_after_it_has_here() -> None:
    def run() -> list[float]:
        with virtual.unnamed_gpus([None]):
            x = torch.ones(3, device=virtual.virtual_device(0), requires_grad=True)
            (2 * x).sum().backward()
            assert x.grad is not None
            return list(x.grad.tolist())

    torch.ones(2, requires_grad=True).sum().backward()
    assert virtual.apart(run) == [2.0] * 3
    assert virtual.apart(run) == [2.0] * 3


def test_an_unknown_value_is_one_on_this_side_too() -> None:
    def fail() -> None:
        raise unknown_value("a read")

    with pytest.raises(UnknownValueError, match=r"a read depends on .*\.py:\d+\)") as caught:
        virtual.apart(fail)
    assert caught.value.file == __file__
    assert "real numbers" in str(caught.value.hint)


def test_an_error_that_cannot_be_sent_is_told() -> None:
    class StrangeError(Exception):
        def __init__(self, one: int, other: int) -> None:
            super().__init__(f"{one} and {other}")

    def fail() -> None:
        raise StrangeError(1, 2)

    with pytest.raises(RuntimeError, match=r"StrangeError: 1 and 2"):
        virtual.apart(fail)
