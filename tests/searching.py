"""Made-up costs for the search, and a brute-force oracle: every cut, every subset and order."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import get_args

import numpy as np

from duoka.hardware.device import Device, Link
from duoka.hardware.fleet import Fleet
from duoka.planner.search import NO_LIMITS, BlockRange, Objective, PlacementLimits, Solution

# Pages are brute-forced whole, with the profile of a model: tests/planner/test_page_count.py.
OBJECTIVES = tuple(name for name in get_args(Objective) if name != "pages")


@dataclass
class Costs:
    """Costs with no rule to them: any stage may need any number of bytes and seconds."""

    exact: dict[int, np.ndarray]  # by budget; -1 where it doesn't fit
    lower_bound_bytes: np.ndarray
    boundary_bytes: np.ndarray
    boundary_transfers: np.ndarray
    stage_classes: np.ndarray
    speed_seconds: dict[float | None, np.ndarray | None]
    asked: list[tuple[int, int, int]] = field(default_factory=list)

    time_objective = None
    page_bytes = None

    @property
    def num_blocks(self) -> int:
        return len(self.boundary_bytes) - 1

    num_places = 1

    def bounds_at(self, place: int) -> np.ndarray:
        return self.lower_bound_bytes

    def room_bounds(self, budget_bytes: int) -> np.ndarray:
        return self.lower_bound_bytes

    def usable_bytes(self, budget_bytes: int) -> int:
        return budget_bytes

    def requested_bytes(
        self, start: int, stop: int, budget_bytes: int, *, place: int
    ) -> int | None:
        assert 0 <= start < stop <= self.num_blocks
        self.asked.append((start, stop, budget_bytes))
        value = int(self.exact[budget_bytes][start, stop])
        return None if value < 0 else value

    def seconds(self, device: Device) -> np.ndarray | None:
        return self.speed_seconds[device.memory_bytes_per_second]


@dataclass(frozen=True)
class Case:
    costs: Costs
    fleet: Fleet
    use_all: bool
    limits: PlacementLimits = NO_LIMITS


def placements(costs: Costs, fleet: Fleet, *, use_all: bool) -> Iterator[tuple[BlockRange, ...]]:
    """Every placement that fits, with fewer stages before more."""
    most = len(fleet.devices)
    for count in range(most if use_all else 1, most + 1):
        for cuts in itertools.combinations(range(1, costs.num_blocks), count - 1):
            edges = (0, *cuts, costs.num_blocks)
            for devices in itertools.permutations(range(most), count):
                stages = tuple(
                    BlockRange(start=start, stop=stop, device=device)
                    for start, stop, device in zip(edges, edges[1:], devices, strict=False)
                )
                if all(0 <= reserved(costs, fleet, s) <= budget(fleet, s) for s in stages):
                    yield stages


def budget(fleet: Fleet, stage: BlockRange) -> int:
    return fleet.devices[stage.device].budget_bytes


def reserved(costs: Costs, fleet: Fleet, stage: BlockRange) -> int:
    return int(costs.exact[budget(fleet, stage)][stage.start, stage.stop])


def transfer_seconds(costs: Costs, fleet: Fleet, one: BlockRange, other: BlockRange) -> float:
    def seconds(link: Link) -> float:
        num_bytes = int(costs.boundary_bytes[other.start])
        num_transfers = int(costs.boundary_transfers[other.start])
        return num_transfers * link.latency_seconds + num_bytes / link.bytes_per_second

    if not fleet.links:
        return 0.0
    known = fleet.link(fleet.names[one.device], fleet.names[other.device])
    return seconds(known) if known else max(seconds(link) for link in fleet.links)


def value_of(
    costs: Costs, fleet: Fleet, stages: tuple[BlockRange, ...], objective: Objective
) -> float:
    """The objective of one placement, to be made small (so headroom is negative)."""
    if objective == "headroom":
        return -min(budget(fleet, s) - reserved(costs, fleet, s) for s in stages)
    parts = [transfer_seconds(costs, fleet, *pair) for pair in itertools.pairwise(stages)]
    for stage in stages:
        seconds = costs.seconds(fleet.devices[stage.device])
        assert seconds is not None
        parts.append(float(seconds[stage.start, stage.stop]))
    return sum(parts) if objective == "latency" else max(parts)


def obeys(stages: tuple[BlockRange, ...], limits: PlacementLimits) -> bool:
    """Whether every pinned block is where it must be."""
    device_of = {
        block: stage.device for stage in stages for block in range(stage.start, stage.stop)
    }
    return all(device_of[b] == at for b, at in limits.pins)


def candidates(case: Case, *, use_all: bool) -> Iterator[tuple[BlockRange, ...]]:
    """Every placement that fits and obeys the case's limits."""
    for stages in placements(case.costs, case.fleet, use_all=use_all):
        if obeys(stages, case.limits):
            yield stages


