"""Costs: what the stages of a profile cost at a workload, as the search asks for it.

Generating and training alike: with one forward, one backward, a training stage holds as many
micro-batches as there are stages from it to the end, so that what it needs depends on its blocks
and on its place from the end. It knows nothing of which stages are best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from math import inf
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from duoka.hardware.device import Device

from .allocator import rounded_bytes
from .latency import LatencyModel
from .optimizer_memory import MOST_TEMPORARIES, state_bytes
from .profile import BlockKind, Profile, Ref, evaluate
from .replay import Replay, stage_signature
from .replay_serving import ServingReplay
from .replay_training import ACCUMULATE, BACKWARD, FORWARD, TrainingReplay, in_flight
from .serving import SERVING_MONOMIALS
from .stage_bytes import StageBytes
from .stages import Chain, Growth, between, lower_bounds
from .workload import Training, Workload

Ints = NDArray[np.int64]

_NEVER = 2**60
"""More bytes than any budget."""

Room = Callable[[int], int]
"""What is to stay free of a budget of so many bytes."""


def costs_of(profile: Profile, workload: Workload, cache: ReplayCache | None = None) -> Costs:
    """What stages cost at a workload, be it inference or training."""
    if workload.training is not None:
        return TrainingCosts(profile, workload, cache)
    if workload.is_paged:
        return ServingCosts(profile, workload, cache)
    return Costs(profile, workload, cache)


class ReplayCache:
    """What replays at one workload say about other workloads of the same profile.

    That is the chain, and the lower bounds.
    """

    def __init__(self) -> None:
        self._chains: dict[int, Chain] = {}  # which keep the profile, so that its number is its own
        self._bounds: dict[tuple[int, Workload], Ints] = {}

    def chain(self, profile: Profile) -> Chain:
        """The profile's chain."""
        if id(profile) not in self._chains:
            self._chains[id(profile)] = Chain(profile)
        return self._chains[id(profile)]

    def bounds(self, profile: Profile, workload: Workload, compute: Callable[[], Ints]) -> Ints:
        """The lower bounds of all stages at a workload, which hold for any fleet."""
        key = (id(profile), workload)
        if key not in self._bounds:
            self._bounds[key] = compute()
        return self._bounds[key]


