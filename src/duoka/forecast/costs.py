"""Training costs: what stages of a training step cost, as the search asks for it.

With one forward, one backward, a stage holds as many micro-batches as there are stages from it to
the end: what it needs depends on its blocks and on its place from the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from duoka.hardware.device import Device

from .allocator import rounded_bytes
from .forecast import Costs, Findings, between
from .profile import Kind, Profile, Ref, evaluate
from .replay_training import (
    ACCUMULATE,
    BACKWARD,
    FORWARD,
    STATES,
    TEMPORARIES,
    Rehearsal,
    in_flight,
)
from .workload import Training, Workload

Ints = NDArray[np.int64]

_NEVER = 2**60
"""More bytes than any budget."""


def costs_of(profile: Profile, workload: Workload, findings: Findings | None = None) -> Costs:
    """What stages cost at a workload, be it inference or training.

    `findings` is what other workloads have told.
    """
    if workload.training is not None:
        return TrainingCosts(profile, workload, findings)
    return Costs(profile, workload, findings)


class TrainingCosts(Costs):
    """A profile for training at one workload.

    Parameters
    ----------
    profile : Profile
    workload : Workload
        With training, and its dtype resolved.
    findings : Findings, optional
        What other workloads have told.
    """

    def __init__(
        self, profile: Profile, workload: Workload, findings: Findings | None = None
    ) -> None:
        assert workload.training is not None, "the workload is to train"
        self.training: Training = workload.training
        self._by_place: dict[int, Ints] = {}
        super().__init__(profile, workload, findings)

    @property
    def num_places(self) -> int:
        """As many as there can be micro-batches in flight, where that depends on the place."""
        return self.training.micro_batches if self.training.schedule == "1f1b" else 1

    @property
    def has_returns(self) -> bool:
        """A rehearsal knows nothing of copies by way of a third device."""
        return False

    @property
    def more_passes(self) -> int:
        """Micro-batches that follow the first one through a pipeline."""
        return self.times.num_passes - 1

    def update_seconds(self, device: Device) -> NDArray[np.float64]:
        """Seconds of the optimizer's update, [start, stop]."""
        return between(self.times.updates_on(device))

    def bounds_at(self, place: int) -> Ints:
        """[start, stop]: never more than the exact bytes of a stage at this place."""
        place = min(place, self.num_places)
        if place not in self._by_place:
            self._by_place[place] = _Bounds(self, place).table()
        return self._by_place[place]

    def replay(self, *, brief: bool, place: int = 1) -> Rehearsal:
        """A rehearsal of a stage at a place from the end."""
        return Rehearsal(self.profile, self.workload, place=place)

    def _lower_bounds(self) -> Ints:
        return self.bounds_at(1)


