"""Experts on the host: the placement with the fewest seconds, if the GPUs can't hold all experts.

Each stage keeps the experts of its first layers in host memory, of as few layers as possible: the
more, the less memory its GPU needs and the longer a token takes. The search is that of `search`,
with one more number for each stage. At first it is a lower bound, from lower bounds of the bytes.
The stages of the best placement are replayed to find their exact numbers, with which the search
runs again, until all stages of the best placement are exact. Bounds never exceed exact numbers, so
no other placement is faster. On many GPUs, where lots of placements are nearly equal, the search
ends once no other placement can be more than 1 % faster.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import replace
from itertools import count

import numpy as np

from duoka.base.units import format_bytes
from duoka.errors import DuokaError, InfeasibleError, UsageError
from duoka.forecast.costs import Costs, Ints
from duoka.forecast.hosting import hosting
from duoka.forecast.profile import BlockKind, Profile
from duoka.forecast.workload import ALL_EXPERTS
from duoka.hardware.device import Device

from .limits import host_of
from .request import PlanProblem
from .room import room_bytes
from .search.device_groups import DeviceGroup, group_devices, link_seconds
from .search.dynamic_programme import BlockRange, Floats, Programme, Stages

_NONE_FITS = -1
_EXACT_ROUNDS = 10
"""Rounds of the search for the optimum itself; after them, a gap is accepted."""
_GAP = 0.01


class HostSearch:
    """The search for a placement with experts in host memory, for one prefill chunk.

    Parameters
    ----------
    profile, hosted : Profile
        The model with all experts on the GPUs, and with all on the host.
    problem : PlanProblem
        With a fleet of GPUs, and the workload with its prefill chunk.
    host : Device
        The host's memory and its speed.
    has_room : bool
        Leave the recommended free memory of each GPU.
    """

    def __init__(
        self, profile: Profile, hosted: Profile, problem: PlanProblem, host: Device, has_room: bool
    ) -> None:
        self._profile, self._hosted, self._problem, self._host = profile, hosted, problem, host
        self._has_room = has_room
        self._on_gpus, self._on_host = self._costs(profile), self._costs(hosted)
        places = self._on_host.places
        # The blocks of each expert layer, and the number of expert layers before each place.
        self._layers = [
            blocks
            for blocks in places
            if any(hosted.kinds[hosted.blocks[block].kind].expert_bytes for block in blocks)
        ]
        self._positions = [places.index(blocks) for blocks in self._layers]
        self._before: Ints = np.searchsorted(self._positions, np.arange(len(places) + 1))
        fleet = problem.fleet
        timed = all(self._on_host.seconds(device) is not None for device in fleet.devices)
        self._links = link_seconds(self._on_gpus, fleet) if timed and fleet.links else None
        self._groups = group_devices(
            self._on_gpus, fleet, links=self._links, timed=timed, fixed=problem.limits.devices
        )
        self._numbers = [self._least_numbers(group) for group in self._groups]
        self._exact: set[tuple[int, int]] = set()  # (group, class of stages)
        self._kinds: dict[tuple[int, int, bool, bool], BlockKind] = {}

    def find(self) -> tuple[Costs, Stages, float] | None:
        """Return the costs with some experts on the host, the best stages, and their seconds.

        None if nothing fits, or if the host has too little memory. Without known speeds, the number
        of expert layers on the host takes the place of seconds.
        """
        devices = [group.devices for group in self._groups]
        most = min(len(self._problem.fleet.devices), self._on_gpus.num_blocks)
        num_stages = range(most if self._problem.use_all else 1, most + 1)
        transfers = None
        if self._links is not None:
            firsts, lasts = [group[0] for group in devices], [group[-1] for group in devices]
            transfers = self._links[np.ix_(firsts, lasts)]
        best: tuple[float, Stages] = np.inf, ()
        for number in count(1):
            tables = np.array([[self._seconds(group) for group in self._groups]])
            programme = Programme(
                tables, devices, transfers=transfers, slowest=False, num_stages=num_stages
            )
            optimum = programme.find_best()
            if optimum is None or not np.isfinite(optimum[1]):
                return None
            stages, bound = optimum
            for stage in stages:
                self._settle(stage)
            seconds = bound + sum(self._increase(stage, tables[0]) for stage in stages)
            best = min(best, (float(seconds), stages), key=lambda pair: pair[0])
            if best[0] <= bound * (1 if number <= _EXACT_ROUNDS else 1 + _GAP):
                costs = self._mixed(best[1])
                fits = costs.profile.expert_bytes <= self._host.budget_bytes
                return (costs, best[1], best[0]) if fits else None
        raise AssertionError("the search ends")

    def _increase(self, stage: BlockRange, tables: Floats) -> float:
        """Return by how much a settled stage takes longer than its bound of earlier tables."""
        group, place = self._group_of(stage), (stage.start, stage.stop)
        increase: float = self._seconds(group)[place] - tables[group.index][place]
        return increase

    def _settle(self, stage: BlockRange) -> None:
        """Replace the bound of a stage by its exact number."""
        group, place = self._group_of(stage), (stage.start, stage.stop)
        classes, numbers = self._on_gpus.stage_classes, self._numbers[group.index]
        if (group.index, int(classes[place])) in self._exact:
            return
        # Stages of one class need the same bytes, so they need the same number.
        is_equal = (classes == classes[place]) & ~np.tri(len(classes), dtype=np.bool_)
        self._exact.add((group.index, int(classes[place])))
        if self._fits(stage):
            exact = int(numbers[place])
            while not self._fits(stage, exact):
                exact += 1
            numbers[is_equal] = exact
            return
        # The shortest stage from here on that doesn't fit; longer ones don't fit either.
        stops = range(stage.start + 1, stage.stop + 1)
        shortest = bisect_left(
            stops, True, key=lambda stop: not self._fits(replace(stage, stop=stop))
        )
        numbers[is_equal] = _NONE_FITS
        numbers[: stage.start + 1, stops[shortest] :] = _NONE_FITS

    def _fits(self, stage: BlockRange, number: int | None = None) -> bool:
        """Return True if a stage fits with a number of expert layers on the host, or with all."""
        first, last = self._before[stage.start], self._before[stage.stop]
        blocks = self._layers[first : last if number is None else first + number]
        costs = self._costs_with(block for layer in blocks for block in layer)
        budget_bytes = self._group_of(stage).budget_bytes
        return costs.stage_bytes(stage.start, stage.stop, budget_bytes) is not None

    def _least_numbers(self, group: DeviceGroup) -> Ints:
        """[start, stop]: lower bounds of the expert layers on the host, or `_NONE_FITS`.

        With n layers on the host, the bound of a stage's bytes falls by their weights and by the
        difference of working memory, but not below the bound with all layers on the host.
        """
        whole, least = self._on_gpus.bounds_at(1), self._on_host.bounds_at(1)
        usable = self._on_gpus.usable_bytes(group.budget_bytes)
        sums = np.cumsum(
            [0, *(_bytes(self._profile, at) - _bytes(self._hosted, at) for at in self._layers)]
        )
        saved = sums[self._before]
        working = np.maximum(whole - least - (saved[None, :] - saved[:, None]), 0)
        needed = np.maximum(whole - usable - working, 0)
        numbers = np.searchsorted(sums, needed + saved[:, None]) - self._before[:, None]
        numbers = np.minimum(numbers, self._before[None, :] - self._before[:, None])
        return np.where(least <= usable, np.maximum(numbers, 0), _NONE_FITS)

    def _seconds(self, group: DeviceGroup) -> Floats:
        """[start, stop]: seconds of each stage with its number of expert layers on the host.

        If a speed is unknown, the number itself.
        """
        numbers, device = self._numbers[group.index], group.devices[0]
        allowed = self._problem.limits.allow(self._on_gpus.num_blocks, device)
        fits = (numbers != _NONE_FITS) & allowed
        if group.seconds is None:
            return np.where(fits, numbers, np.inf)
        on_gpus, on_host = (
            costs.latency.seconds_on(self._problem.fleet.devices[device])
            for costs in (self._on_gpus, self._on_host)
        )
        assert on_gpus is not None, "the speeds are known"
        assert on_host is not None, "the speeds are known"
        sums = np.cumsum([0.0, *(on_host - on_gpus).sum(axis=0)[self._positions]])
        first = np.broadcast_to(self._before[:, None], numbers.shape)
        last = np.clip(first + numbers, 0, len(self._layers))
        return np.where(fits, group.seconds + sums[last] - sums[first], np.inf)

    def _group_of(self, stage: BlockRange) -> DeviceGroup:
        return next(group for group in self._groups if stage.device in group.devices)

    def _mixed(self, stages: Iterable[BlockRange]) -> Costs:
        """Return the costs with the experts of the first layers of stages on the host."""
        blocks: set[int] = set()
        for stage in stages:
            first = self._before[stage.start]
            number = self._numbers[self._group_of(stage).index][stage.start, stage.stop]
            blocks.update(*self._layers[first : first + number])
        return self._costs_with(blocks)

    def _costs_with(self, blocks: Iterable[int]) -> Costs:
        """Return the costs with the experts of these blocks on the host."""
        return self._costs(hosting(self._profile, {*blocks}, self._hosted, self._kinds))

    def _costs(self, profile: Profile) -> Costs:
        """Return the costs of a profile, which may have experts on the host."""
        workload = replace(self._problem.workload, host_experts=profile.host_experts)
        costs = Costs(profile, workload, self._problem.replay_cache, self._host)
        return costs.leaving(room_bytes) if self._has_room else costs


def _bytes(profile: Profile, blocks: Iterable[int]) -> int:
    """Return the bytes of the weights of blocks."""
    return sum(sum(profile.kinds[profile.blocks[block].kind].weight_bytes) for block in blocks)


def no_host_experts(profile: Profile, problem: PlanProblem) -> DuokaError:
    """Return the error for a plan with all experts on the host, if there is none."""
    if not any(block.experts for block in profile.blocks):
        return UsageError(
            f"{profile.model} has no experts that can be in host memory", hint="omit --experts"
        )
    if problem.workload.training is not None and problem.workload.training.method == "full":
        return UsageError(
            "experts in host memory can't be trained",
            hint="train adapters (--train lora), or omit --experts",
        )
    host, find = host_of(problem), problem.find_profile
    if host is None:
        return UsageError(
            "the size of the host's memory is unknown, and all experts are to be there",
            hint="declare it: --host-memory 64GiB",
        )
    if find is None:
        return UsageError(
            "replicas, and models given as objects, have no experts in host memory",
            hint="plan one copy of a checkpoint, or omit experts",
        )
    needed_bytes = find(replace(problem.workload, host_experts=ALL_EXPERTS)).expert_bytes
    if (missing_bytes := needed_bytes - host.budget_bytes) > 0:
        return InfeasibleError(
            f"all experts of {profile.model} need {format_bytes(needed_bytes)} of host memory, and "
            f"{format_bytes(host.budget_bytes)} are available",
            hint="use more host memory (--host-memory), fewer bits (--quantize), or --experts auto",
            shortfall_bytes=missing_bytes,
        )
    return InfeasibleError(
        f"{profile.model} does not fit with all experts in host memory",
        hint="use larger GPUs, or a shorter context",
        shortfall_bytes=0,
    )
