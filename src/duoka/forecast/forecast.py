"""Forecast: bytes per device by kind, and seconds, of a placement at a workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from duoka.hardware.device import Device

from .alloc_events import Step
from .bounds import lower_bounds
from .latency import Floats, Seconds, Times
from .profile import Profile
from .replay import Replay, StageBytes
from .stages import Chain
from .workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceForecast:
    """What one device will hold at its peak, in bytes.

    `weight_bytes`, `kv_cache_bytes`, `activation_bytes`, `gradient_bytes` and `optimizer_bytes`
    add up to `allocated_bytes`, at the moment of its peak; the last two are those of training.
    `reserved_bytes` is the peak of what the allocator takes from the device, cached blocks and
    rounding included; it never exceeds the budget, since cached memory is given back before that.
    `requested_bytes` is the most that tensors ask for at a time, in multiples of 512: a block that
    is hardly larger than what was asked for isn't split, and counts whole as allocated.
    """

    device: str
    weight_bytes: int
    kv_cache_bytes: int
    activation_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    requested_bytes: int
    budget_bytes: int
    gradient_bytes: int = 0
    optimizer_bytes: int = 0

    @property
    def overhead_bytes(self) -> int:
        """Reserved and not allocated: rounding to segments, fragmentation, cached blocks."""
        return self.reserved_bytes - self.allocated_bytes

    @property
    def free_bytes(self) -> int:
        """What the budget leaves beside what tensors ask for at the peak."""
        return self.budget_bytes - self.requested_bytes

    @classmethod
    def of(cls, device: Device, peaks: StageBytes) -> DeviceForecast:
        """The forecast of a device, from the peaks of what is on it."""
        return cls(
            device=device.name,
            weight_bytes=peaks.weights,
            kv_cache_bytes=peaks.kv_cache,
            activation_bytes=peaks.activations,
            allocated_bytes=peaks.allocated,
            reserved_bytes=peaks.reserved,
            requested_bytes=peaks.requested,
            budget_bytes=device.budget_bytes,
            gradient_bytes=peaks.gradients,
            optimizer_bytes=peaks.optimizer,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Bytes of each device that is used, and seconds where speeds are known.

    Parameters
    ----------
    devices : tuple of DeviceForecast
        In order of first use.
    seconds : Seconds, optional
        What each stage takes, and what that adds up to; None where a device's speed is unknown.
    host_bytes : int
        Weights that stay in the host's memory. Every step copies them to the devices, once: so
        many bytes go over PCIe for each token that is generated.
    copy_seconds : float, optional
        What that takes in each step; None where nothing is copied, or a link's speed is unknown.
    """

    devices: tuple[DeviceForecast, ...]
    seconds: Seconds | None = None
    host_bytes: int = 0
    copy_seconds: float | None = None


class Findings:
    """What was found out at one workload, for others of the same profile.

    That is the chain, and stages that turned out too fragmented, with the steps at whose end they
    did. Another workload that begins with the same steps ends there as well: a longer context whose
    prompt runs in chunks of the same size, above all. So one replay answers for many contexts.
    """

    def __init__(self) -> None:
        self._chains: dict[int, Chain] = {}  # which keep the profile, so that its number is its own
        self._steps: dict[tuple[int, tuple[int, ...], int], list[tuple[Step, ...]]] = {}

    def chain(self, profile: Profile) -> Chain:
        """The profile's chain."""
        if id(profile) not in self._chains:
            self._chains[id(profile)] = Chain(profile)
        return self._chains[id(profile)]

    def add(
        self, profile: Profile, signature: tuple[int, ...], budget_bytes: int, steps: Sequence[Step]
    ) -> None:
        """Note the steps of a replay on a device of this budget, up to the one where it failed."""
        key = (id(profile), signature, budget_bytes)
        self._steps.setdefault(key, []).append(tuple(steps))

    def tell(
        self, profile: Profile, signature: tuple[int, ...], budget_bytes: int, steps: Sequence[Step]
    ) -> bool:
        """Whether a replay of these steps is known to fail."""
        known = self._steps.get((id(profile), signature, budget_bytes), ())
        return any(tuple(steps[: len(each)]) == each for each in known)


