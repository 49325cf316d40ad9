"""Engines that try out the largest steps alone before their first request, as for short runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from duoka.forecast.serving import Capacity, StepSize, WarmUp

every_step = Capacity.warm_up_steps


def largest_steps(
    self: Capacity, warm_up: WarmUp, reserved_bytes: Callable[[], int]
) -> Iterator[StepSize]:
    """Take the place of `Capacity.warm_up_steps`, which for "every" yields some hundred sizes."""
    return every_step(self, "largest" if warm_up == "every" else warm_up, reserved_bytes)
