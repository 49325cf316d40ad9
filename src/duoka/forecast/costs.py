"""Costs: what the stages of a profile cost at a workload, as the search asks for it.

It knows nothing of which stages are best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from duoka.hardware.device import Device

from .latency import LatencyModel
from .profile import Profile
from .replay import Replay, stage_signature
from .replay_training import TrainingReplay, replay_of
from .serving import SERVING_MONOMIALS
from .stage_bytes import StageBytes
from .stages import Chain, Growth, between, lower_bounds
from .training_bounds import training_bounds
from .workload import Workload

Ints = NDArray[np.int64]

Room = Callable[[int], int]
"""What is to stay free of a budget of so many bytes."""


class ReplayCache:
    """Chains, which hold for any workload, and lower bounds, which hold for any fleet."""

    def __init__(self) -> None:
        self._chains: dict[int, Chain] = {}  # which keep the profile, so that its number is its own
        self._bounds: dict[tuple[int, Workload], Ints] = {}

    def chain(self, profile: Profile) -> Chain:
        """Return the profile's chain."""
        if id(profile) not in self._chains:
            self._chains[id(profile)] = Chain(profile)
        return self._chains[id(profile)]

    def bounds(self, profile: Profile, workload: Workload, compute: Callable[[], Ints]) -> Ints:
        """Return the lower bounds of all stages at a workload, computed once."""
        key = (id(profile), workload)
        if key not in self._bounds:
            self._bounds[key] = compute()
        return self._bounds[key]


