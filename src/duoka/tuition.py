"""Tuition: what stages of a training step cost, as the search asks for it.

With one forward, one backward, a stage holds as many micro-batches as there are stages from it to
the end. So for each number of stages there is a search of its own, in which a stage is named by its
blocks and by its place from the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .allocator import SEGMENT_ROUND_BYTES, rounded_bytes
from .errors import UsageError
from .fleet import Device, Fleet
from .forecast import Costs, Refusals
from .profile import Kind, Profile, Ref, evaluate
from .rehearsal import ACCUMULATE, BACKWARD, FORWARD, STATES, TEMPORARIES, Rehearsal, in_flight
from .replay import Replay
from .search import NO_LIMITS, Limits, NoPlacement, Solution, conceivable, fits, search
from .workload import Training, Workload

Ints = NDArray[np.int64]

_NEVER = 2**60
"""More bytes than any budget."""


def costs_of(profile: Profile, workload: Workload, refusals: Refusals | None = None) -> Costs:
    """What stages cost at a workload, be it inference or training.

    `refusals` is what replays of other workloads have told.
    """
    if workload.training is not None:
        return TrainingCosts(profile, workload)
    return Costs(profile, workload, refusals)


def replay_of(
    profile: Profile, workload: Workload, *, brief: bool = False, place: int = 1
) -> Replay:
    """What replays a stage at a workload; in training, one at a place from the end."""
    if workload.training is None:
        return Replay(profile, workload, brief=brief)
    return Rehearsal(profile, workload, brief=brief, place=place)


def search_stages(costs: Costs, fleet: Fleet, **wishes: Any) -> Solution:
    """The optimum, as `search.search` finds it, where stages may cost by their place.

    Raises
    ------
    NoPlacement, UsageError
        As `search.search` does.
    """
    if not isinstance(costs, TrainingCosts) or not costs.by_place:
        return search(costs, fleet, **wishes)
    if wishes.get("strategy") == "sequential":
        raise UsageError(
            "the strategy sequential can't be had with the schedule 1f1b",
            hint="leave out the strategy, or take the schedule gpipe",
        )
    shortage: NoPlacement | None = None
    for number in _numbers(costs, fleet, wishes):
        unfolded = _Unfolded(costs, number)
        limits = wishes.get("limits", NO_LIMITS)
        limits = _UnfoldedLimits(
            uncut=limits.uncut, pins=limits.pins, limits=limits, unfolded=unfolded
        )
        asked = {**wishes, "use_all": False, "limits": limits}
        try:
            return unfolded.folded(search(unfolded, fleet, **asked))
        except NoPlacement as none:
            shortage = none
    assert shortage is not None, "there is always a number of stages to try"
    raise shortage


def _numbers(costs: Costs, fleet: Fleet, wishes: dict[str, Any]) -> Sequence[int]:
    """The numbers of stages to try, the least first."""
    most = min(len(fleet.devices), costs.num_blocks)
    if wishes.get("use_all") or wishes.get("strategy") == "balanced":
        return (most,)
    return range(1, most + 1)


def fit_stages(costs: Costs, fleet: Fleet, **wishes: Any) -> bool:
    """Tell whether any placement fits, as `search.fits` does."""
    if not costs.by_place:
        return fits(costs, fleet, **wishes)
    try:
        search_stages(costs, fleet, **wishes)
    except NoPlacement:
        return False
    return True


def bounds_allow(costs: Costs, fleet: Fleet, **wishes: Any) -> bool:
    """Tell whether lower bounds leave a placement possible, as `search.conceivable` does."""
    # Where stages cost by their place, bounds are for places.
    return (
        fit_stages(costs, fleet, **wishes)
        if costs.by_place
        else conceivable(costs, fleet, **wishes)
    )


class TrainingCosts(Costs):
    """A profile for training at one workload.

    Parameters
    ----------
    profile : Profile
    workload : Workload
        With training, and its dtype resolved.
    """

    def __init__(self, profile: Profile, workload: Workload) -> None:
        assert workload.training is not None, "the workload is to train"
        self.training: Training = workload.training
        self._by_flight: dict[int, Ints] = {}
        super().__init__(profile, workload)

    @property
    def by_place(self) -> bool:
        """Whether a stage costs by how many come after it."""
        return self.training.schedule == "1f1b" and self.training.micro_batches > 1

    def reserved_bytes(
        self, start: int, stop: int, budget_bytes: int, *, place: int = 1
    ) -> int | None:
        """How little memory a stage can do with; None when it doesn't fit the budget.

        Where layers fall into several blocks, a rehearsal can lose sight of a tensor that goes
        from one to another but one; what blocks hold of their own is the least in any case.
        """
        needed = super().reserved_bytes(start, stop, budget_bytes, place=place)
        if needed is None:
            return None
        alike = self.alike == self.alike[start, stop]
        needed = max(needed, int(self.bounds_at(place)[alike].max()))
        return needed if needed <= budget_bytes else None

    def bounds_at(self, place: int) -> Ints:
        """[start, stop]: never more than the exact bytes of a stage at this place."""
        flying = in_flight(self.training, place)
        if flying not in self._by_flight:
            self._by_flight[flying] = _Bounds(self, place).table()
        return self._by_flight[flying]

    def replay(self, *, brief: bool, place: int = 1) -> Rehearsal:
        """A rehearsal of a stage at a place from the end."""
        return Rehearsal(self.profile, self.workload, brief=brief, place=place)

    def variant(self, place: int) -> int:
        """How many micro-batches are in flight."""
        return in_flight(self.training, place)

    def _lower_bounds(self) -> Ints:
        return self.bounds_at(1)


class _Bounds:
    """Lower bounds of stages: what blocks hold of their own at the peaks of a step."""

    def __init__(self, costs: TrainingCosts, place: int) -> None:
        self.costs = costs
        self.training = costs.training
        self.flying = in_flight(costs.training, place)
        self.rehearsal = Rehearsal(costs.profile, costs.workload, brief=True, place=place)
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
        return np.triu(-(-needed // SEGMENT_ROUND_BYTES) * SEGMENT_ROUND_BYTES, 1)

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


class _Unfolded:
    """Costs in which a stage's start and stop tell its place from the end.

    Point `level * (num_blocks + 1) + block` stands for "this block comes next, and so many stages
    have been". A stage goes from one level to the next; all other runs are impossible.
    """

    def __init__(self, costs: TrainingCosts, num_stages: int) -> None:
        self.costs = costs
        self.num_stages = num_stages
        self.width = costs.num_blocks + 1
        self.num_blocks = self.width * num_stages + costs.num_blocks
        self.lower_bound_bytes = self.tables(
            lambda place: costs.bounds_at(place), np.full(self._shape, _NEVER, np.int64)
        )
        most = int(costs.alike.max()) + 1
        self.alike = self.tables(
            lambda place: costs.alike + most * in_flight(costs.training, place),
            np.arange(-(self._shape[0] ** 2), 0, dtype=np.int64).reshape(self._shape),
        )

    @property
    def _shape(self) -> tuple[int, int]:
        return self.num_blocks + 1, self.num_blocks + 1

    @property
    def boundary_bytes(self) -> NDArray[np.float64]:
        """As those of `costs`, on every level."""
        return np.tile(self.costs.boundary_bytes, self.num_stages + 1)

    @property
    def boundary_transfers(self) -> NDArray[np.float64]:
        """As those of `costs`, on every level."""
        return np.tile(self.costs.boundary_transfers, self.num_stages + 1)

    def reserved_bytes(self, start: int, stop: int, budget_bytes: int) -> int | None:
        """As that of `costs`, at the stage's place; None for what is no stage."""
        level, first = divmod(start, self.width)
        after, last = divmod(stop, self.width)
        if after != level + 1 or last <= first:
            return None
        place = self.num_stages - level
        return self.costs.reserved_bytes(first, last, budget_bytes, place=place)

    def seconds(self, device: Device) -> NDArray[np.float64] | None:
        """As those of `costs`."""
        seconds = self.costs.seconds(device)
        return None if seconds is None else self.tables(lambda _: seconds, np.zeros(self._shape))

    def folded(self, solution: Solution) -> Solution:
        """The solution in the terms of `costs`."""
        stages = tuple(
            replace(stage, start=stage.start % self.width, stop=stage.stop % self.width)
            for stage in solution.stages
        )
        return replace(solution, stages=stages)

    def tables(self, of: Callable[[int], Any], table: Any) -> Any:
        """Put what `of` says of each place where the stages of that place are."""
        for level in range(self.num_stages):
            rows = slice(level * self.width, (level + 1) * self.width)
            columns = slice((level + 1) * self.width, (level + 2) * self.width)
            stages = np.triu(np.ones((self.width, self.width), np.bool_), 1)
            if level == 0:
                stages[1:] = False
            if level == self.num_stages - 1:
                stages[:, :-1] = False
            table[rows, columns] = np.where(
                stages, of(self.num_stages - level), table[rows, columns]
            )
        return table


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnfoldedLimits(Limits):
    """What is demanded of placements, in points: `limits` are the same in blocks."""

    limits: Limits
    unfolded: _Unfolded

    def allow(self, num_blocks: int, device: int) -> NDArray[np.bool_]:
        """[points, points]: whether a stage may be on a device."""
        allowed = self.limits.allow(self.unfolded.width - 1, device)
        table = np.zeros((num_blocks + 1, num_blocks + 1), np.bool_)
        return np.asarray(self.unfolded.tables(lambda _: allowed, table))