class Costs:
    """A profile at one workload, as the search asks for it.

    A stage fits a device when every step of it, replayed, stays within the budget. What is
    optimised is the most that its tensors ask for at a time: what PyTorch's allocator holds beyond
    that, cached and fragmented, depends on the budget, and doesn't add to the room that is left.

    The chain that is cut into stages is every block but those tied to an earlier one: such a
    block goes wherever its partner goes, and is counted there. The workload has its prefill chunk
    and dtype resolved.
    """

    def __init__(
        self, profile: Profile, workload: Workload, cache: ReplayCache | None = None
    ) -> None:
        self.profile = profile
        self._cache = cache or ReplayCache()
        self.workload = workload
        self._fulls: dict[int, Replay] = {}
        self._brief = self.replay(brief=True)
        self._chain = self._cache.chain(profile)
        self._peaks: dict[tuple[tuple[int, ...], int], StageBytes | None] = {}
        self.room: Room | None = None
        self._growth: Growth | None = None
        # Stages that have too little room: where they are, or before their replay's end.
        self._narrow: set[tuple[tuple[int, ...], int]] = set()
        self.num_blocks = len(self._chain)
        self.lower_bound_bytes = self._cache.bounds(profile, workload, self._lower_bounds)
        self._latency: LatencyModel | None = None

    def leaving(self, room: Room) -> Costs:
        """The same, where a stage fits if what is reserved leaves so much of its budget free."""
        roomy = copy(self)
        roomy.room, roomy._narrow = room, set()
        return roomy

    def usable_bytes(self, budget_bytes: int) -> int:
        """What a stage may reserve of a budget."""
        return budget_bytes - (self.room(budget_bytes) if self.room else 0)

    @property
    def has_ties(self) -> bool:
        """Whether modules go where an earlier one goes, and what they need may make a detour."""
        return any(block.modules and block.tied_to is not None for block in self.profile.blocks)

    @property
    def has_returns(self) -> bool:
        """Whether a stage may go on after a later one: with tied modules, or what a tower made."""
        blocks = self.profile.blocks
        # Behind the last modules is only what the caller does.
        last = max((index for index, block in enumerate(blocks) if block.modules), default=0)
        return any(block.tied_to is not None for block in blocks[: last + 1])

    def blocks_of(self, start: int, stop: int) -> tuple[int, ...]:
        """The blocks of a stage, tied ones included, in execution order."""
        return self._chain.stage(start, stop)

    @property
    def chain(self) -> list[int]:
        """The blocks that are cut apart."""
        return self._chain.blocks

    @property
    def alike(self) -> NDArray[np.int64]:
        """[start, stop]: equal numbers only where equal bytes are needed."""
        return self._chain.alike

    def streamed_bytes(self, start: int, stop: int) -> int:
        """What a stage copies from the host's memory in each step."""
        return sum(self.profile.streamed_bytes(self.blocks_of(start, stop)))

    @property
    def num_places(self) -> int:
        """How many places from the end differ; all before the last of them are like it."""
        return 1

    def requested_bytes(
        self, start: int, stop: int, budget_bytes: int, *, place: int = 1
    ) -> int | None:
        """What a stage's tensors ask for at the peak; None when it doesn't fit the budget."""
        peaks = self.stage_bytes(start, stop, budget_bytes, place=place)
        return None if peaks is None else peaks.requested_bytes

    def stage_bytes(
        self, start: int, stop: int, budget_bytes: int, *, place: int = 1
    ) -> StageBytes | None:
        """The peaks of a stage on a device of this budget, all steps replayed; None: too many."""
        blocks = self.blocks_of(start, stop)
        key = (self._signature(blocks, place), budget_bytes)
        if key in self._narrow:
            return None
        if key not in self._peaks:
            full, usable = self._full_at(place), self.usable_bytes(budget_bytes)
            peaks = full.run(blocks, budget_bytes, usable_bytes=usable)
            if full.is_paused(blocks, budget_bytes):
                self._narrow.add(key)
                return None
            self._peaks[key] = peaks
        return self._with_room(self._peaks[key], budget_bytes)

    def room_bounds(self, budget_bytes: int) -> Ints:
        """[start, stop]: never more than what stages reserve that leave the room asked for."""
        if self.room is None or self.workload.training is not None:
            return np.zeros_like(self.lower_bound_bytes)
        if self._growth is None:
            self._growth = Growth(self._chain, self._full_at(1))
        return self._growth.bounds(self.room(budget_bytes))

    def _with_room(self, peaks: StageBytes | None, budget_bytes: int) -> StageBytes | None:
        if peaks is None or peaks.reserved_bytes > self.usable_bytes(budget_bytes):
            return None
        return peaks

    def stage_bytes_where(
        self, start: int, stop: int, budget_bytes: int, device_of: Sequence[str]
    ) -> StageBytes | None:
        """The same, where it matters on which device each of the model's blocks is.

        A stage that turns out not to fit there is one that doesn't fit, from then on.
        """
        blocks = self.blocks_of(start, stop)
        peaks = self._full_at(1).run(blocks, budget_bytes, device_of=device_of)
        roomy = self._with_room(peaks, budget_bytes)
        if roomy is None:
            key = (self._signature(blocks, 1), budget_bytes)
            if peaks is None:
                self._peaks[key] = None
            self._narrow.add(key)
        return roomy

    def bounds_at(self, place: int) -> NDArray[np.int64]:
        """The lower bounds of stages at a place from the end."""
        return self.lower_bound_bytes

    def replay(self, *, brief: bool, place: int = 1) -> Replay:
        """A replay of the profile at the workload, for a stage at a place from the end."""
        return Replay(self.profile, self.workload, brief=brief)

    def _full_at(self, place: int) -> Replay:
        place = min(place, self.num_places)
        if place not in self._fulls:
            self._fulls[place] = self.replay(brief=False, place=place)
            self._fulls[place].programs = self._chain.programs
        return self._fulls[place]

    @property
    def latency(self) -> LatencyModel:
        """Seconds of the blocks that are cut apart; computed on demand."""
        if self._latency is None:
            self._latency = LatencyModel(self._brief, self.places)
        return self._latency

    @property
    def places(self) -> list[tuple[int, ...]]:
        """The blocks that are cut apart, each with what goes with it."""
        return [(index, *self._chain.attached[index]) for index in self.chain]

    def seconds(self, device: Device) -> NDArray[np.float64] | None:
        """Seconds of a request, [start, stop]; None when the device's speeds are unknown."""
        if device.memory_bytes_per_second is None:
            return None  # without computing what isn't needed
        seconds = self.latency.seconds_on(device)
        if seconds is None:
            return None
        return between(seconds.sum(axis=0))

    @property
    def time_objective(self) -> Literal["latency", "throughput"] | None:
        """What makes the work quick; None where that is for those who ask to say."""
        return None

    @property
    def page_bytes(self) -> Ints | None:
        """[start, stop]: what one page takes in a stage; None where pages aren't to be counted."""
        return None

    @property
    def boundary_bytes(self) -> NDArray[np.float64]:
        """[num_blocks + 1]: bytes that a request sends over the cut before each block."""
        return np.asarray(self.latency.boundary_bytes.sum(axis=0))

    @property
    def boundary_transfers(self) -> NDArray[np.float64]:
        """[num_blocks + 1]: in how many tensors it does."""
        return np.asarray(self.latency.boundary_transfers.sum(axis=0))

    def _signature(self, blocks: Sequence[int], place: int) -> tuple[int, ...]:
        """Equal for stages that cost the same."""
        place = min(place, self.num_places)
        workspace_bytes = self.workload.gpu_generation.workspace_bytes
        return (*stage_signature(self.profile, blocks), place, workspace_bytes)

    def _lower_bounds(self) -> NDArray[np.int64]:
        return lower_bounds(self._chain, self._brief)


