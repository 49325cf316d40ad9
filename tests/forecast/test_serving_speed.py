"""Serving speeds: what stages gain by working at the same time is what the formula says."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest
import tuning

import duoka
from duoka.errors import FormatError
from duoka.forecast.serving_speed import ServingSpeed, StepSeconds
from duoka.report.terminal.plan import plan_text

WORK = duoka.Workload(
    cache="paged", batch=20, prompt_tokens=100, new_tokens=28, dtype="float32",
    prefill_chunk_tokens=32,
)  # fmt: skip


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> duoka.Plan:
    model = tuning.write_model("large", tmp_path_factory.mktemp("model") / "large")
    fleet = duoka.Fleet.parse("2x128MiB")
    speeds = {"memory_bytes_per_second": 1e9, "flops_per_second": 1e12, "launch_seconds": 1e-6}
    devices = tuple(replace(device, **speeds) for device in fleet.devices)  # type: ignore[arg-type]
    return duoka.plan(model, replace(fleet, devices=devices), WORK, use_all=True)


def test_one_request_is_not_faster_and_many_are(plan: duoka.Plan) -> None:
    loads = plan.forecast.serving_speeds
    assert [load.requests for load in loads] == [1, 4, 16, 20]
    gains = [load.tokens_per_second / load.serial_tokens_per_second for load in loads]
    assert gains[0] == 1
    assert all(one <= other + 1e-9 for one, other in pairwise(gains))
    assert 1 < gains[-1] <= 2


def test_the_gain_is_that_of_the_formula(plan: duoka.Plan) -> None:
    # The seconds of a step of b requests are a + c b, found from two loads.
    one, *_, most = plan.forecast.serving_speeds
    steps = [load.requests / load.serial_tokens_per_second for load in (one, most)]
    slope = (steps[1] - steps[0]) / (most.requests - 1)
    fixed = steps[0] - slope
    expected = (fixed + slope * most.requests) / (fixed + slope * most.requests / 2)
    gain = most.tokens_per_second / most.serial_tokens_per_second
    # Stages aren't equally fast, and the slower one decides.
    assert 0.75 * expected <= gain <= 1.01 * expected


def test_a_person_is_told(plan: duoka.Plan) -> None:
    text = " ".join(plan_text(plan).split())
    assert f"{plan.workload.pages:,} pages of 16 tokens" in text
    assert "up to 20 requests" in text
    assert "more GPUs don't make it faster" in text
    assert "at once 20 requests of 128 tokens" in text


def test_a_person_is_told_where_one_group_is_faster(plan: duoka.Plan) -> None:
    # Where weights dominate and one stage takes longer than the other, two groups take twice the
    # slower one for each token, and one takes both of them.
    slower = replace(plan.fleet.devices[1], memory_bytes_per_second=0.5e9)
    fleet = replace(plan.fleet, devices=(plan.fleet.devices[0], slower))
    uneven = duoka.plan(plan.source, fleet, WORK, device_map=plan.device_map)
    loads = uneven.forecast.serving_speeds
    assert [load.is_grouped for load in loads] == [True, False, True, True]
    assert loads[1].best_tokens_per_second == loads[1].serial_tokens_per_second
    text = " ".join(plan_text(uneven).split())
    assert re.search(
        r" 4 concurrent requests stay in one .* 4 in 2 groups would get 0\.\d\d times that", text
    )
    assert "20 in 2 groups, each on another GPU, reach 1." in text


def test_steps_of_prompts_take_what_the_plan_says(plan: duoka.Plan) -> None:
    seconds, whole = plan.forecast.step_seconds, plan.forecast.seconds
    assert seconds is not None
    assert whole is not None
    # 100 tokens of each of 20 prompts, in pieces of 32.
    starts = range(0, 100, 32)
    expected = sum(
        seconds.fixed_seconds
        + (size - 1 + 0.0) * seconds.token_seconds
        + size * start * seconds.pair_seconds
        for start in starts
        for size in [min(32, 100 - start)]
    )
    assert whole.first_token_seconds == pytest.approx(20 * expected, rel=0.02)


def test_no_load_is_told_that_cannot_be() -> None:
    with pytest.raises(FormatError, match="not a valid duration"):
        ServingSpeed(requests=1, tokens_per_second=-1.0, serial_tokens_per_second=1.0)
    with pytest.raises(FormatError, match="not a valid duration"):
        StepSeconds(fixed_seconds=1.0, token_seconds=float("nan"), pair_seconds=0.0)
