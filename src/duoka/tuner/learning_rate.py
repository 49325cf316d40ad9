"""Learning rate by step: a linear warm-up, then constant, or a linear or cosine decay to 0.

`transformers.get_scheduler` has the same decays, but begins its warm-up at 0: a first step without
effect.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

Decay = Literal["constant", "linear", "cosine"]
DECAYS: tuple[Decay, ...] = get_args(Decay)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """Factor of the learning rate for each of the training's `num_steps` steps.

    The warm-up leads up to the full rate in equal steps, the first above 0. After the warm-up
    "linear" and "cosine" decay to 0 at step `num_steps`.

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
        """Return the factor of a step, from 0 to 1."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.decay == "constant":
            return 1.0
        if step >= self.num_steps:
            return 0.0
        progress = (step - self.warmup_steps) / (self.num_steps - self.warmup_steps)
        return 1 - progress if self.decay == "linear" else (1 + math.cos(math.pi * progress)) / 2
