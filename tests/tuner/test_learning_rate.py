"""How the learning rate goes from step to step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from duoka.tuner.learning_rate import DECAYS, LearningRate


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        ("constant", [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]),
        ("linear", [0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0.25, 0.5, 0.75, 1, 1, (1 + 2**-0.5) / 2, 0.5, (1 - 2**-0.5) / 2]),
    ],
)
def test_it_warms_up_and_decays(decay: Any, expected: list[float]) -> None:
    rate = LearningRate(decay=decay, num_steps=8, warmup_steps=4)
    assert [rate(step) for step in range(8)] == pytest.approx(expected)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("warmup_steps", [0, 1, 7])
def test_it_stays_between_nothing_and_the_whole(decay: Any, warmup_steps: int) -> None:
    rate = LearningRate(decay=decay, num_steps=7, warmup_steps=warmup_steps)
    factors = [rate(step) for step in range(7)]
    assert min(factors) > 0
    assert max(factors) == 1
    assert rate(7) == rate(1000) == (1 if decay == "constant" else 0)


def test_the_optimizer_has_it() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    rate = LearningRate(decay="linear", num_steps=4, warmup_steps=2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    seen = []
    for _ in range(4):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert seen == [0.25, 0.5, 0.5, 0.25]
