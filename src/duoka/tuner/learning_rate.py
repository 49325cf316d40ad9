"""Learning rate by step: transformers' schedules, with a linear warm-up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from transformers import get_scheduler

Decay = Literal["constant", "linear", "cosine"]
DECAYS: tuple[Decay, ...] = get_args(Decay)


def make_schedule(decay: Decay, num_steps: int, warmup_steps: int = 0) -> Callable[[int], float]:
    """Return the factor of the learning rate as a function of the step, counted from 0.

    Examples
    --------
    >>> factor = make_schedule("linear", 6, warmup_steps=2)
    >>> [factor(step) for step in range(6)]
    [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]
    """
    name = "constant_with_warmup" if decay == "constant" else decay
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler: Any = get_scheduler(name, optimizer, warmup_steps, num_steps)
    factor: Callable[[int], float] = scheduler.lr_lambdas[0]
    return factor