class ServingCosts(Costs):
    """The same of requests that come and go, over a paged cache."""

    def replay(self, *, brief: bool, place: int = 1) -> Replay:
        """A replay of steps of every size, or of the largest alone."""
        return ServingReplay(self.profile, self.workload, brief=brief)

    @property
    def page_bytes(self) -> Ints | None:
        """[start, stop]: what one page takes in a stage, while they aren't counted."""
        if self.workload.pages is not None:
            return None
        profile, place = self.profile, SERVING_MONOMIALS.index("g")
        start = next(n for n, regime in enumerate(profile.regimes) if regime.phase == "start")
        of_kind = []
        for kind in profile.kinds:
            trace = kind.traces[start]
            rules = [trace.sizes[number] for number in trace.retained]
            of_kind.append(sum(round(rule[place]) for rule in rules if len(rule) > place))
        blocks = profile.blocks
        return np.asarray(
            between(
                [
                    sum(of_kind[blocks[block].kind] for block in self.blocks_of(at, at + 1))
                    for at in range(self.num_blocks)
                ]
            )
        )


class TrainingCosts(Costs):
    """The same of a workload that is to train."""

    def __init__(
        self, profile: Profile, workload: Workload, cache: ReplayCache | None = None
    ) -> None:
        assert workload.training is not None, "the workload is to train"
        self.training: Training = workload.training
        self._by_place: dict[int, Ints] = {}
        super().__init__(profile, workload, cache)

    @property
    def num_places(self) -> int:
        """As many as there can be micro-batches in flight, where that depends on the place."""
        return self.training.micro_batches if self.training.schedule == "1f1b" else 1

    @property
    def has_returns(self) -> bool:
        """A replay of training knows nothing of copies by way of a third device."""
        return False

    @property
    def time_objective(self) -> Literal["latency", "throughput"]:
        """In a pipeline it is the slowest stage that counts, with many micro-batches."""
        return "latency" if self.training.schedule == "sequential" else "throughput"

    def bounds_at(self, place: int) -> Ints:
        """[start, stop]: never more than the exact bytes of a stage at this place."""
        place = min(place, self.num_places)
        if place not in self._by_place:
            self._by_place[place] = _TrainingBounds(self, place).table()
        return self._by_place[place]

    def replay(self, *, brief: bool, place: int = 1) -> TrainingReplay:
        """A replay of a stage at a place from the end."""
        return TrainingReplay(self.profile, self.workload, place=place)

    def _lower_bounds(self) -> Ints:
        return self.bounds_at(1)


