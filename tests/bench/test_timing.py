from __future__ import annotations

import time

import pytest
import torch

from duoka.bench.timing import Call, best_rate, median_seconds
from duoka.errors import FleetError


def test_the_median_is_of_one_call() -> None:
    assert median_seconds(lambda: time.sleep(0.004), "cpu") == pytest.approx(0.004, rel=0.5)


def test_sizes_grow_until_a_call_is_long_enough() -> None:
    asked: list[int] = []

    def make(size: int) -> tuple[Call, float]:
        asked.append(size)
        return (lambda: time.sleep(size * 1e-3)), size

    assert best_rate(make, [1, 4, 16], "cpu") == pytest.approx(1000, rel=0.5)
    assert asked == [1, 4]


def test_what_does_not_fit_is_measured_smaller() -> None:
    def make(size: int) -> tuple[Call, float]:
        if size > 2:
            raise torch.OutOfMemoryError("too large")
        return (lambda: time.sleep(1e-3)), size

    assert best_rate(make, [1, 2, 4], "cpu") == pytest.approx(2000, rel=0.5)
    with pytest.raises(FleetError, match="too little free memory"):
        best_rate(make, [4, 8], "cpu")
