"""How the learning rate goes from step to step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import get_scheduler

from duoka.tuner.learning_rate import rate_factor

DECAYS = ("constant", "linear", "cosine")
FURTHER = (*DECAYS, "cosine_with_restarts", "polynomial", "inverse_sqrt")


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
    if warmup_steps < 7:
        assert rate_factor(7, 7, warmup_steps, decay) == (1 if decay == "constant" else 0)


@pytest.mark.parametrize("decay", FURTHER)
def test_it_is_that_of_transformers_one_step_ahead_in_the_warm_up(decay: Any) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3.0)
    name = "constant_with_warmup" if decay == "constant" else decay
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=3, num_training_steps=9)
    rates = []
    for _ in range(9):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    expected = rates[1:4] + rates[3:]  # without the step at a rate of 0
    assert [3 * rate_factor(step, 9, 3, decay) for step in range(9)] == pytest.approx(
        expected, abs=1e-6
    )
