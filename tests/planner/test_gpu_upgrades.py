"""Upgrades: the smallest card of those that there are."""

from __future__ import annotations

import pytest
import tiny

from duoka import Fleet, Workload
from duoka.errors import InfeasibleError
from duoka.forecast.profile import Profile
from duoka.hardware import catalogue
from duoka.hardware.device import Device
from duoka.hardware.parse import with_more, with_replaced
from duoka.planner.gpu_upgrades import Upgrade, upgrades
from duoka.planner.request import PlanProblem
from duoka.planner.solve import find_plan, solve

GIB = 2**30
LOAD = Workload(prompt_tokens=700, new_tokens=40, dtype="bfloat16", prefill_chunk_tokens=None)
LARGE = tiny.made_up([GIB, *[GIB // 2] * 40, GIB])


def found(gpus: str, profile: Profile = LARGE) -> list[Upgrade]:
    problem = PlanProblem(fleet=Fleet.parse(gpus), workload=LOAD, gpus=gpus)
    assert not solve(profile, problem)
    return upgrades(problem, lambda asked: solve(profile, asked) or None)


@pytest.mark.parametrize("gpus", ["12GiB,8GiB", "virtual:12GiB,8GiB", "RTX 3060+RTX 4060"])
def test_no_smaller_card_would_do(gpus: str) -> None:
    ways = found(gpus)
    assert [way.new_bytes for way in ways] == sorted(way.new_bytes for way in ways)
    assert any(way.text.startswith("one more card with") for way in ways)
    assert any("instead of" in way.text for way in ways)
    for way in ways:
        assert find_plan(LARGE, PlanProblem(fleet=Fleet.parse(way.gpus), workload=LOAD)).devices
        name = way.gpus.rpartition(",")[2]
        card = catalogue.find_card(name)
        cards = [card for card in catalogue.cards() if card.speeds["has_bfloat16"]]
        smaller = [c for c in cards if round(c.memory_gib) < round(card.memory_gib)]
        least = max(smaller, key=lambda c: c.usable_bytes, default=None)
        if least is not None:
            fleet = Fleet.parse(way.gpus.removesuffix(name) + least.name)
            with pytest.raises(InfeasibleError):
                find_plan(LARGE, PlanProblem(fleet=fleet, workload=LOAD))


def test_more_of_the_same_where_one_card_would_be_larger() -> None:
    ways = found("8GiB")
    (alike,) = (way for way in ways if "more GPUs like" in way.text)
    assert alike.gpus == "3x8GiB"
    assert alike.text == "2 more GPUs like cuda:0 (8.00 GiB)"


def test_nothing_helps_a_block_that_is_too_large() -> None:
    assert found("8GiB", tiny.made_up([GIB, 300 * GIB, GIB])) == []


@pytest.mark.parametrize(
    ("gpus", "more", "replaced"),
    [
        ("24GiB,12GiB", "24GiB,12GiB,L4", "24GiB,L4"),
        ("2x24GiB,12GiB", "2x24GiB,12GiB,L4", "24GiB,L4,12GiB"),
        ("virtual:2x3090", "virtual:2xRTX 3090,L4", "virtual:RTX 3090,L4"),
        ("My:24GiB,936GB/s+8GiB", "My:24GiB,936GB/s+8GiB+L4", "My:24GiB,936GB/s+L4"),
        ("L4, L4", "3xL4", "2xL4"),
    ],
)
def test_fleets_are_edited_as_they_were_written(gpus: str, more: str, replaced: str) -> None:
    devices = Fleet.parse(gpus).devices
    assert with_more(gpus, devices, "L4") == more
    assert with_replaced(gpus, devices, 1, "L4") == replaced
    assert len(Fleet.parse(more).devices) == len(devices) + 1
    assert len(Fleet.parse(replaced).devices) == len(devices)


@pytest.mark.parametrize("gpus", ["", "all", "0,1"])
def test_gpus_that_are_here_are_written_as_budgets(gpus: str) -> None:
    devices = Fleet.parse("24GiB,1572865B").devices
    assert with_more(gpus, devices, "L4", 2) == "24GiB,1572865B,2xL4"


def test_a_cpu_alone_is_offered_no_card() -> None:
    problem = PlanProblem(
        fleet=Fleet(devices=(Device(name="cpu", budget_bytes=2**30),)), workload=LOAD
    )
    assert upgrades(problem, lambda _: None) == []
