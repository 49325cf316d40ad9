"""Schedules, held against a simulation that keeps a list of passes for each stage."""

from __future__ import annotations

import random

import pytest

from duoka.forecast import schedules
from duoka.forecast.schedules import Passes, pipeline_seconds


def passes_of(schedule: str, place: int, number: int) -> list[tuple[str, int]]:
    """What a stage runs, in order: "f" or "b" of which micro-batch."""
    first = number if schedule == "gpipe" else min(place, number)
    order = [("f", each) for each in range(first)]
    for each in range(number):
        order.append(("b", each))
        if first + each < number:
            order.append(("f", first + each))
    return order


def simulated(schedule: str, number: int, parts: list[Passes]) -> float:
    """Seconds of all passes, one after the other as soon as what they need is done."""
    last = len(parts) - 1
    orders = [passes_of(schedule, last - stage + 1, number) for stage in range(len(parts))]
    done: dict[tuple[str, int, int], float] = {}
    free = [0.0] * len(parts)
    while any(orders):
        for stage, order in enumerate(orders):
            if not order:
                continue
            what, each = order[0]
            before, way = needed(what, stage, each, parts)
            if before is not None and before not in done:
                continue
            order.pop(0)
            ready = 0.0 if before is None else done[before] + way
            one = parts[stage]
            took = one.later_seconds if each else one.backward_seconds
            took = one.forward_seconds if what == "f" else took
            free[stage] = done[what, stage, each] = max(ready, free[stage]) + took
    return max(free)


def needed(
    what: str, stage: int, each: int, parts: list[Passes]
) -> tuple[tuple[str, int, int] | None, float]:
    """Which pass comes before a pass, and how long what it gives is on the way."""
    if what == "f":
        before = ("f", stage - 1, each) if stage else None
        return before, parts[stage].forward_transfer_seconds
    if stage == len(parts) - 1:
        return ("f", stage, each), 0.0
    back = parts[stage + 1]
    way = back.later_transfer_seconds if each else back.backward_transfer_seconds
    return ("b", stage + 1, each), way


def made_up(rng: random.Random, schedule: str, number: int, *, apart: float = 3.0) -> list[Passes]:
    """Stages that differ by so much."""
    num_stages = rng.randint(2, 8)

    def about(seconds: float) -> float:
        return seconds * (1 + apart * rng.random())

    return [
        Passes(
            forward_seconds=about(1.0),
            backward_seconds=about(2.0),
            later_seconds=about(2.0),
            in_flight=number if schedule == "gpipe" else min(num_stages - at, number),
            forward_transfer_seconds=about(0.1),
            backward_transfer_seconds=about(0.1),
            later_transfer_seconds=about(0.1),
        )
        for at in range(num_stages)
    ]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_passes_run_as_the_schedule_says(schedule: str) -> None:
    rng = random.Random(0)
    for _ in range(200):
        number = rng.randint(1, 16)
        parts = made_up(rng, schedule, number)
        assert pipeline_seconds(parts, number) == simulated(schedule, number, parts)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_one_stage_never_waits(schedule: str) -> None:
    alone = Passes(forward_seconds=1.0, backward_seconds=2.0, later_seconds=2.5, in_flight=5)
    assert pipeline_seconds([alone], 5) == 5 * 1.0 + 2.0 + 4 * 2.5


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_many_micro_batches_go_on_as_they_began(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, number = random.Random(1), 300
    for _ in range(10):
        parts = made_up(rng, schedule, number)
        every = pipeline_seconds(parts, number)
        monkeypatch.setattr(schedules, "_MOST_SIMULATED", 128)
        assert pipeline_seconds(parts, number) == pytest.approx(every, rel=1e-3)
        monkeypatch.undo()


@pytest.mark.parametrize(("schedule", "less", "more"), [("gpipe", 1e-9, 0.02), ("1f1b", 0.1, 0.02)])
def test_what_is_optimised_is_about_what_a_schedule_takes(
    schedule: str, less: float, more: float
) -> None:
    rng = random.Random(0)
    for _ in range(300):
        number = rng.randint(2, 16)
        stages = [1 + 0.3 * rng.random() for _ in range(rng.randint(2, 8))]
        parts = [
            Passes(
                forward_seconds=each / 3 * (1 + 0.1 * rng.random()),
                backward_seconds=each * 2 / 3,
                later_seconds=each * 2 / 3,
                in_flight=number if schedule == "gpipe" else len(stages) - at,
                forward_transfer_seconds=(way := 0.02 * rng.random() * bool(at)),
                backward_transfer_seconds=way,
                later_transfer_seconds=way,
            )
            for at, each in enumerate(stages)
        ]
        one = [
            seconds
            for part in parts
            for seconds in (
                part.forward_seconds + part.later_seconds,
                2 * part.forward_transfer_seconds,
            )
        ]
        told = sum(one) + (number - 1) * max(one)
        assert (1 - less) * told <= pipeline_seconds(parts, number) <= (1 + more) * told