class Costs:
    """A profile at one workload, as the search asks for it.

    A stage fits a device when every step of it, replayed, stays within the budget. What is
    optimised is the most that its tensors ask for at a time: what PyTorch's allocator holds beyond
    that, cached and fragmented, depends on the budget, and doesn't add to the room that is left.

    The chain that is cut into stages is every block but those tied to an earlier one: such a
    block goes wherever its partner goes, and is counted there.

    Parameters
    ----------
    profile : Profile
    workload : Workload
        With its prefill chunk and dtype resolved.
    findings : Findings, optional
        What other workloads have told.
    """

    def __init__(
        self, profile: Profile, workload: Workload, findings: Findings | None = None
    ) -> None:
        self.profile = profile
        self._findings = findings or Findings()
        self.workload = workload
        self._fulls: dict[int, Replay] = {}
        self._brief = self.replay(brief=True)
        self._chain = self._findings.chain(profile)
        self._peaks: dict[tuple[tuple[int, ...], int], StageBytes | None] = {}
        # Of stages that had memory enough: more of it makes no difference.
        self._unpressed: dict[tuple[int, ...], StageBytes] = {}
        self.num_blocks = len(self._chain)
        self.lower_bound_bytes = self._lower_bounds()
        self._times: Times | None = None

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
        return None if peaks is None else peaks.requested

    def stage_bytes(
        self, start: int, stop: int, budget_bytes: int, *, place: int = 1
    ) -> StageBytes | None:
        """The peaks of a stage on a device of this budget, all steps replayed; None: too many."""
        blocks = self.blocks_of(start, stop)
        signature = self._signature(blocks, place)
        key = (signature, budget_bytes)
        if key not in self._peaks:
            enough = self._unpressed.get(signature)
            if enough is not None and enough.reserved <= budget_bytes:
                return enough
            self._peaks[key] = self._replayed(blocks, signature, budget_bytes, place)
        return self._peaks[key]

    def stage_bytes_where(
        self, start: int, stop: int, budget_bytes: int, device_of: Sequence[str]
    ) -> StageBytes | None:
        """The same, where it matters on which device each of the model's blocks is.

        A stage that turns out not to fit there is one that doesn't fit, from then on.
        """
        blocks = self.blocks_of(start, stop)
        peaks = self._full_at(1).run(blocks, budget_bytes, device_of=device_of)
        if peaks is None:
            self._peaks[self._signature(blocks, 1), budget_bytes] = None
        return peaks

    def _replayed(
        self, blocks: Sequence[int], signature: tuple[int, ...], budget_bytes: int, place: int
    ) -> StageBytes | None:
        replay, known = self._full_at(place), self._findings
        if known.tell(self.profile, signature, budget_bytes, replay.steps):
            return None
        peaks = replay.run(blocks, budget_bytes)
        if peaks is None and replay.refusing:
            known.add(self.profile, signature, budget_bytes, replay.refusing)
        elif peaks is not None and not peaks.pressed:
            self._unpressed[signature] = peaks
        return peaks

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
    def times(self) -> Times:
        """Seconds of the blocks that are cut apart; computed on demand."""
        if self._times is None:
            places = [(index, *self._chain.attached[index]) for index in self.chain]
            self._times = Times(self._brief, places)
        return self._times

    def seconds(self, device: Device) -> NDArray[np.float64] | None:
        """Seconds of one pass, [start, stop]; None when the device's speeds are unknown."""
        if device.memory_bytes_per_second is None:
            return None  # without computing what isn't needed
        times = self.times.on(device)
        if times is None:
            return None
        return between(times.sum(axis=0) / self.times.num_passes)

    def update_seconds(self, device: Device) -> NDArray[np.float64] | None:
        """Seconds of what comes after all passes, on all devices at once; None for nothing."""
        return None

    @property
    def more_passes(self) -> int | None:
        """Passes that follow the first one through the stages; None where each is for itself."""
        return None

    @property
    def boundary_bytes(self) -> NDArray[np.float64]:
        """[num_blocks + 1]: bytes that one pass sends over the cut before each block."""
        return np.asarray(self.times.boundary_bytes.sum(axis=0) / self.times.num_passes)

    @property
    def boundary_transfers(self) -> NDArray[np.float64]:
        """[num_blocks + 1]: in how many tensors it does."""
        return np.asarray(self.times.boundary_transfers.sum(axis=0) / self.times.num_passes)

    def _signature(self, blocks: Sequence[int], place: int) -> tuple[int, ...]:
        """Equal for stages that cost the same."""
        return (*self._chain.signature(blocks), min(place, self.num_places))

    def _lower_bounds(self) -> NDArray[np.int64]:
        return lower_bounds(self._chain, self._brief)


def between(values: Floats) -> Floats:
    """[start, stop]: sums of values, one for each place."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    return np.asarray(total[None, :] - total[:, None], np.float64)
