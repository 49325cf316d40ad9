"""What runs on virtual GPUs by itself: results and errors come back."""

from __future__ import annotations

import pytest
import torch

from duoka import virtual
from duoka.virtual import UnknownValueError
from duoka.virtual.known_values import unknown_value


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
