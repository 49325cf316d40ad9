"""Schedules: the order in which each device takes forward and backward passes of micro-batches.

- sequential: one micro-batch after another
- GPipe: all forward passes, then all backward passes (Huang et al., 2019)
- 1F1B: backward passes as soon as they can run; a stage holds at most as many micro-batches between
  forward and backward as there are devices from its own to the end of the pipeline
  (PipeDream-Flush; Narayanan et al., 2021)

The order is found by simulating a step whose stages all take the same time: each device takes the
pass that can begin first. The order is used for stages of unequal time, too, and for devices with
several stages. 1F1B with two stages and three micro-batches (B: backward, twice as long):

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
    """The forward or backward pass of one micro-batch through one stage."""

    stage: int
    micro_batch: int
    is_backward: bool


class Timed(NamedTuple):
    """A pass with its simulated begin and end; a forward pass takes 1 unit of time."""

    begin: float
    end: float
    step: ScheduledPass


def order_passes(
    devices: Sequence[str], training: Training, micro_batches: int | None = None
) -> list[Timed]:
    """Simulate a training step, and return its passes in the order in which they begin.

    Parameters
    ----------
    devices : sequence of str
        The device of each stage.
    training : Training
    micro_batches : int, optional
        The number of micro-batches of this step, by default the training's.

    Examples
    --------
    >>> training = Training(micro_batches=2, schedule="1f1b")
    >>> [timed.step[:2] for timed in order_passes(["a", "b"], training)]
    [(0, 0), (0, 1), (1, 0), (1, 0), (0, 0), (1, 1), (1, 1), (0, 1)]
    """
    if micro_batches is not None:
        training = replace(training, micro_batches=micro_batches)
    return list(_Simulation(devices, training).run())


def busy_shares(devices: Sequence[str], passes: Sequence[Timed]) -> dict[str, float]:
    """Return each device's busy share of the step's time; the rest is the pipeline bubble."""
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
# The schedules differ in two points of the simulation: the number of micro-batches that a stage may
# hold (`_is_full`), and the pass that a device takes if a forward and a backward pass can begin at
# the same time: GPipe takes forward, 1F1B backward.
class _Simulation:
    """A simulated training step."""

    def __init__(self, devices: Sequence[str], training: Training) -> None:
        self._devices = devices
        self._num_micro_batches = training.micro_batches
        self._is_gpipe = training.schedule == "gpipe"
        order = list(dict.fromkeys(devices))
        self._limits = [in_flight(training, len(order) - order.index(at)) for at in devices]
        self._free_at = dict.fromkeys(devices, 0.0)
        self._ended: dict[ScheduledPass, float] = {}
        # The number of forward and of backward passes that have begun, by stage.
        self._forward = [0] * len(devices)
        self._backward = [0] * len(devices)

    def run(self) -> Iterator[Timed]:
        """Yield all passes of the step, the next one to begin each time."""
        for _ in range(2 * self._num_micro_batches * len(self._devices)):
            begin, _, step = min(
                candidate for stage in range(len(self._devices)) for candidate in self._next(stage)
            )
            # Backward computes two matrix products for each one of forward.
            seconds = 2.0 if step.is_backward else 1.0
            self._ended[step] = self._free_at[self._devices[step.stage]] = begin + seconds
            (self._backward if step.is_backward else self._forward)[step.stage] += 1
            yield Timed(begin, begin + seconds, step)

    def _next(self, stage: int) -> Iterator[tuple[float, tuple[bool, int], ScheduledPass]]:
        """Yield a stage's passes that can run next: the begin, a rank to break ties, the pass."""
        free_at = self._free_at[self._devices[stage]]
        forward = ScheduledPass(stage, self._forward[stage], False)
        if forward.micro_batch < self._num_micro_batches and not self._is_full(stage):
            previous = ScheduledPass(stage - 1, forward.micro_batch, False)
            if stage == 0 or previous in self._ended:
                ready = self._ended.get(previous, 0.0)
                yield max(free_at, ready), (not self._is_gpipe, forward.micro_batch), forward
        backward = ScheduledPass(stage, self._backward[stage], True)
        if backward.micro_batch < self._forward[stage]:
            is_last = stage == len(self._devices) - 1
            # Backward follows the next stage's backward; in the last stage its own forward.
            following = ScheduledPass(stage + (not is_last), backward.micro_batch, not is_last)
            if following in self._ended:
                begin = max(free_at, self._ended[following])
                yield begin, (self._is_gpipe, backward.micro_batch), backward

    def _is_full(self, stage: int) -> bool:
        """Return True if a stage may hold no more micro-batches before a backward pass."""
        if self._is_gpipe:
            return False
        return self._forward[stage] - self._backward[stage] >= self._limits[stage]
