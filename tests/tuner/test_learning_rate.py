"""The learning rate by step."""

from __future__ import annotations

from typing import Any

import pytest

from duoka.tuner.learning_rate import make_schedule


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        ("constant", [0, 0.25, 0.5, 0.75, 1, 1, 1, 1, 1]),
        ("linear", [0, 0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25, 0]),
        ("cosine", [0, 0.25, 0.5, 0.75, 1, (1 + 2**-0.5) / 2, 0.5, (1 - 2**-0.5) / 2, 0]),
    ],
)
def test_it_warms_up_and_decays(decay: Any, expected: list[float]) -> None:
    factor = make_schedule(decay, 8, warmup_steps=4)
    assert [factor(step) for step in range(9)] == pytest.approx(expected)
    assert make_schedule(decay, 8)(0) == 1
