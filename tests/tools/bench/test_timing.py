"""Timing, by a clock that only goes when it is told to."""

from __future__ import annotations

import pytest
import torch

from duoka.errors import FleetError
from duoka.tools.bench import calibrate
from duoka.tools.bench.calibrate import Call, best_rate, median_seconds


class Clock:
    """What a call takes is added; each reading of it costs a little."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-7
        return self.now

    def taking(self, seconds: float) -> Call:
        def call() -> None:
            self.now += seconds

        return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(calibrate, "time", clock)
    return clock


def test_the_median_is_of_one_call(clock: Clock) -> None:
    assert median_seconds(clock.taking(0.004), "cpu") == pytest.approx(0.004, rel=1e-3)
    assert median_seconds(clock.taking(2e-6), "cpu") == pytest.approx(2e-6, rel=1e-2)


def test_sizes_grow_until_a_call_is_long_enough(clock: Clock) -> None:
    asked: list[int] = []

    def make(size: int) -> tuple[Call, float]:
        asked.append(size)
        return clock.taking(size * 1e-3), size

    assert best_rate(make, [1, 4, 16], "cpu") == pytest.approx(1000, rel=1e-2)
    assert asked == [1, 4]


def test_what_does_not_fit_is_measured_smaller(clock: Clock) -> None:
    def make(size: int) -> tuple[Call, float]:
        if size > 2:
            raise torch.OutOfMemoryError("too large")
        return clock.taking(1e-3), size

    assert best_rate(make, [1, 2, 4], "cpu") == pytest.approx(2000, rel=1e-2)
    with pytest.raises(FleetError, match="too little free memory"):
        best_rate(make, [4, 8], "cpu")
