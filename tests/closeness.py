"""Whether numbers agree that were computed twice.

A kernel may add in another order when its memory is aligned otherwise, on another processor, or
with another number of threads. So computed numbers agree up to a tolerance, relative to the largest
of them; only what is a copy of the same memory is held to be equal bit for bit.
"""

from __future__ import annotations

from torch import Tensor

TOLERANCE = 1e-5  # float32, through a few layers
FLOOR = 0.01  # numbers that cancel to nearly nothing are as exact as what they were made of
HALF_TOLERANCE = 0.01  # bfloat16 and float16, which carry 8 and 11 bits


def close(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> bool:
    """Whether shapes are the same, and no number is further off than the tolerance says."""
    if actual.shape != expected.shape:
        return False
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    if not expected.numel():
        return True
    scale = max(FLOOR, expected.abs().max().item())
    return (actual - expected).abs().max().item() <= tolerance * scale
