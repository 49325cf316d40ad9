"""Costs: bytes and seconds of a profile's stages at a workload, for the search.

This module knows nothing of which stages are best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import cached_property
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
from .stages import Chain, Growth, lower_bounds, sum_ranges
from .training_bounds import training_bounds
from .workload import Workload

Ints = NDArray[np.int64]

Room = Callable[[int], int]
"""Maps a budget in bytes to the bytes of this budget that must stay free."""


class ReplayCache:
    """A cache of chains by profile, and of lower bounds by profile and workload."""

    def __init__(self) -> None:
        self._chains: dict[int, Chain] = {}  # by `id` of the profile, kept alive by its chain
        self._bounds: dict[tuple[int, Workload], Ints] = {}

    def chain(self, profile: Profile) -> Chain:
        """Return the chain of a profile, created once."""
        if id(profile) not in self._chains:
            self._chains[id(profile)] = Chain(profile)
        return self._chains[id(profile)]

    def bounds(self, profile: Profile, workload: Workload, compute: Callable[[], Ints]) -> Ints:
        """Return the lower bounds of all stages at a workload; `compute` is called once."""
        key = (id(profile), workload)
        if key not in self._bounds:
            self._bounds[key] = compute()
        return self._bounds[key]


class Costs:
    """A profile at a workload: bytes and seconds of its stages.

    A stage fits a device if the replay of all its steps stays within the budget. The search
    minimises the peak of requested bytes: the further bytes that PyTorch's allocator reserves
    (cached blocks, fragmentation) depend on the budget.

    A stage is a half-open range of the `chain`. Its place is the number of stages from it to the
    last, itself included, which determines the micro-batches in flight in training. The workload
    must have its prefill chunk and dtype resolved. `host` computes experts on the host.
    """

    def __init__(
        self,
        profile: Profile,
        workload: Workload,
        cache: ReplayCache | None = None,
        host: Device | None = None,
    ) -> None:
        cache = cache or ReplayCache()
        self.profile = profile
        self.host = host
        self.workload = workload
        self.training = workload.training
        self._replays: dict[int, Replay] = {}
        self._chain = cache.chain(profile)
        self._peaks: dict[tuple[tuple[int, ...], int], StageBytes | None] = {}
        self.room: Room | None = None
        self._growth: Growth | None = None
        # Stages that leave less than the room free: at the end or already where the replay paused.
        self._excluded: set[tuple[tuple[int, ...], int]] = set()
        self.num_blocks = len(self._chain)
        self._bounds: dict[int, Ints] = {}
        self._cache = cache
        self._latency: LatencyModel | None = None

    @cached_property
    def _brief(self) -> Replay:
        """The replay of a few steps, for bounds."""
        return replay_of(self.profile, self.workload, brief=True)

    @property
    def lower_bound_bytes(self) -> Ints:
        """[start, stop]: lower bounds of the peak bytes of stages at place 1."""
        return self._cache.bounds(self.profile, self.workload, lambda: self.bounds_at(1))

    def leaving(self, room: Room) -> Costs:
        """Return costs for which stages must leave `room` of each budget free."""
        # A shallow copy: replays, peaks and bounds are shared, and `_excluded` depends on the room.
        costs = copy(self)
        costs.room, costs._excluded = room, set()
        return costs

    def usable_bytes(self, budget_bytes: int) -> int:
        """Return the bytes of a budget that a stage may reserve."""
        return budget_bytes - (self.room(budget_bytes) if self.room else 0)

    @property
    def has_ties(self) -> bool:
        """True if a block with modules is tied to an earlier one: its inputs may take a detour."""
        return any(block.modules and block.tied_to is not None for block in self.profile.blocks)

    @property
    def has_returns(self) -> bool:
        """True if execution may return to an earlier stage, for tied modules or images.

        Always False in training, whose replay doesn't model copies by way of a third device.
        """
        blocks = self.profile.blocks
        # After the last block with modules there is only the caller.
        end = max((index for index, block in enumerate(blocks) if block.modules), default=0)
        returns = any(block.tied_to is not None for block in blocks[: end + 1])
        return returns and self.training is None

    def blocks_of(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the blocks of a stage, attached blocks included, in execution order."""
        return self._chain.stage(start, stop)

    @property
    def chain(self) -> list[int]:
        """The blocks between which stages may be cut."""
        return self._chain.blocks

    @property
    def places(self) -> list[tuple[int, ...]]:
        """The blocks between which stages may be cut, each with its attached blocks."""
        return [(index, *self._chain.attached[index]) for index in self.chain]

    @property
    def stage_classes(self) -> Ints:
        """[start, stop]: class numbers, equal only for stages of equal bytes."""
        return self._chain.stage_classes

    def streamed_bytes(self, start: int, stop: int) -> int:
        """Return the bytes copied from the host to a stage in each step."""
        return sum(self.profile.streamed_bytes(self.blocks_of(start, stop)))

    # The schedule 1F1B (Narayanan et al., Megatron-LM, 2021): three stages, four micro-batches.
    # A micro-batch is in flight from its forward (F) to its backward pass (B), and holds its saved
    # activations. A stage's backward pass waits for the backward passes of all later stages, so a
    # stage at place p runs p forward passes before its first backward pass:
    #
    #   time       0  1  2  3  4  5  6  7  8  9 10 11    in flight, at most
    #   place 3   F1 F2 F3  .  . B1 F4 B2  . B3  . B4    3
    #   place 2    . F1 F2  . B1 F3 B2 F4 B3  . B4  .    2
    #   place 1    .  . F1 B1 F2 B2 F3 B3 F4 B4  .  .    1
    #
    # Warm-up lasts until the first B, cool-down starts after the last F, steady state is between.
    # With m micro-batches at most m are in flight, so all places from m on have equal costs. With
    # GPipe all m are in flight at every stage, with "sequential" one: all places have equal costs.
    @property
    def num_places(self) -> int:
        """The number of places with different costs; larger places cost as much as this one."""
        training = self.training
        return training.micro_batches if training and training.schedule == "1f1b" else 1

    def bounds_at(self, place: int) -> Ints:
        """[start, stop]: lower bounds of the peak bytes of stages at a place."""
        place = min(place, self.num_places)
        if place not in self._bounds:
            if self.training is None:
                self._bounds[place] = lower_bounds(self._chain, self._brief)
            else:
                replay = TrainingReplay(self.profile, self.workload, place=place)
                self._bounds[place] = training_bounds(self._chain, replay)
        return self._bounds[place]

    def room_bounds(self, budget_bytes: int) -> Ints:
        """[start, stop]: lower bounds of reserved bytes if `room` stays free.

        They are 0 in training, and with expandable segments, whose free ends take larger tensors.
        """
        expandable = self.workload.gpu_generation.expandable_segments
        if self.room is None or self.training is not None or expandable:
            return np.zeros_like(self.lower_bound_bytes)
        if self._growth is None:
            self._growth = Growth(self._chain, self._replay_at(1))
        return self._growth.bounds(self.room(budget_bytes))

    def requested_bytes(
        self, start: int, stop: int, budget_bytes: int, *, place: int = 1
    ) -> int | None:
        """Return the peak of requested bytes of a stage; None if the stage doesn't fit."""
        peaks = self.stage_bytes(start, stop, budget_bytes, place=place)
        return None if peaks is None else peaks.requested_bytes

    def stage_bytes(
        self, start: int, stop: int, budget_bytes: int, *, place: int = 1
    ) -> StageBytes | None:
        """Replay a stage on a device of this budget; return the peaks, None if it doesn't fit."""
        blocks = self.blocks_of(start, stop)
        key = (self._signature(blocks, place), budget_bytes)
        if key in self._excluded:
            return None
        if key not in self._peaks:
            # If room must stay free, a replay pauses once it reserves more than the usable bytes:
            # the stage is ruled out, and its peak isn't needed. A later search without room may use
            # the whole budget, and resumes the same replay.
            replay, usable = self._replay_at(place), self.usable_bytes(budget_bytes)
            peaks = replay.run(blocks, budget_bytes, usable_bytes=usable)
            if replay.is_paused(blocks, budget_bytes):
                self._excluded.add(key)
                return None
            self._peaks[key] = peaks
        return self._with_room(self._peaks[key], budget_bytes)

    def stage_bytes_where(
        self, start: int, stop: int, budget_bytes: int, device_of: Sequence[str]
    ) -> StageBytes | None:
        """Return the peaks of a stage with copies by way of third devices; None if it doesn't fit.

        `device_of` has the device of every block of the model. If the stage doesn't fit,
        `stage_bytes` also returns None for this stage and budget from then on.
        """
        blocks = self.blocks_of(start, stop)
        peaks = self._replay_at(1).run(blocks, budget_bytes, device_of=device_of)
        fitting = self._with_room(peaks, budget_bytes)
        if fitting is None:
            key = (self._signature(blocks, 1), budget_bytes)
            if peaks is None:
                self._peaks[key] = None
            self._excluded.add(key)
        return fitting

    def _with_room(self, peaks: StageBytes | None, budget_bytes: int) -> StageBytes | None:
        """Return the peaks, or None if the stage reserves more than the usable bytes."""
        if peaks is None or peaks.reserved_bytes > self.usable_bytes(budget_bytes):
            return None
        return peaks

    def _replay_at(self, place: int) -> Replay:
        """Return the replay of stages at a place, created once."""
        place = min(place, self.num_places)
        if place not in self._replays:
            self._replays[place] = replay_of(self.profile, self.workload, place=place)
            self._replays[place].programs = self._chain.programs
        return self._replays[place]

    def _signature(self, blocks: Sequence[int], place: int) -> tuple[int, ...]:
        """Return a key that is equal only for stages of equal costs."""
        place = min(place, self.num_places)
        workspace_bytes = self.workload.gpu_generation.workspace_bytes
        return (*stage_signature(self.profile, blocks), place, workspace_bytes)

    @property
    def page_bytes(self) -> Ints | None:
        """[start, stop]: bytes of a KV cache page in a stage.

        None without a paged cache, or if the workload gives the number of pages.
        """
        if not self.workload.is_paged or self.workload.pages is not None:
            return None
        profile, index = self.profile, SERVING_MONOMIALS.index("g")
        start = next(n for n, regime in enumerate(profile.regimes) if regime.phase == "start")
        # The coefficient of "g", the number of pages, is the bytes of a page in an allocation.
        of_kind = []
        for kind in profile.kinds:
            trace = kind.traces[start]
            rules = [trace.sizes[number] for number in trace.retained]
            of_kind.append(sum(round(rule[index]) for rule in rules if len(rule) > index))
        kinds = [[profile.blocks[block].kind for block in blocks] for blocks in self.places]
        return np.asarray(sum_ranges([sum(of_kind[kind] for kind in row) for row in kinds]))

    @property
    def latency(self) -> LatencyModel:
        """The latency model of the blocks of the chain, created on first use."""
        if self._latency is None:
            self._latency = LatencyModel(self._brief, self.places, self.host)
        return self._latency

    def seconds(self, device: Device) -> NDArray[np.float64] | None:
        """Return the seconds of a request, [start, stop]; None if a device speed is unknown."""
        if device.memory_bytes_per_second is None:
            return None  # before the latency model is created
        seconds = self.latency.seconds_on(device)
        return None if seconds is None else sum_ranges(seconds.sum(axis=0))

    @property
    def time_objective(self) -> Literal["latency", "throughput"] | None:
        """The objective that minimises the time of a training step; None for generation.

        In a pipeline with many micro-batches the slowest stage determines the time.
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
        """[num_blocks + 1]: number of tensors sent by a request over the cut before each block."""
        return np.asarray(self.latency.boundary_transfers.sum(axis=0))
