"""Filling: the devices in the user's order, each filled as far as it goes before the next."""

from __future__ import annotations

import numpy as np

from .problem import Problem
from .programme import Stage, Stages


def fill(problem: Problem, num_blocks: int, num_devices: int) -> Stages:
    """Find the placement in the order of devices whose block counts are lexicographically largest.

    A device may be left out where nothing of what is left fits it. It takes as many blocks as
    leave the rest a place, which may be fewer than it could hold.

    Raises
    ------
    NoPlacement, UsageError
        If nothing fits in this order, or no placement obeys the limits.
    """
    while (stages := furthest(problem, num_blocks, num_devices)) is not None:
        if problem.settle(stages):
            return stages
    raise problem.none()


def furthest(problem: Problem, num_blocks: int, num_devices: int) -> Stages | None:
    """The best placement as far as is known, where stages may still turn out not to fit."""
    tables = [problem.may_be(problem.group_of(device)) for device in range(num_devices)]
    done = np.zeros(num_blocks + 1, np.bool_)
    done[-1] = True
    # By device: from which blocks on the rest has a place on it and those after it.
    reach = [done]
    for table in reversed(tables):
        reach.append(reach[-1] | np.any(table & reach[-1][None, :], axis=1))
    reach.reverse()
    if not reach[0][0]:
        return None
    stages, start = [], 0
    for device, table in enumerate(tables):
        stops = np.flatnonzero(table[start] & reach[device + 1])
        if len(stops):
            stop = int(stops[-1])
            stages.append(Stage(start=start, stop=stop, device=device))
            start = stop
    return tuple(stages)