class _TrainingBounds:
    """Lower bounds of stages: what blocks hold of their own at the peaks of a step.

    Whatever order the passes run in, there is a moment at which one block is at its peak, those
    before it have saved theirs, and as many other micro-batches are in flight as ever.
    """

    def __init__(self, costs: TrainingCosts, place: int) -> None:
        self.costs = costs
        self.training = costs.training
        self.flying = in_flight(costs.training, place)
        self.replay = TrainingReplay(costs.profile, costs.workload, place=place)
        self.num = costs.num_blocks

    def table(self) -> Ints:
        """[start, stop]."""
        places = [self.costs.blocks_of(place, place + 1) for place in range(self.num)]
        weights = self._tensor_sums(places, lambda kind: kind.weight_bytes)
        optimizer, number = self.training.optimizer, self.training.micro_batches
        trained, matrices, states = (
            self._tensor_sums(places, lambda kind: [t.num_bytes for t in kind.trained]),
            self._tensor_sums(places, lambda kind: [t.num_bytes for t in kind.trained if t.decays]),
            self._tensor_sums(
                places, lambda kind: [n for t in kind.trained for n in state_bytes(optimizer, t)]
            ),
        )
        saved = np.array([self._saved_bytes(blocks[0]) for blocks in places], np.int64)
        forward, backward, accumulate = (
            self._most(saved, np.array([self._peak(blocks, step) for blocks in places], np.int64))
            for step in (FORWARD, BACKWARD, ACCUMULATE)
        )
        flying = between(saved)
        # While one micro-batch passes, so many others are saved; while gradients are there, fewer
        # where all of them fly at first.
        others_saved = (self.flying - 1) * flying
        fewer = others_saved if number > self.flying else (self.flying - 2) * flying
        phases = [
            trained + (matrices if MOST_TEMPORARIES[optimizer] == inf else 0),
            others_saved + np.maximum(forward, backward),
        ]
        if number > 1:
            phases.append(trained + fewer + accumulate)
        if number > self.flying:
            phases.append(trained + others_saved + forward)
        needed = weights + states + np.maximum.reduce(phases)
        return np.triu(needed, 1)

    def _tensor_sums(
        self, places: Sequence[Sequence[int]], sizes: Callable[[BlockKind], Sequence[int]]
    ) -> Ints:
        """[start, stop]: what tensors of a stage take together."""
        profile = self.costs.profile
        return between(
            [
                sum(
                    rounded_bytes(size)
                    for block in blocks
                    for size in sizes(profile.kinds[profile.blocks[block].kind])
                )
                for blocks in places
            ]
        )

    def _most(self, saved: Ints, peaks: Ints) -> Ints:
        """[start, stop]: the most that a block needs beside what those before it have saved."""
        saved_before = np.cumsum(saved) - saved
        at_peak = np.where(
            np.triu(np.ones((self.num, self.num), np.bool_)), saved_before + peaks, -_NEVER
        )
        table = np.zeros((self.num + 1, self.num + 1), np.int64)
        table[:-1, 1:] = np.maximum.accumulate(at_peak, axis=1) - saved_before[:, None]
        return np.triu(table, 1)

    def _saved_bytes(self, block: int) -> int:
        """Bytes that a block's backward pass takes from its own forward pass."""
        number = len(self.replay.trace(block, FORWARD).sizes)
        sizes = self.replay.sizes(block, FORWARD)
        outputs = sum(
            rounded_bytes(sizes[ref.index])
            for ref in self.replay.trace(block, BACKWARD).events
            if ref is not None and ref.origin == "own" and ref.index < number
        )
        return outputs + self._saved_input_bytes(block)

    def _saved_input_bytes(self, block: int) -> int:
        """The same of what the block before it gave: there, or copied, on the stage of this one."""
        values = self.replay.steps[FORWARD].values
        inputs = {
            read.ref: rounded_bytes(evaluate(read.size, values))
            for read in self.replay.trace(block, FORWARD).reads
        }
        ended = set(self.replay.trace(block, BACKWARD).events)
        return sum(
            min(size, self._made_bytes(block, ref))
            for ref, size in inputs.items()
            if ref in ended and ref.origin == "earlier"
        )

    def _made_bytes(self, block: int, ref: Ref) -> int:
        maker, number = self.replay.key_of(block, ref, FORWARD)
        return rounded_bytes(self.replay.sizes(maker, FORWARD)[number])

    def _peak(self, blocks: Sequence[int], step: int) -> int:
        """The most that the first block, or one tied to it, holds of its own in one pass."""
        first, *tied = blocks
        peaks = [self._saved_bytes(first) + self._own_peak(block, step) for block in tied]
        return max([self._own_peak(first, step), *peaks])

    def _own_peak(self, block: int, step: int) -> int:
        trace = self.replay.trace(block, step)
        sizes = [rounded_bytes(size) for size in self.replay.sizes(block, step)]
        before = [rounded_bytes(size) for size in self.replay.sizes(block, FORWARD)]
        first = self.replay.first_number(block, step)
        live = peak = self._saved_bytes(block) - self._saved_input_bytes(block) if step else 0
        number = 0
        for ref in trace.events:
            if ref is None:
                live += sizes[number]
                number += 1
            elif ref.origin == "own":
                live -= sizes[ref.index - first] if ref.index >= first else before[ref.index]
            peak = max(peak, live)
        return peak
