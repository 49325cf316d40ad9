"""Steps: the quickest piece of work that goes through the stages in several passes.

It takes as long as one pass through all stages and transfers, for every further pass as long as the
slowest of them, and then as long as the longest update. The programme makes a sum small, or a
maximum, not both at once. So it makes the sum small among the placements whose parts keep within
caps, and the caps are lowered until nothing under them can be better: branch and bound over the
pairs of a cap for passes and one for updates.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .problem import NO_CAPS, Caps, Problem
from .programme import Stages


@dataclass(frozen=True, slots=True, kw_only=True)
class _Box:
    """Placements within caps whose slowest pass takes at least `pass_seconds`; the least sum."""

    caps: Caps
    pass_seconds: float
    total_seconds: float
    stages: Stages


def quickest(problem: Problem) -> tuple[Stages, float] | None:
    """A placement that nothing with as few devices beats, and its seconds; None if nothing fits.

    Afterwards the problem's caps are those that the optimum keeps within.
    """
    first = problem.cheapest()
    if first is None or not (problem.more_passes or problem.has_updates):
        return first
    num_stages = range(len(first[0]), len(first[0]) + 1)
    least = problem.least(num_stages)
    box = _Box(
        caps=NO_CAPS,
        pass_seconds=least.pass_seconds,
        total_seconds=first[1],
        stages=first[0],
    )
    best, value = first[0], math.inf
    waiting = [(_bound(problem, box, least), 0, box)]
    number = 0
    while waiting and waiting[0][0] < value:
        _, _, box = heapq.heappop(waiting)
        cost, _ = problem.judge(box.stages)
        if cost < value:
            best, value = box.stages, cost
        for caps, pass_seconds in _better(problem, box, least, value):
            found = problem.cheapest(caps, num_stages)
            if found is not None:
                stages, total = found
                child = _Box(
                    caps=caps, pass_seconds=pass_seconds, total_seconds=total, stages=stages
                )
                number += 1
                heapq.heappush(waiting, (_bound(problem, child, least), number, child))
    problem.keep_within(problem.slowest(best))
    return best, value


def _bound(problem: Problem, box: _Box, least: Caps) -> float:
    """What no placement in the box can beat."""
    more = problem.more_passes * box.pass_seconds
    return box.total_seconds + more + least.update_seconds


def _better(problem: Problem, box: _Box, least: Caps, value: float) -> Iterator[tuple[Caps, float]]:
    """Where in a box there can be placements that take less than `value`.

    None there has a smaller sum than its own, so it is the slowest pass or the longest update that
    takes less. What is yielded are caps, and what the slowest pass takes at least.
    """
    more, own = problem.more_passes, problem.slowest(box.stages)
    left = value - box.total_seconds
    caps = box.caps
    if more:
        most = (left - least.update_seconds) / more
        caps = replace(caps, pass_seconds=min(caps.pass_seconds, most))
    most = left - more * box.pass_seconds
    caps = replace(caps, update_seconds=min(caps.update_seconds, most))
    if caps.pass_seconds < own.pass_seconds or caps.update_seconds < own.update_seconds:
        yield caps, box.pass_seconds
        return
    if more and own.pass_seconds > box.pass_seconds:
        lower = math.nextafter(own.pass_seconds, -math.inf)
        yield replace(caps, pass_seconds=lower), box.pass_seconds
    if problem.has_updates:
        lower = math.nextafter(own.update_seconds, -math.inf)
        yield replace(caps, update_seconds=lower), max(own.pass_seconds, box.pass_seconds)
