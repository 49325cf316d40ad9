"""Learning rate by step: a linear warm-up, then a schedule of `transformers.get_scheduler`.

transformers starts the warm-up at a rate of 0, so that its first step has no effect; here each step
of the warm-up has the rate that the next one has there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from torch import nn

Decay = Literal[
    "cosine", "linear", "constant", "cosine_with_restarts", "polynomial", "inverse_sqrt"
]


def rate_factor(step: int, num_steps: int, warmup_steps: int, decay: Decay) -> float:
    """Return the factor on the maximum learning rate, from 0 to 1, for a step; steps count from 0.

    During the warm-up the factor grows linearly, from above 0 up to 1. After the warm-up "linear"
    and "cosine" decay to 0 at step `num_steps`.

    Examples
    --------
    >>> [rate_factor(step, 6, 2, "linear") for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return _schedule(decay, num_steps, warmup_steps)(step)


@cache
def _schedule(decay: Decay, num_steps: int, warmup_steps: int) -> Callable[[int], float]:
    """Return transformers' factor by step."""
    # Importing it starts CUDA, which only a process with a GPU of its own should do.
    from transformers import get_scheduler

    # Schedulers are made for an optimizer; its rate of 1 makes rates factors.
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0)
    name = "constant_with_warmup" if decay == "constant" else decay
    scheduler: Any = get_scheduler(name, optimizer, warmup_steps, num_steps)
    factor: Callable[[int], float] = scheduler.lr_lambdas[0]
    return factor
