"""Work of several passes, a step of training say: the optimum against every cut and order."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from searching import make_case, make_limits, oracle

from duoka.errors import UsageError
from duoka.planner.search import NoPlacement, Objective, search


@pytest.mark.parametrize("objective", ["latency", "throughput"])
@pytest.mark.parametrize("seed", range(100))
def test_no_placement_is_quicker(seed: int, objective: Objective) -> None:
    rng = random.Random(seed)
    case = make_case(rng)
    costs = case.costs
    shape = costs.lower_bound_bytes.shape
    noise = np.random.default_rng(seed)
    updates = {
        speed: noise.integers(0, rng.choice((4, 20)), shape).astype(float)
        for speed in (costs.speed_seconds if rng.random() < 0.7 else ())
    }
    costs = replace(costs, more_passes=rng.choice((0, 1, 2, 7)), updates=updates)
    limits = make_limits(rng, costs.num_blocks, len(case.fleet.devices))
    case = replace(case, costs=costs, limits=limits if rng.random() < 0.3 else case.limits)
    expected = oracle(case, objective)
    try:
        found = search(
            costs, case.fleet, objective=objective, use_all=case.use_all, limits=case.limits
        )
    except (NoPlacement, UsageError):  # nothing fits, or the limits contradict each other
        assert expected is None
        return
    assert (len(found.stages), found.value) == expected
    assert (found.bound, found.objective) == (found.value, "latency")
