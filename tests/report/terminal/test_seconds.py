from __future__ import annotations

from dataclasses import replace

from duoka.forecast.latency import Seconds
from duoka.hardware.device import Link
from duoka.hardware.fleet import Fleet
from duoka.planner.plan import Plan
from duoka.report.terminal.seconds import render_seconds

from .test_plan import PLAN

SECONDS = Seconds(
    stages=(),
    total_seconds=12.0,
    slowest_seconds=3.0,
    first_token_seconds=1.94,
    token_seconds=0.0321,
    tokens_per_second=55.4,
)


def lines(seconds: Seconds | None, fleet: Fleet | None = None) -> list[str]:
    forecast = replace(PLAN.forecast, seconds=seconds)
    plan: Plan = replace(PLAN, forecast=forecast, fleet=fleet or PLAN.fleet)
    return [str(line) for line in render_seconds(plan)]


def test_nothing_is_said_of_unknown_speeds() -> None:
    assert lines(None) == []


def test_the_pace_is_rounded_and_called_so() -> None:
    told, _ = lines(SECONDS)
    assert told == "first token after about 1.9 s, then about 31 tokens/s"
    told, _ = lines(replace(SECONDS, token_seconds=None))
    assert told == "first token after about 1.9 s"
    step = replace(SECONDS, first_token_seconds=None, token_seconds=None, step_seconds=11.0)
    assert lines(step)[0] == "a step takes about 11 s: about 55 tokens/s"


def test_it_is_told_what_was_measured() -> None:
    _, told = lines(SECONDS)
    assert "published figures" in told
    measured = ("memory_bytes_per_second", "flops_per_second")
    first, *rest = PLAN.fleet.devices
    mixed = Fleet(devices=(replace(first, measured=measured), *rest))
    _, told = lines(SECONDS, mixed)
    assert told.startswith("cuda:0 as measured here, the others as fast as published figures")
    every = Fleet(devices=tuple(replace(each, measured=measured) for each in PLAN.fleet.devices))
    told = "as fast as GPUs of this kind were measured here"
    assert lines(SECONDS, every)[1] == f"{told}, links as published"
    link = Link(
        source="cuda:0",
        target="cuda:1",
        bytes_per_second=1e9,
        latency_seconds=0.0,
        measured=True,
    )
    assert lines(SECONDS, replace(every, links=(link,)))[1] == told
