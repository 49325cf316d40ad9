"""How the learning rate goes from step to step."""

from __future__ import annotations

from typing import Any

import pytest

from duoka.tuner.learning_rate import rate_factor

DECAYS = ("constant", "linear", "cosine")


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        ("constant", [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]),
        ("linear", [0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0.25, 0.5, 0.75, 1, 1, (1 + 2**-0.5) / 2, 0.5, (1 - 2**-0.5) / 2]),
    ],
)
def test_it_warms_up_and_decays(decay: Any, expected: list[float]) -> None:
    assert [rate_factor(step, 8, 4, decay) for step in range(8)] == pytest.approx(expected)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("warmup_steps", [0, 1, 7])
def test_it_stays_between_nothing_and_the_whole(decay: Any, warmup_steps: int) -> None:
    factors = [rate_factor(step, 7, warmup_steps, decay) for step in range(7)]
    assert min(factors) > 0
    assert max(factors) == 1
    assert rate_factor(7, 7, warmup_steps, decay) == (1 if decay == "constant" else 0)
