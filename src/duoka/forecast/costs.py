"""Costs: what the stages of a profile cost at a workload, as the search asks for it.

Generating and training alike: with one forward, one backward, a training stage holds as many
micro-batches as there are stages from it to the end, so that what it needs depends on its blocks
and on its place from the end. It knows nothing of which stages are best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from duoka.hardware.device import Device

from .allocator import rounded_bytes
from .latency import LatencyModel
from .optimizer_memory import state_bytes
from .profile import Profile
from .replay import Replay
from .replay_serving import ServingReplay
from .replay_training import BACKWARD, FORWARD, TrainingReplay, in_flight
from .serving import SERVING_MONOMIALS
from .stage_bytes import StageBytes
from .stages import Chain, between, lower_bounds
from .workload import Training, Workload

Ints = NDArray[np.int64]

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
        # Stages that have too little room where they are, and would have enough elsewhere.
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
            self._peaks[key] = self._full_at(place).run(blocks, budget_bytes)
        return self._with_room(self._peaks[key], budget_bytes)

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
        return (*self._chain.signature(blocks), place, workspace_bytes)

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
            tape = kind.tapes[start]
            rules = [tape.sizes[number] for number in tape.retained]
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
            self._by_place[place] = self._bounds(in_flight(self.training, place))
        return self._by_place[place]

    def replay(self, *, brief: bool, place: int = 1) -> TrainingReplay:
        """A replay of a stage at a place from the end."""
        return TrainingReplay(self.profile, self.workload, place=place)

    def _lower_bounds(self) -> Ints:
        return self.bounds_at(1)

    def _bounds(self, flying: int) -> Ints:
        """[start, stop]: what is there in an update, or with so many micro-batches in flight.

        What a backward pass works with, and the one micro-batch that may be between two passes,
        are left out.
        """
        replay, optimizer = self.replay(brief=True), self.training.optimizer

        def saved_bytes(block: int) -> int:
            sizes = replay.sizes(block, FORWARD)
            events = filter(None, replay.tape(block, BACKWARD).events)
            numbers = {ref.index for ref in events if ref.origin == "own"}
            return sum(rounded_bytes(size) for at, size in enumerate(sizes) if at in numbers)

        lasting, gradients = [], []
        for blocks in self.places:
            kinds = [self.profile.kinds[self.profile.blocks[block].kind] for block in blocks]
            trained = [tensor for kind in kinds for tensor in kind.trained]
            states = [size for tensor in trained for size in state_bytes(optimizer, tensor)]
            weights = [size for kind in kinds for size in kind.weight_bytes]
            lasting.append(sum(map(rounded_bytes, [*weights, *states])))
            gradients.append(sum(rounded_bytes(tensor.num_bytes) for tensor in trained))
        saved = flying * between([saved_bytes(block) for block, *_ in self.places])
        if self.training.micro_batches > flying:
            saved += between(gradients)
        return np.triu(between(lasting) + np.maximum(between(gradients), saved))
