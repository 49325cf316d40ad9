"""Engines that try out the largest step alone before their first request."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from duoka.forecast.serving import Capacity, StepSize, WarmUp

every_step = Capacity.warm_up_steps


def largest_step(
    self: Capacity, warm_up: WarmUp, reserved_bytes: Callable[[], int]
) -> Iterator[StepSize]:
    """Take the place of `Capacity.warm_up_steps`, which for "every" yields some hundred sizes."""
    if warm_up == "every":
        return iter(self.largest_steps()[:1])
    return every_step(self, warm_up, reserved_bytes)
