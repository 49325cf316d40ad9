"""Passes: the quickest piece of work that goes through the stages in several passes.

It takes as long as one pass through all stages and transfers, for every further pass as long as the
slowest of them, and then as long as the longest update. The programme makes a sum small, or a
maximum, not both at once. So it makes the sum small among the placements whose parts keep within
caps: branch and bound over the caps for passes and for updates, until nothing that is left under
any of them can be better than what was found.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .dynamic_programme import Stages
from .problem import NO_CAPS, Caps, Problem

# Part of the time that caps are worth splitting for: below it the next placement is sought.
_WORTH = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Box:
    """Placements within caps, of which something is known.

    Their slowest part takes at least `pass_seconds`, and all of them in one pass at least `total`.
    """

    caps: Caps
    pass_seconds: float
    total: float


class _Search:
    def __init__(self, problem: Problem, first: tuple[Stages, float]) -> None:
        self.problem = problem
        self.more = problem.more_passes
        self.num_stages = range(len(first[0]), len(first[0]) + 1)
        self.least = problem.least(self.num_stages)
        self.best, self.value = first[0], problem.judge(first[0])[0]
        self.total = first[1]

    def run(self) -> tuple[Stages, float]:
        low = self.least.pass_seconds
        # With a good placement known, most of the others needn't be looked at.
        self._solve(Caps(pass_seconds=low))
        box = _Box(caps=NO_CAPS, pass_seconds=low, total=self.total)
        waiting, number = [(self._bound(box), 0, box)], 0
        while waiting and waiting[0][0] < self.value:
            box = heapq.heappop(waiting)[2]
            cheapest = self._solve(box.caps)
            if cheapest is None:
                continue
            for child in self._better(replace(box, total=cheapest[1]), cheapest[0]):
                number += 1
                heapq.heappush(waiting, (self._bound(child), number, child))
        return self.best, self.value

    def _solve(self, caps: Caps) -> tuple[Stages, float] | None:
        cheapest = self.problem.cheapest(caps, self.num_stages)
        if cheapest is not None:
            value, _ = self.problem.judge(cheapest[0])
            if value < self.value:
                self.best, self.value = cheapest[0], value
        return cheapest

    def _bound(self, box: _Box) -> float:
        """What no placement in the box can beat."""
        return box.total + self.more * box.pass_seconds + self.least.update_seconds

    def _better(self, box: _Box, stages: Stages) -> Iterator[_Box]:
        """Where in a box something can be better than the best, and than its own least sum.

        Nothing there has a smaller sum than `stages`, so it is the slowest part or the longest
        update that takes less.
        """
        slowest_parts, low = self.problem.slowest(stages), box.pass_seconds
        left = self.value - box.total
        most = (left - self.least.update_seconds) / self.more if self.more else math.inf
        caps = Caps(
            pass_seconds=min(box.caps.pass_seconds, most),
            update_seconds=min(box.caps.update_seconds, left - self.more * low),
        )
        top = min(caps.pass_seconds, math.nextafter(slowest_parts.pass_seconds, -math.inf))
        if self.more and top >= low:
            middle = (low + top) / 2
            if self.more * (top - low) < _WORTH * self.value:
                middle = top
            else:
                upper = replace(caps, pass_seconds=top)
                yield replace(box, caps=upper, pass_seconds=math.nextafter(middle, math.inf))
            yield replace(box, caps=replace(caps, pass_seconds=middle))
        if self.problem.has_updates and caps.pass_seconds >= slowest_parts.pass_seconds:
            most = min(caps.update_seconds, math.nextafter(slowest_parts.update_seconds, -math.inf))
            slowest = max(low, slowest_parts.pass_seconds) if self.more else low
            yield replace(box, caps=replace(caps, update_seconds=most), pass_seconds=slowest)


def quickest(problem: Problem) -> tuple[Stages, float] | None:
    """A placement that nothing with as few devices beats, and its seconds; None if nothing fits.

    Afterwards the problem's caps are those that the optimum keeps within.
    """
    first = problem.cheapest()
    if first is None or not (problem.more_passes or problem.has_updates):
        return first
    best, value = _Search(problem, first).run()
    problem.keep_within(problem.slowest(best))
    return best, value
