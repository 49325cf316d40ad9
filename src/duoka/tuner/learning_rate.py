"""Learning rate by step: a linear warm-up, then constant, or a linear or cosine decay to 0.

`transformers.get_scheduler` has the same decays, but starts the warm-up at a rate of 0, so that its
first step has no effect.
"""

from __future__ import annotations

import math
from typing import Literal

Decay = Literal["constant", "linear", "cosine"]


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
    if decay == "constant":
        return 1.0
    remaining = max(0, num_steps - step) / max(1, num_steps - warmup_steps)
    return remaining if decay == "linear" else (1 - math.cos(math.pi * remaining)) / 2
