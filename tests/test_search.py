"""The search against a brute-force oracle: every cut, every subset and order of devices."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duoka.errors import UsageError
from duoka.fleet import Device, Fleet, Link
from duoka.search import NoPlacement, Objective, Solution, Stage, fits, largest, search

OBJECTIVES = get_args(Objective)


@dataclass
class Costs:
    """Costs with no rule to them: any stage may need any number of bytes and seconds."""

    exact: dict[int, np.ndarray]  # by budget; -1 where it doesn't fit
    lower_bound_bytes: np.ndarray
    boundary_bytes: np.ndarray
    boundary_transfers: np.ndarray
    alike: np.ndarray
    speed_seconds: dict[float | None, np.ndarray | None]
    asked: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        return len(self.boundary_bytes) - 1

    def reserved_bytes(self, start: int, stop: int, budget_bytes: int) -> int | None:
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


def placements(costs: Costs, fleet: Fleet, *, use_all: bool) -> Iterator[tuple[Stage, ...]]:
    """Every placement that fits, with fewer stages before more."""
    most = len(fleet.devices)
    for count in range(most if use_all else 1, most + 1):
        for cuts in itertools.combinations(range(1, costs.num_blocks), count - 1):
            edges = (0, *cuts, costs.num_blocks)
            for devices in itertools.permutations(range(most), count):
                stages = tuple(
                    Stage(start=start, stop=stop, device=device)
                    for start, stop, device in zip(edges, edges[1:], devices, strict=False)
                )
                if all(0 <= reserved(costs, fleet, s) <= budget(fleet, s) for s in stages):
                    yield stages


def budget(fleet: Fleet, stage: Stage) -> int:
    return fleet.devices[stage.device].budget_bytes


def reserved(costs: Costs, fleet: Fleet, stage: Stage) -> int:
    return int(costs.exact[budget(fleet, stage)][stage.start, stage.stop])


def transfer_seconds(costs: Costs, fleet: Fleet, one: Stage, other: Stage) -> float:
    def seconds(link: Link) -> float:
        num_bytes = int(costs.boundary_bytes[other.start])
        num_transfers = int(costs.boundary_transfers[other.start])
        return num_transfers * link.latency_seconds + num_bytes / link.bytes_per_second

    if not fleet.links:
        return 0.0
    known = fleet.link(fleet.names[one.device], fleet.names[other.device])
    return seconds(known) if known else max(seconds(link) for link in fleet.links)


def value_of(costs: Costs, fleet: Fleet, stages: tuple[Stage, ...], objective: Objective) -> float:
    """The objective of one placement, to be made small (so headroom is negative)."""
    if objective == "headroom":
        return -min(budget(fleet, s) - reserved(costs, fleet, s) for s in stages)
    parts = [transfer_seconds(costs, fleet, *pair) for pair in itertools.pairwise(stages)]
    for stage in stages:
        seconds = costs.seconds(fleet.devices[stage.device])
        assert seconds is not None
        parts.append(float(seconds[stage.start, stage.stop]))
    return sum(parts) if objective == "latency" else max(parts)


def oracle(case: Case, objective: Objective) -> tuple[int, float] | None:
    """Fewest devices and the least value with as many."""
    best: tuple[int, float] | None = None
    for stages in placements(case.costs, case.fleet, use_all=case.use_all):
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
        alike=alike,
        boundary_bytes=noise.integers(0, 5, num_blocks + 1),
        boundary_transfers=noise.integers(0, 3, num_blocks + 1),
        speed_seconds={s: noise.integers(0, 20, shape).astype(float) for s in speeds},
    )
    links = make_links(rng, [device.name for device in devices]) if rng.random() < 0.6 else ()
    fleet = Fleet(devices=devices, links=links)
    return Case(costs, fleet, use_all=rng.random() < 0.3 and num_devices <= num_blocks)


def check(case: Case, objective: Objective) -> Solution | None:
    """The search must find what the oracle finds, and say so truthfully."""
    expected = oracle(case, objective)
    assert fits(case.costs, case.fleet, use_all=case.use_all) == (expected is not None)
    case.costs.asked.clear()
    if expected is None:
        with pytest.raises(NoPlacement):
            search(case.costs, case.fleet, objective=objective, use_all=case.use_all)
        return None
    found = search(case.costs, case.fleet, objective=objective, use_all=case.use_all)
    num_stages, value = expected
    assert len(found.stages) == num_stages
    assert value_of(case.costs, case.fleet, found.stages, objective) == value
    assert found.value == found.bound == (-value if objective == "headroom" else value)
    assert found.stages in set(placements(case.costs, case.fleet, use_all=case.use_all))
    assert found.exact_evaluations == len(case.costs.asked) == len(set(case.costs.asked))
    assert found.binding_device in {stage.device for stage in found.stages}
    return found


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_random_cases_equal_brute_force(objective: Objective) -> None:
    rng = random.Random(20240607)
    found = [check(make_case(rng), objective) for _ in range(700)]
    assert 100 < sum(each is None for each in found) < 600
    assert sum(each is not None and len(each.stages) > 1 for each in found) > 100


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(OBJECTIVES))
def test_any_case_equals_brute_force(seed: int, objective: Objective) -> None:
    check(make_case(random.Random(seed)), objective)


def plain_costs(*sizes: int, seconds: float | None = None) -> Costs:
    """Costs that add up, and bounds that are exact."""
    total = np.concatenate([[0], np.cumsum(sizes)])
    table = np.triu(total[None, :] - total[:, None])
    return Costs(
        exact=defaultdict(lambda: table),
        lower_bound_bytes=table,
        boundary_bytes=np.ones(len(total), np.int64),
        boundary_transfers=np.ones(len(total), np.int64),
        alike=np.arange(table.size).reshape(table.shape),
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


def test_one_device_when_one_suffices() -> None:
    assert shape_of(search(plain_costs(1, 1, 1), fleet_of(4, 4))) == [(0, 3, 0)]
    assert shape_of(search(plain_costs(1, 1, 1), fleet_of(4, 5))) == [(0, 3, 1)]


def test_use_all_uses_all() -> None:
    found = search(plain_costs(1, 1, 1, 1), fleet_of(9, 9), use_all=True)
    assert shape_of(found) == [(0, 2, 0), (2, 4, 1)]
    assert (found.value, found.bound, found.binding_device) == (7, 7, 0)


def test_more_devices_to_use_than_blocks() -> None:
    with pytest.raises(UsageError, match=r"3 devices .* 2 blocks"):
        search(plain_costs(1, 1), fleet_of(9, 9, 9), use_all=True)
    assert len(search(plain_costs(1, 1), fleet_of(9, 9, 9)).stages) == 1


def test_ties_go_to_the_users_order_of_devices() -> None:
    assert shape_of(search(plain_costs(3, 3), fleet_of(4, 4, 4))) == [(0, 1, 0), (1, 2, 1)]
    # Either order has the same headroom; so has either pair.
    assert shape_of(search(plain_costs(3, 3), fleet_of(5, 4, 5, 4), use_all=False)) == [
        (0, 1, 0),
        (1, 2, 2),
    ]
    assert shape_of(search(plain_costs(3, 2), fleet_of(4, 3))) == [(0, 1, 0), (1, 2, 1)]


def test_ties_leave_memory_free_evenly() -> None:
    """The small device binds whatever the others do; they still share the rest."""
    found = search(plain_costs(*[2] * 11), fleet_of(3, 24, 24), use_all=True)
    assert found.value == 1
    assert sorted(stop - start for start, stop, _ in shape_of(found)) == [1, 5, 5]
    alike = search(plain_costs(*[2] * 10), fleet_of(16, 16, speed=1.0), objective="latency")
    assert [stage.stop - stage.start for stage in alike.stages] == [5, 5]


def test_exact_bounds_need_one_evaluation_for_each_stage() -> None:
    costs = plain_costs(*[3] * 40)
    found = search(costs, fleet_of(*[31] * 8))
    assert found.exact_evaluations == len(found.stages) == 4


def test_one_answer_serves_all_stages_that_are_alike() -> None:
    costs = plain_costs(*[3] * 40)
    starts, stops = np.indices(costs.alike.shape)
    costs.alike = stops - starts
    found = search(costs, fleet_of(*[31] * 8))
    assert found.exact_evaluations == 1


def test_auto_is_headroom_unless_speeds_differ() -> None:
    costs, fleet = plain_costs(1, 1), fleet_of(9, 9, speed=1.0)
    assert search(costs, fleet_of(9, 9)).objective == "headroom"
    assert search(costs, fleet).objective == "headroom"
    faster = replace(fleet.devices[1], memory_bytes_per_second=2.0)
    mixed = Fleet(devices=(fleet.devices[0], faster))
    assert search(costs, mixed).objective == "latency"
    unknown = replace(faster, memory_bytes_per_second=None)
    assert search(costs, Fleet(devices=(fleet.devices[0], unknown))).objective == "headroom"


def test_speeds_must_be_known_for_times() -> None:
    with pytest.raises(UsageError, match="vgpu:0"):
        search(plain_costs(1), fleet_of(9), objective="latency")
    with pytest.raises(UsageError, match="fastest"):
        search(plain_costs(1), fleet_of(9), objective="fastest")  # type: ignore[arg-type]


def test_a_pair_without_a_link_is_as_slow_as_the_slowest() -> None:
    fleet = fleet_of(2, 1, 2, speed=1.0)
    link = Link(source="vgpu:0", target="vgpu:1", bytes_per_second=1.0, latency_seconds=5)
    fast = Link(source="vgpu:2", target="vgpu:0", bytes_per_second=4.0, latency_seconds=0)
    found = search(plain_costs(1, 1, 1), replace(fleet, links=(link, fast)), objective="latency")
    assert [stage.device for stage in found.stages] == [2, 0]
    assert found.value == 3 / 8 + 1 / 4
    found = search(plain_costs(1, 1, 1), replace(fleet, links=(link,)), objective="throughput")
    assert (found.value, found.binding_device) == (6, found.stages[0].device)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=6),
    st.lists(st.integers(1, 20), min_size=1, max_size=3),
    st.booleans(),
)
def test_the_shortfall_is_the_least(sizes: list[int], budgets: list[int], use_all: bool) -> None:
    costs, fleet = plain_costs(*sizes), fleet_of(*budgets)
    use_all = use_all and len(budgets) <= len(sizes)
    roomy = fleet_of(*[sum(sizes)] * len(budgets))  # where everything fits
    expected = min(
        sum(max(0, reserved(costs, roomy, s) - budget(fleet, s)) for s in stages)
        for stages in placements(costs, roomy, use_all=use_all)
    )
    if not expected:
        assert fits(costs, fleet, use_all=use_all)
        return
    with pytest.raises(NoPlacement) as caught:
        search(costs, fleet, use_all=use_all)
    shortfall = caught.value.shortfall()
    assert shortfall.shortfall_bytes == expected
    missing = [reserved(costs, roomy, s) - budget(fleet, s) for s in shortfall.stages]
    assert sum(max(0, each) for each in missing) == expected
    too_big = [block for block, size in enumerate(sizes) if size > max(budgets)]
    assert shortfall.blocks == tuple(too_big)


def test_a_stage_that_exceeds_its_bound_misses_at_least_a_byte() -> None:
    costs = replace(plain_costs(1, 1), exact=defaultdict(lambda: np.full((3, 3), -1)))
    with pytest.raises(NoPlacement) as caught:
        search(costs, fleet_of(5))
    assert caught.value.shortfall().shortfall_bytes == 1
    assert not fits(costs, fleet_of(5, 5))


def test_many_identical_devices_are_no_work() -> None:
    found = search(plain_costs(*[1] * 64), fleet_of(*[1] * 64))
    assert shape_of(found) == [(index, index + 1, index) for index in range(64)]


def test_many_different_devices_are_refused_before_the_work() -> None:
    fleet = fleet_of(*range(10, 40))
    assert len(search(plain_costs(*[5] * 10), fleet).stages) == 2
    with pytest.raises(UsageError, match="sets of"):
        search(plain_costs(*[1] * 400), fleet)


@given(st.integers(-5, 60), st.integers(-5, 60), st.integers(-10, 70))
def test_largest_is_the_largest_that_fits(low: int, high: int, limit: int) -> None:
    asked: list[int] = []

    def enough(number: int) -> bool:
        asked.append(number)
        return number <= limit

    expected = max((number for number in range(low, high + 1) if number <= limit), default=None)
    assert largest(enough, low, high) == expected
    assert all(low <= number <= high for number in asked)
    assert len(asked) <= 9
