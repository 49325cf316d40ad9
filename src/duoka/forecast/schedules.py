"""Schedules: when the stages of a pipeline run their passes, and how long all of them take.

A stage runs forward as long as it has fewer micro-batches in flight than it may have, and backward
otherwise, always the oldest one. With GPipe (Huang et al., 2019) all may be in flight; with one
forward, one backward (Narayanan et al., PipeDream 2019, Megatron-LM 2021) as many as there are
stages from this one to the end. A pass begins when its stage is through with the one before and
what it needs has come. Transfers don't wait for each other.

It knows nothing of what a pass is made of, nor of what comes after all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

# With more micro-batches than these the others take as long as the second half of these.
_MOST_SIMULATED = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """What the passes of one stage take, in seconds, and how many micro-batches it may hold.

    The first backward pass is told apart from later ones, which add to gradients that are there.
    `forward_transfer_seconds` is the way of what comes in from the stage before;
    `backward_transfer_seconds` and `later_transfer_seconds` that of the gradients back to it.
    """

    forward_seconds: float
    backward_seconds: float
    later_seconds: float
    in_flight: int
    forward_transfer_seconds: float = 0.0
    backward_transfer_seconds: float = 0.0
    later_transfer_seconds: float = 0.0


class _Stage:
    """A stage, the one before and the one behind it, and when its passes ended so far."""

    def __init__(self, passes: Passes) -> None:
        self.passes = passes
        self.before: _Stage | None = None
        self.behind: _Stage | None = None
        self.free = 0.0
        self.forward: list[float] = []
        self.backward: list[float] = []

    def run(self, number: int) -> None:
        """Run passes of so many micro-batches in order, until one has to wait for another stage."""
        while len(self.backward) < number:
            flying = len(self.forward) - len(self.backward)
            if len(self.forward) < number and flying < self.passes.in_flight:
                if not self._run_forward():
                    return
            elif not self._run_backward():
                return

    def _run_forward(self) -> bool:
        micro_batch, ready = len(self.forward), 0.0
        if self.before is not None:
            if micro_batch >= len(self.before.forward):
                return False
            ready = self.before.forward[micro_batch] + self.passes.forward_transfer_seconds
        self.free = max(self.free, ready) + self.passes.forward_seconds
        self.forward.append(self.free)
        return True

    def _run_backward(self) -> bool:
        micro_batch = len(self.backward)
        if self.behind is None:
            ready = self.forward[micro_batch]
        elif micro_batch >= len(self.behind.backward):
            return False
        else:
            way = self.behind.passes
            ready = self.behind.backward[micro_batch]
            ready += way.later_transfer_seconds if micro_batch else way.backward_transfer_seconds
        took = self.passes.later_seconds if micro_batch else self.passes.backward_seconds
        self.free = max(self.free, ready) + took
        self.backward.append(self.free)
        return True


def pipeline_seconds(stages: Sequence[Passes], number: int) -> float:
    """Seconds from the first forward pass to the end of the last backward pass."""
    if number <= _MOST_SIMULATED:
        return _simulate(stages, number)
    half = _MOST_SIMULATED // 2
    less, all_ = _simulate(stages, half), _simulate(stages, _MOST_SIMULATED)
    return all_ + (number - _MOST_SIMULATED) * (all_ - less) / half


def _simulate(stages: Sequence[Passes], number: int) -> float:
    line = [_Stage(passes) for passes in stages]
    for one, other in pairwise(line):
        one.behind, other.before = other, one
    while any(len(stage.backward) < number for stage in line):
        for stage in line:
            stage.run(number)
    return max(stage.free for stage in line)
