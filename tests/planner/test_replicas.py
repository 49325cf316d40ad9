"""Copies of a model on parts of a fleet, against every way to deal it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import tiny
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import MIB

from duoka import Device, Fleet, Link, Workload
from duoka.errors import InfeasibleError, UsageError
from duoka.forecast.profile import Profile
from duoka.planner.constraints import Constraints
from duoka.planner.plan import Plan
from duoka.planner.replicas import plan_replicas
from duoka.planner.request import PlanProblem
from duoka.planner.search import Objective
from duoka.planner.solve import solve

LOAD = Workload(prompt_tokens=300, new_tokens=10, dtype="bfloat16", prefill_chunk_tokens=None)
SMALL = tiny.made_up([40 * MIB] * 4, tiny.Costs(cache=512))


def deals(devices: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
    """Every way to put devices into groups, with some of them left out."""
    if not devices:
        yield []
        return
    first, *rest = devices
    for deal in deals(rest):
        yield deal
        yield [(first,), *deal]
        for index, group in enumerate(deal):
            yield [*deal[:index], (first, *group), *deal[index + 1 :]]


class Oracle:
    """All groups, each planned on its own."""

    def __init__(self, profile: Profile, fleet: Fleet, objective: Objective) -> None:
        self._profile, self._fleet, self._objective = profile, fleet, objective
        self._known: dict[tuple[int, ...], Plan | None] = {}

    def plan(self, group: tuple[int, ...]) -> Plan | None:
        if group not in self._known:
            chosen = tuple(self._fleet.devices[index] for index in group)
            names = {device.name for device in chosen}
            links = tuple(k for k in self._fleet.links if {k.source, k.target} <= names)
            fleet = Fleet(devices=chosen, links=links)
            problem = PlanProblem(
                fleet=fleet, workload=LOAD, objective=self._objective, use_all=True
            )
            try:
                self._known[group] = solve(self._profile, problem) or None
            except UsageError:
                self._known[group] = None
        return self._known[group]

    def worth(self, plans: Sequence[Plan]) -> float:
        values = [plan.value for plan in plans]
        if self._objective == "headroom":
            return min(values)
        return -max(values) if self._objective == "latency" else math.fsum(1 / v for v in values)

    def best(self, *, use_all: bool) -> dict[int, tuple[int, float]]:
        """By number of groups: devices in use (negative) and what the groups are worth."""
        found: dict[int, tuple[int, float]] = {}
        for deal in deals(range(len(self._fleet.devices))):
            used = sum(map(len, deal))
            plans = [self.plan(group) for group in deal]
            real = [plan for plan in plans if plan is not None]
            if not deal or len(real) < len(deal):
                continue
            if use_all and used < len(self._fleet.devices):
                continue
            rank = (-used, self.worth(real))
            found[len(deal)] = max(found.get(len(deal), rank), rank)
        return found


def machine(budgets: Sequence[int], speeds: Sequence[float], *, linked: bool) -> Fleet:
    devices = tuple(
        Device(
            name=f"vgpu:{index}",
            budget_bytes=budget * MIB,
            memory_bytes_per_second=speed * 1e9,
            flops_per_second=speed * 1e12,
        )
        for index, (budget, speed) in enumerate(zip(budgets, speeds, strict=False))
    )
    names = [device.name for device in devices]
    links = tuple(
        Link(source=one, target=other, bytes_per_second=1e6 * (1 + i % 2), latency_seconds=1e-3)
        for i, one in enumerate(names)
        for other in names
        if one != other and linked
    )
    return Fleet(devices=devices, links=links)


@pytest.mark.fuzz
@settings(max_examples=examples(5), deadline=None)
@given(
    budgets=st.lists(st.sampled_from([70, 110, 130, 230]), min_size=1, max_size=5),
    speeds=st.lists(st.sampled_from([1.0, 1.0, 2.0]), min_size=5, max_size=5),
    objective=st.sampled_from(["headroom", "latency", "throughput"]),
    linked=st.booleans(),
    use_all=st.booleans(),
)
def test_copies_are_dealt_as_well_as_by_brute_force(
    budgets: list[int], speeds: list[float], objective: Objective, linked: bool, use_all: bool
) -> None:
    fleet = machine(budgets, speeds, linked=linked)
    oracle = Oracle(SMALL, fleet, objective)
    best = oracle.best(use_all=use_all)
    problem = PlanProblem(fleet=fleet, workload=LOAD, objective=objective, use_all=use_all)
    if not best:
        with pytest.raises(InfeasibleError):
            plan_replicas(SMALL, problem)
        return
    for number in ("auto", *range(1, len(budgets) + 1)):
        wanted = max(best) if number == "auto" else number
        if wanted not in best:
            with pytest.raises(InfeasibleError):
                plan_replicas(SMALL, problem, number)  # type: ignore[arg-type]
            continue
        found = plan_replicas(SMALL, problem, number)  # type: ignore[arg-type]
        used = [name for plan in found.plans for name in plan.devices]
        assert sorted([*used, *found.idle]) == sorted(fleet.names)
        assert (len(found.plans), -len(used)) == (wanted, best[wanted][0])
        worth = oracle.worth(found.plans)
        assert worth == pytest.approx(best[wanted][1], rel=1e-12)
        assert found.value == pytest.approx(abs(worth), rel=1e-12)


def test_eight_gpus_hold_four_copies_on_two_each() -> None:
    found = plan_replicas(SMALL, PlanProblem(fleet=tiny.fleet(*[120] * 8), workload=LOAD))
    assert [sorted(plan.devices) for plan in found.plans] == [
        [f"vgpu:{index}", f"vgpu:{index + 1}"] for index in (0, 2, 4, 6)
    ]
    assert found.idle == ()
    assert found.objective == "headroom"
    assert found.value == min(plan.value for plan in found.plans)


def test_unequal_groups() -> None:
    found = plan_replicas(SMALL, PlanProblem(fleet=tiny.fleet(120, 300, 120, 60), workload=LOAD))
    assert [sorted(plan.devices) for plan in found.plans] == [["vgpu:0", "vgpu:2"], ["vgpu:1"]]
    assert found.idle == ("vgpu:3",)


def test_a_plan_of_a_group_knows_its_own_gpus_alone() -> None:
    found = plan_replicas(
        SMALL, PlanProblem(fleet=tiny.fleet(*[120] * 4), workload=LOAD), source="x"
    )
    for plan in found.plans:
        assert len(plan.fleet.devices) == 2
        assert (plan.source, plan.request.gpus) == ("x", "")
        assert Plan.from_json(plan.to_json()) == plan


def test_more_copies_than_fit() -> None:
    problem = PlanProblem(fleet=tiny.fleet(*[120] * 4), workload=LOAD)
    with pytest.raises(InfeasibleError, match="3 copies") as caught:
        plan_replicas(SMALL, problem, 3)
    assert str(caught.value).endswith("; 2 copies do")
    assert caught.value.hint == "--replicas 2, or more GPUs"
    with pytest.raises(InfeasibleError, match="MadeUp does not fit") as caught:
        plan_replicas(SMALL, replace(problem, fleet=tiny.fleet(50), gpus="50MiB"))
    assert caught.value.ways_out
    assert all("--replicas" in way.without for way in caught.value.ways_out)


@pytest.mark.parametrize(
    ("values", "number", "message"),
    [
        (
            {"constraints": Constraints(pins=(("block.0", "0"),))},
            "auto",
            "a pin applies to a single replica",
        ),
        ({"constraints": Constraints(strategy="balanced")}, "auto", "the strategy balanced"),
        (
            {"constraints": Constraints(offload=True)},
            "auto",
            "offloading applies to a single replica",
        ),
        ({"largest": "context"}, "auto", "the largest context applies to a single replica"),
        ({}, 9, "9 replicas of a model on 2 devices"),
        ({}, 0, "0 replicas of a model"),
    ],
)
def test_what_makes_no_sense_is_refused(
    values: dict[str, object], number: object, message: str
) -> None:
    problem = PlanProblem(fleet=tiny.fleet(120, 120), workload=LOAD)
    with pytest.raises(UsageError, match=message):
        plan_replicas(SMALL, replace(problem, **values), number)  # type: ignore[arg-type]