def make_limits(rng: random.Random, num_blocks: int, num_devices: int) -> PlacementLimits:
    """A few pins, which may contradict each other."""
    blocks = range(num_blocks)
    return PlacementLimits(
        pins=tuple(
            (block, rng.randrange(num_devices))
            for block in rng.sample(blocks, min(num_blocks, rng.choice((0, 1, 1, 2, 3))))
        ),
    )


def oracle(case: Case, objective: Objective) -> tuple[int, float] | None:
    """Fewest devices and the least value with as many."""
    best: tuple[int, float] | None = None
    for stages in candidates(case, use_all=case.use_all):
        if best is not None and len(stages) > best[0]:
            break
        value = value_of(case.costs, case.fleet, stages, objective)
        best = (len(stages), value if best is None else min(best[1], value))
    return best


def make_links(rng: random.Random, names: list[str]) -> tuple[Link, ...]:
    links = tuple(
        Link(
            source=source,
            target=target,
            bytes_per_second=rng.choice((1.0, 0.5)),
            latency_seconds=rng.choice((0, 0, 3)),
        )
        for source, target in itertools.permutations(names, 2)
        if rng.random() < 0.8
    )
    if rng.random() < 0.3:  # a uniform machine
        return tuple(replace(link, bytes_per_second=1.0, latency_seconds=1) for link in links)
    return links


def make_case(rng: random.Random) -> Case:
    """A small case; whole seconds, so that sums are exact in any order."""
    num_blocks, num_devices = rng.randint(1, 7), rng.randint(1, 4)
    shape = (num_blocks + 1, num_blocks + 1)
    noise = np.random.default_rng(rng.getrandbits(32))
    budgets = [rng.randint(5, 40) for _ in range(rng.choice((1, 2, num_devices)))]
    speeds = [1.0, 2.0, 3.0][: rng.randint(1, 3)]
    devices = tuple(
        Device(
            name=f"vgpu:{index}",
            budget_bytes=rng.choice(budgets),
            memory_bytes_per_second=rng.choice(speeds),
        )
        for index in range(num_devices)
    )
    sizes = np.concatenate([[0], np.cumsum(noise.integers(0, 12, num_blocks))])
    bound = np.abs(sizes[None, :] - sizes[:, None])
    if rng.random() < 0.3:  # no rule at all
        bound = noise.integers(0, 40, shape)
    alike = np.arange(bound.size).reshape(shape)
    if rng.random() < 0.5:
        alike = noise.integers(0, rng.choice((2, 10)), shape)
    _, first, number = np.unique(alike, return_index=True, return_inverse=True)
    bound = bound.ravel()[first][number].reshape(shape)
    exact = {}
    for size in {device.budget_bytes for device in devices}:
        gap = noise.integers(0, rng.choice((1, 3, 10)), shape)
        reserved_bytes = np.where(noise.random(shape) < rng.choice((0, 0.1)), -1, bound + gap)
        exact[size] = reserved_bytes.ravel()[first][number].reshape(shape)
    costs = Costs(
        exact=exact,
        lower_bound_bytes=bound,
        stage_classes=alike,
        boundary_bytes=noise.integers(0, 5, num_blocks + 1),
        boundary_transfers=noise.integers(0, 3, num_blocks + 1),
        speed_seconds={s: noise.integers(0, 20, shape).astype(float) for s in speeds},
    )
    links = make_links(rng, [device.name for device in devices]) if rng.random() < 0.6 else ()
    fleet = Fleet(devices=devices, links=links)
    return Case(costs, fleet, use_all=rng.random() < 0.3 and num_devices <= num_blocks)


def plain_costs(*sizes: int, seconds: float | None = None) -> Costs:
    """Costs that add up, and bounds that are exact."""
    total = np.concatenate([[0], np.cumsum(sizes)])
    table = np.triu(total[None, :] - total[:, None])
    return Costs(
        exact=defaultdict(lambda: table),
        lower_bound_bytes=table,
        boundary_bytes=np.ones(len(total), np.int64),
        boundary_transfers=np.ones(len(total), np.int64),
        stage_classes=np.arange(table.size).reshape(table.shape),
        speed_seconds=defaultdict(lambda: table / 8, {None: None}),
    )


def fleet_of(*budgets: int, speed: float | None = None) -> Fleet:
    return Fleet(
        devices=tuple(
            Device(name=f"vgpu:{index}", budget_bytes=budget, memory_bytes_per_second=speed)
            for index, budget in enumerate(budgets)
        )
    )


def shape_of(solution: Solution) -> list[tuple[int, int, int]]:
    return [(stage.start, stage.stop, stage.device) for stage in solution.stages]