class Costs:
    """A profile at one workload: bytes and seconds of its stages.

    A stage fits a device when every step of it, replayed, stays within the budget. The bytes that
    are optimised are the most that its tensors request at a time: what PyTorch's allocator holds
    beyond that, cached and fragmented, depends on the budget, and doesn't add to the room that is
    left.

    A stage is a half-open range of the `chain`. Its place is how many stages there are from it to
    the end, itself included: in training that decides on the micro-batches in flight. The workload
    has its prefill chunk and dtype resolved.
    """

    def __init__(
        self, profile: Profile, workload: Workload, cache: ReplayCache | None = None
    ) -> None:
        cache = cache or ReplayCache()
        self.profile = profile
        self.workload = workload
        self.training = workload.training
        self._brief = replay_of(profile, workload, brief=True)
        self._replays: dict[int, Replay] = {}
        self._chain = cache.chain(profile)
        self._peaks: dict[tuple[tuple[int, ...], int], StageBytes | None] = {}
        self.room: Room | None = None
        self._growth: Growth | None = None
        # Stages that have too little room: where they are, or before their replay's end.
        self._narrow: set[tuple[tuple[int, ...], int]] = set()
        self.num_blocks = len(self._chain)
        self._bounds: dict[int, Ints] = {}
        self.lower_bound_bytes = cache.bounds(profile, workload, lambda: self.bounds_at(1))
        self._latency: LatencyModel | None = None

    def leaving(self, room: Room) -> Costs:
        """Return costs by which a stage fits if it leaves so much of its budget free."""
        roomy = copy(self)
        roomy.room, roomy._narrow = room, set()
        return roomy

    def usable_bytes(self, budget_bytes: int) -> int:
        """Return the bytes of a budget that a stage may reserve."""
        return budget_bytes - (self.room(budget_bytes) if self.room else 0)

    @property
    def has_ties(self) -> bool:
        """Whether modules go where an earlier one goes, and what they need may make a detour."""
        return any(block.modules and block.tied_to is not None for block in self.profile.blocks)

    @property
    def has_returns(self) -> bool:
        """Whether a stage may go on after a later one: with tied modules, or what a tower made.

        A replay of training knows nothing of copies by way of a third device.
        """
        blocks = self.profile.blocks
        # Behind the last modules is only what the caller does.
        last = max((index for index, block in enumerate(blocks) if block.modules), default=0)
        returns = any(block.tied_to is not None for block in blocks[: last + 1])
        return returns and self.training is None

    def blocks_of(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the blocks of a stage, tied ones included, in execution order."""
        return self._chain.stage(start, stop)

    @property
    def chain(self) -> list[int]:
        """The blocks that are cut apart."""
        return self._chain.blocks

    @property
    def places(self) -> list[tuple[int, ...]]:
        """The blocks that are cut apart, each with what goes with it."""
        return [(index, *self._chain.attached[index]) for index in self.chain]

    @property
    def alike(self) -> Ints:
        """[start, stop]: equal numbers only where equal bytes are needed."""
        return self._chain.alike

    def streamed_bytes(self, start: int, stop: int) -> int:
        """Return the bytes that a stage copies from the host's memory in each step."""
        return sum(self.profile.streamed_bytes(self.blocks_of(start, stop)))

    @property
    def num_places(self) -> int:
        """How many places from the end differ; all before the last of them are like it."""
        training = self.training
        return training.micro_batches if training and training.schedule == "1f1b" else 1

    def bounds_at(self, place: int) -> Ints:
        """[start, stop]: never more than the exact bytes of stages at a place from the end."""
        place = min(place, self.num_places)
        if place not in self._bounds:
            if self.training is None:
                self._bounds[place] = lower_bounds(self._chain, self._brief)
            else:
                replay = TrainingReplay(self.profile, self.workload, place=place)
                self._bounds[place] = training_bounds(self._chain, replay)
        return self._bounds[place]

    def room_bounds(self, budget_bytes: int) -> Ints:
        """[start, stop]: never more than what stages reserve that leave the room asked for."""
        if self.room is None or self.training is not None:
            return np.zeros_like(self.lower_bound_bytes)
        if self._growth is None:
            self._growth = Growth(self._chain, self._replay_at(1))
        return self._growth.bounds(self.room(budget_bytes))

    def requested_bytes(
        self, start: int, stop: int, budget_bytes: int, *, place: int = 1
    ) -> int | None:
        """Return what a stage's tensors request at the peak; None where it doesn't fit."""
        peaks = self.stage_bytes(start, stop, budget_bytes, place=place)
        return None if peaks is None else peaks.requested_bytes

    def stage_bytes(
        self, start: int, stop: int, budget_bytes: int, *, place: int = 1
    ) -> StageBytes | None:
        """Replay a stage on a device of this budget and return its peaks; None: it doesn't fit."""
        blocks = self.blocks_of(start, stop)
        key = (self._signature(blocks, place), budget_bytes)
        if key in self._narrow:
            return None
        if key not in self._peaks:
            replay, usable = self._replay_at(place), self.usable_bytes(budget_bytes)
            peaks = replay.run(blocks, budget_bytes, usable_bytes=usable)
            if replay.is_paused(blocks, budget_bytes):
                self._narrow.add(key)
                return None
            self._peaks[key] = peaks
        return self._with_room(self._peaks[key], budget_bytes)

    def stage_bytes_where(
        self, start: int, stop: int, budget_bytes: int, device_of: Sequence[str]
    ) -> StageBytes | None:
        """Return the same, where it matters on which device each of the model's blocks is.

        A stage that turns out not to fit there is one that doesn't fit, from then on.
        """
        blocks = self.blocks_of(start, stop)
        peaks = self._replay_at(1).run(blocks, budget_bytes, device_of=device_of)
        roomy = self._with_room(peaks, budget_bytes)
        if roomy is None:
            key = (self._signature(blocks, 1), budget_bytes)
            if peaks is None:
                self._peaks[key] = None
            self._narrow.add(key)
        return roomy

    def _with_room(self, peaks: StageBytes | None, budget_bytes: int) -> StageBytes | None:
        if peaks is None or peaks.reserved_bytes > self.usable_bytes(budget_bytes):
            return None
        return peaks

    def _replay_at(self, place: int) -> Replay:
        place = min(place, self.num_places)
        if place not in self._replays:
            self._replays[place] = replay_of(self.profile, self.workload, place=place)
            self._replays[place].programs = self._chain.programs
        return self._replays[place]

    def _signature(self, blocks: Sequence[int], place: int) -> tuple[int, ...]:
        """Return a key that is equal for stages of equal costs."""
        place = min(place, self.num_places)
        workspace_bytes = self.workload.gpu_generation.workspace_bytes
        return (*stage_signature(self.profile, blocks), place, workspace_bytes)

    @property
    def page_bytes(self) -> Ints | None:
        """[start, stop]: bytes of one page in a stage; None where pages aren't to be counted."""
        if not self.workload.is_paged or self.workload.pages is not None:
            return None
        profile, place = self.profile, SERVING_MONOMIALS.index("g")
        start = next(n for n, regime in enumerate(profile.regimes) if regime.phase == "start")
        of_kind = []
        for kind in profile.kinds:
            trace = kind.traces[start]
            rules = [trace.sizes[number] for number in trace.retained]
            of_kind.append(sum(round(rule[place]) for rule in rules if len(rule) > place))
        kinds = [[profile.blocks[block].kind for block in blocks] for blocks in self.places]
        return np.asarray(between([sum(of_kind[kind] for kind in each) for each in kinds]))

    @property
    def latency(self) -> LatencyModel:
        """Seconds of the blocks that are cut apart; computed on demand."""
        if self._latency is None:
            self._latency = LatencyModel(self._brief, self.places)
        return self._latency

    def seconds(self, device: Device) -> NDArray[np.float64] | None:
        """Return seconds of a request, [start, stop]; None where a speed is unknown."""
        if device.memory_bytes_per_second is None:
            return None  # without computing what isn't needed
        seconds = self.latency.seconds_on(device)
        return None if seconds is None else between(seconds.sum(axis=0))

    @property
    def time_objective(self) -> Literal["latency", "throughput"] | None:
        """The objective of short training steps; None for generation, where the user says.

        In a pipeline with many micro-batches the slowest stage counts.
        """
        if self.training is None:
            return None
        return "latency" if self.training.schedule == "sequential" else "throughput"

    @property
    def boundary_bytes(self) -> NDArray[np.float64]:
        """[num_blocks + 1]: bytes that a request sends over the cut before each block."""
        return np.asarray(self.latency.boundary_bytes.sum(axis=0))

    @property
    def boundary_transfers(self) -> NDArray[np.float64]:
        """[num_blocks + 1]: in how many tensors it does."""
        return np.asarray(self.latency.boundary_transfers.sum(axis=0))
