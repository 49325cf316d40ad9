"""The learning rate: a warm-up, and then constant, or down to nothing along a line or a cosine.

It knows nothing of optimizers: ``torch.optim.lr_scheduler.LambdaLR`` takes the factor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

Decay = Literal["constant", "linear", "cosine"]
DECAYS: tuple[Decay, ...] = get_args(Decay)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """A factor of the learning rate for each of the training's `num_steps` steps.

    So many steps of warm-up lead up to the whole rate in equal parts, the first of which isn't 0.
    After them "linear" and "cosine" would be 0 at step `num_steps`.

    Examples
    --------
    >>> rate = LearningRate(decay="linear", num_steps=6, warmup_steps=2)
    >>> [rate(step) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """

    decay: Decay = "cosine"
    num_steps: int
    warmup_steps: int = 0

    def __call__(self, step: int) -> float:
        """The factor of a step, from 0 to 1."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.decay == "constant":
            return 1.0
        if step >= self.num_steps:
            return 0.0
        progress = (step - self.warmup_steps) / (self.num_steps - self.warmup_steps)
        return 1 - progress if self.decay == "linear" else (1 + math.cos(math.pi * progress)) / 2