class _Bounds:
    """Lower bounds of stages: what blocks hold of their own at the peaks of a step."""

    def __init__(self, costs: TrainingCosts, place: int) -> None:
        self.costs = costs
        self.training = costs.training
        self.flying = in_flight(costs.training, place)
        self.rehearsal = Rehearsal(costs.profile, costs.workload, place=place)
        self.num = costs.num_blocks

    def table(self) -> Ints:
        """[start, stop]."""
        places = [self.costs.blocks_of(place, place + 1) for place in range(self.num)]
        weights = self._summed(places, lambda kind: kind.weight_bytes)
        trained = self._summed(places, lambda kind: kind.trained_bytes)
        saved = np.array([self._saved(blocks[0]) for blocks in places], np.int64)
        forward, backward, accumulate = (
            self._most(saved, np.array([self._peak(blocks, step) for blocks in places], np.int64))
            for step in (FORWARD, BACKWARD, ACCUMULATE)
        )
        optimizer, number = self.training.optimizer, self.training.micro_batches
        flying = _between(_prefix(saved))
        # While one micro-batch passes, so many others are saved; while gradients are there, fewer
        # where all of them fly at first.
        others = (self.flying - 1) * flying
        fewer = others if number > self.flying else (self.flying - 2) * flying
        phases = [(1 + TEMPORARIES[optimizer]) * trained, others + np.maximum(forward, backward)]
        if number > 1:
            phases.append(trained + fewer + accumulate)
        if number > self.flying:
            phases.append(trained + others + forward)
        needed = weights + STATES[optimizer] * trained + np.maximum.reduce(phases)
        return np.triu(needed, 1)

    def _summed(
        self, places: Sequence[Sequence[int]], sizes: Callable[[Kind], Sequence[int]]
    ) -> Ints:
        """[start, stop]: what tensors of a stage take together."""
        profile = self.costs.profile
        return _between(
            _prefix(
                [
                    sum(
                        rounded_bytes(size)
                        for block in blocks
                        for size in sizes(profile.kinds[profile.blocks[block].kind])
                    )
                    for blocks in places
                ]
            )
        )

    def _most(self, saved: Ints, peaks: Ints) -> Ints:
        """[start, stop]: the most that a block needs beside what those before it have saved."""
        total = _prefix(saved)
        own = np.where(
            np.triu(np.ones((self.num, self.num), np.bool_)),
            (total[:-1] + peaks)[None, :],
            -_NEVER,
        )
        table = np.zeros((self.num + 1, self.num + 1), np.int64)
        table[:-1, 1:] = np.maximum.accumulate(own, axis=1) - total[:-1, None]
        return np.triu(table, 1)

    def _saved(self, block: int) -> int:
        """Bytes that a block's backward pass takes from its own forward pass."""
        number = len(self.rehearsal.tape(block, FORWARD).sizes)
        sizes = self.rehearsal.sizes(block, FORWARD)
        own = sum(
            rounded_bytes(sizes[ref.index])
            for ref in self.rehearsal.tape(block, BACKWARD).events
            if ref is not None and ref.origin == "own" and ref.index < number
        )
        return own + self._saved_input(block)

    def _saved_input(self, block: int) -> int:
        """The same of what the block before it gave: there, or copied, on the stage of this one."""
        values = self.rehearsal.steps[FORWARD].values
        given = {
            read.ref: rounded_bytes(evaluate(read.size, values))
            for read in self.rehearsal.tape(block, FORWARD).reads
        }
        ended = set(self.rehearsal.tape(block, BACKWARD).events)
        return sum(
            min(size, self._made(block, ref))
            for ref, size in given.items()
            if ref in ended and ref.origin == "earlier"
        )

    def _made(self, block: int, ref: Ref) -> int:
        maker, number = self.rehearsal.key_of(block, ref, FORWARD)
        return rounded_bytes(self.rehearsal.sizes(maker, FORWARD)[number])

    def _peak(self, blocks: Sequence[int], step: int) -> int:
        """The most that the first block, or one tied to it, holds of its own in one pass."""
        first, *tied = blocks
        peaks = [self._saved(first) + self._own_peak(block, step) for block in tied]
        return max([self._own_peak(first, step), *peaks])

    def _own_peak(self, block: int, step: int) -> int:
        tape = self.rehearsal.tape(block, step)
        sizes = [rounded_bytes(size) for size in self.rehearsal.sizes(block, step)]
        before = [rounded_bytes(size) for size in self.rehearsal.sizes(block, FORWARD)]
        first = self.rehearsal.first_number(block, step)
        live = peak = self._saved(block) - self._saved_input(block) if step else 0
        made = 0
        for ref in tape.events:
            if ref is None:
                live += sizes[made]
                made += 1
            elif ref.origin == "own":
                live -= sizes[ref.index - first] if ref.index >= first else before[ref.index]
            peak = max(peak, live)
        return peak


def _prefix(values: Any) -> Ints:
    return np.concatenate([[0], np.cumsum(np.asarray(values, np.int64))])


def _between(total: Ints) -> Ints:
    """[start, stop]: sums, from their prefix sums."""
    return np.triu(total[None, :] - total[:, None])
