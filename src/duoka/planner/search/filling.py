"""Filling: the devices in the user's order, each filled as far as it goes before the next."""

from __future__ import annotations

import numpy as np

from .dynamic_programme import Stage, Stages
from .problem import Problem


def fill(problem: Problem, num_blocks: int, num_devices: int) -> Stages:
    """Find the placement in the order of devices whose block counts are lexicographically largest.

    A device may be left out where nothing of what is left fits it. It takes as many blocks as
    leave the rest a place, which may be fewer than it could hold.
    """
    while (stages := furthest(problem, num_blocks, num_devices)) is not None:
        if problem.settle(stages):
            return stages
    raise problem.none()


def furthest(problem: Problem, num_blocks: int, num_devices: int) -> Stages | None:
    """The best placement as far as is known, where stages may still turn out not to fit."""
    groups = [problem.group_of(device) for device in range(num_devices)]
    # By device, [number of stages, block]: whether what is left from a block on has a place on it
    # and those after it, in so many stages.
    reach = [np.zeros((num_devices + 1, num_blocks + 1), np.bool_)]
    reach[0][0, -1] = True
    for group in reversed(groups):
        before = reach[-1].copy()
        for place in range(1, num_devices + 1):
            fits = problem.may_be(group, place) & reach[-1][place - 1]
            before[place] |= np.any(fits, axis=1)
        reach.append(before)
    reach.reverse()
    stages, start = [], 0
    lefts = {place for place in range(num_devices + 1) if reach[0][place, 0]}
    if not lefts:
        return None
    for device, group in enumerate(groups):
        after = reach[device + 1]
        stops = {
            left: np.flatnonzero(problem.may_be(group, left)[start] & after[left - 1])
            for left in lefts - {0}
        }
        stop = max((int(here[-1]) for here in stops.values() if len(here)), default=start)
        if stop > start:
            stages.append(Stage(start=start, stop=stop, device=device))
            lefts = {left - 1 for left, here in stops.items() if stop in here}
            start = stop
        else:
            lefts = {left for left in lefts if after[left, start]}
    return tuple(stages)
