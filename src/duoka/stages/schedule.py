"""Schedules: the order in which each device takes forward and backward passes of micro-batches.

- sequential: one micro-batch after another
- GPipe: all forward passes, then all backward passes (Huang et al., 2019)
- 1F1B: backward passes as soon as they can run; before that, as many micro-batches forward as there
  are devices from here to the end (PipeDream-Flush; Narayanan et al., 2021)

The order is found by simulating a step whose stages take the same time: a device takes the pass
that can begin first. The same order serves for stages of unequal length, and for devices that have
several stages. Of 1F1B with two stages and three micro-batches (B: backward, twice as long):

    time      0  1  2  3  4  5  6  7  8  9  10 11
    stage 0   0  1  .  .  B0 ── 2  B1 ── .  B2 ──
    stage 1   .  0  B0 ── 1  B1 ── 2  B2 ── .  .
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from duoka.forecast.replay_training import in_flight
from duoka.forecast.workload import Training


class ScheduledPass(NamedTuple):
    """A micro-batch forward or backward through one stage."""

    stage: int
    micro_batch: int
    is_backward: bool


class Timed(NamedTuple):
    """A pass with its begin and end; a forward pass takes 1 unit of time."""

    begin: float
    end: float
    step: ScheduledPass


def order_passes(
    devices: Sequence[str], training: Training, micro_batches: int | None = None
) -> list[Timed]:
    """Return the passes of a step by their begin.

    Parameters
    ----------
    devices : sequence of str
        The device of each stage.
    training : Training
    micro_batches : int, optional
        Less than the training's in a last step.

    Examples
    --------
    >>> training = Training(micro_batches=2, schedule="1f1b")
    >>> [timed.step[:2] for timed in order_passes(["a", "b"], training)]
    [(0, 0), (0, 1), (1, 0), (1, 0), (0, 0), (1, 1), (1, 1), (0, 1)]
    """
    if micro_batches is not None:
        training = replace(training, micro_batches=micro_batches)
    return list(_Play(devices, training).run())


def busy_shares(devices: Sequence[str], passes: Sequence[Timed]) -> dict[str, float]:
    """Return the share of a step in which each device computes; the rest is the bubble."""
    total = max(timed.end for timed in passes)
    busy = dict.fromkeys(devices, 0.0)
    for timed in passes:
        busy[devices[timed.step.stage]] += timed.end - timed.begin
    return {device: seconds / total for device, seconds in busy.items()}


# GPipe with two stages and two micro-batches; compare 1F1B above:
#
#     time      0  1  2  3  4  5  6  7  8
#     stage 0   0  1  .  .  .  B0 ── B1 ──
#     stage 1   .  0  1  B0 ── B1 ── .  .
#
# The schedules differ in two points of the simulation: how many micro-batches a stage holds
# (`_is_full`), and which pass a device takes where both could begin: GPipe forward, 1F1B backward.
class _Play:
    """A simulated step of training."""

    def __init__(self, devices: Sequence[str], training: Training) -> None:
        self._devices = devices
        self._number = training.micro_batches
        self._is_gpipe = training.schedule == "gpipe"
        order = list(dict.fromkeys(devices))
        self._limits = [in_flight(training, len(order) - order.index(at)) for at in devices]
        self._free_at = dict.fromkeys(devices, 0.0)
        self._ended: dict[ScheduledPass, float] = {}
        # Of each stage how many passes forward and backward have begun.
        self._forward = [0] * len(devices)
        self._backward = [0] * len(devices)

    def run(self) -> Iterator[Timed]:
        for _ in range(2 * self._number * len(self._devices)):
            begin, _, step = min(
                candidate for stage in range(len(self._devices)) for candidate in self._next(stage)
            )
            # Backward computes two products for each of forward's.
            seconds = 2.0 if step.is_backward else 1.0
            self._ended[step] = self._free_at[self._devices[step.stage]] = begin + seconds
            (self._backward if step.is_backward else self._forward)[step.stage] += 1
            yield Timed(begin, begin + seconds, step)

    def _next(self, stage: int) -> Iterator[tuple[float, tuple[bool, int], ScheduledPass]]:
        """Yield a stage's next passes, each with its begin and its rank among equals."""
        free_at = self._free_at[self._devices[stage]]
        forward = ScheduledPass(stage, self._forward[stage], False)
        if forward.micro_batch < self._number and not self._is_full(stage):
            previous = ScheduledPass(stage - 1, forward.micro_batch, False)
            if stage == 0 or previous in self._ended:
                ready = self._ended.get(previous, 0.0)
                yield max(free_at, ready), (not self._is_gpipe, forward.micro_batch), forward
        backward = ScheduledPass(stage, self._backward[stage], True)
        if backward.micro_batch < self._forward[stage]:
            is_last = stage == len(self._devices) - 1
            # Backward follows that of the next stage; in the last stage its own forward.
            following = ScheduledPass(stage + (not is_last), backward.micro_batch, not is_last)
            if following in self._ended:
                begin = max(free_at, self._ended[following])
                yield begin, (self._is_gpipe, backward.micro_batch), backward

    def _is_full(self, stage: int) -> bool:
        """Return True if a stage may hold no more micro-batches before a backward pass."""
        if self._is_gpipe:
            return False
        return self._forward[stage] - self._backward[stage] >= self._limits[stage]
