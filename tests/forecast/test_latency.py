"""Seconds: a roofline by hand, transfers, and that the planner optimises what is forecast."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import rehearsing
import tiny
from tiny import MIB

from duoka import Device, Fleet, Workload
from duoka.errors import FormatError
from duoka.forecast.costs import Costs
from duoka.forecast.latency import LAUNCH_SECONDS, LatencyModel, rate
from duoka.forecast.profile import BlockKind, Profile
from duoka.forecast.replay_training import replay_of
from duoka.hardware.device import Link
from duoka.planner.request import PlanProblem
from duoka.planner.solve import find_plan

# A made-up block computes 1000 operations for a token, moves 10 bytes, and starts no kernel; what
# it hands on is 1024 bytes for a token.
LAYERS = tiny.made_up([8 * MIB] * 5)


def load(prompt: int, new: int, batch: int = 1, chunk: int | None = None) -> Workload:
    return Workload(
        batch=batch,
        prompt_tokens=prompt,
        new_tokens=new,
        dtype="bfloat16",
        prefill_chunk_tokens=chunk,
    )


def gpu(number: int = 0, memory: float = 1.0, flops: float = 1e9, **others: object) -> Device:
    device = Device(
        name=f"vgpu:{number}",
        budget_bytes=100 * MIB,
        memory_bytes_per_second=memory,
        flops_per_second=flops,
    )
    return replace(device, **others)  # type: ignore[arg-type]


def launching(profile: Profile, launches: float) -> Profile:
    """The profile with blocks that start so many kernels in each step."""
    kinds = tuple(
        BlockKind(
            weight_bytes=kind.weight_bytes,
            traces=tuple(replace(trace, launches=(launches,)) for trace in kind.traces),
        )
        for kind in profile.kinds
    )
    return replace(profile, kinds=kinds)


def test_each_block_takes_the_longer_of_arithmetic_and_traffic() -> None:
    costs = Costs(LAYERS, load(100, 5))
    by_memory, by_arithmetic = (
        costs.latency.seconds_on(gpu()),
        costs.latency.seconds_on(gpu(memory=1e9, flops=10.0)),
    )
    assert by_memory is not None
    assert by_arithmetic is not None
    # A prompt of 100 tokens, and four decode steps: the fifth token needs none.
    assert np.allclose(by_memory, [[100 * 10] * 5, [4 * 10] * 5])
    assert np.allclose(by_arithmetic, [[100 * 100] * 5, [4 * 100] * 5])
    table = costs.seconds(gpu())
    assert table is not None
    assert table[1, 4] == pytest.approx(3 * 1040)


def test_launches_come_on_top_of_each_step() -> None:
    costs = Costs(launching(LAYERS, 7), load(100, 5, chunk=30))
    plain, dear = costs.latency.seconds_on(gpu()), costs.latency.seconds_on(gpu(launch_seconds=2.0))
    assert plain is not None
    assert dear is not None
    # Four chunks, four decode steps.
    assert np.allclose(dear, [[1000 + 4 * 7 * 2.0] * 5, [40 + 4 * 7 * 2.0] * 5])
    assert np.allclose(plain[1], 40 + 28 * LAUNCH_SECONDS)


def test_on_cuda_launches_go_on_beside_the_work() -> None:
    costs = Costs(launching(LAYERS, 7), load(100, 5, chunk=30))
    card = replace(gpu(launch_seconds=2.0), name="cuda:0")
    measured = replace(card, measured=("launch_seconds",))
    top, beside = costs.latency.seconds_on(card), costs.latency.seconds_on(measured)
    # Work takes 300 or 100 seconds in a chunk of a prompt, and 10 for a token; launches take 14.
    assert top is not None
    assert np.allclose(top, [[1000 + 4 * 14] * 5, [4 * (10 + 14)] * 5])
    assert beside is not None
    assert np.allclose(beside, [[1000] * 5, [4 * 14] * 5])


def test_a_processor_does_one_after_the_other() -> None:
    costs = Costs(launching(LAYERS, 7), load(100, 5))
    seconds = costs.latency.seconds_on(gpu(flops=10.0, launch_seconds=2.0))
    assert seconds is not None
    # Ten bytes and a hundred operations for each token, and launches.
    assert np.allclose(seconds, [[100 * (10 + 10 * 10) + 14] * 5, [4 * (10 + 10 * 10 + 14)] * 5])


def test_no_speeds_no_seconds() -> None:
    costs = Costs(LAYERS, load(100, 5))
    unknown = Device(name="vgpu:0", budget_bytes=100 * MIB)
    assert costs.seconds(unknown) is None
    assert costs.latency.seconds_of([("vgpu:0", 0, 5)], Fleet(devices=(unknown,))) is None
    assert find_plan(
        LAYERS, PlanProblem(fleet=Fleet(devices=(unknown,)), workload=load(9, 2))
    ).forecast


def test_rates_are_those_of_the_dtype() -> None:
    new = Fleet.parse("RTX4090").devices[0]
    old = Fleet.parse("V100-16GB-PCIe").devices[0]
    assert (rate(new, "bfloat16"), rate(new, "float32")) == (165.2e12, 82.6e12)
    # Without bfloat16 it is computed in 32 bit.
    assert (rate(old, "float16"), rate(old, "bfloat16")) == (112e12, rate(old, "float32"))
    (own,) = Fleet.parse("MyCard:24GiB,936GB/s,71TFLOPs").devices
    assert rate(own, "float32") == rate(own, "bfloat16") == 71e12


def test_decode_steps_are_summed_up_though_not_all_are_computed() -> None:
    cached = tiny.made_up([8 * MIB] * 5, tiny.Costs(cache=64))
    kinds = tuple(
        BlockKind(
            weight_bytes=kind.weight_bytes,
            traces=tuple(replace(trace, moved_bytes=tiny.rule(bk=3.0)) for trace in kind.traces),
        )
        for kind in cached.kinds
    )
    found = Costs(replace(cached, kinds=kinds), load(1000, 5000)).latency.seconds_on(
        gpu(flops=1e30)
    )
    assert found is not None
    assert found[1, 0] == pytest.approx(3.0 * sum(range(1001, 6000)), rel=1e-3)


def linked(*devices: Device, seconds: float = 0.5, speed: float = 1024.0) -> Fleet:
    names = [device.name for device in devices]
    links = tuple(
        Link(source=one, target=other, bytes_per_second=speed, latency_seconds=seconds)
        for one in names
        for other in names
        if one != other
    )
    return Fleet(devices=devices, links=links)


def test_transfers_take_latency_and_bandwidth_in_each_step() -> None:
    fleet = linked(gpu(0), gpu(1))
    times = Costs(LAYERS, load(100, 5, chunk=60)).latency
    assert np.array_equal(times.boundary_bytes[:, 2], [100 * 1024, 4 * 1024])
    assert np.array_equal(times.boundary_transfers[:, 2], [2, 4])
    found = times.seconds_of([("vgpu:0", 0, 2), ("vgpu:1", 2, 5)], fleet)
    assert found is not None
    first, second = found.stages
    assert (first.prefill_transfer_seconds, first.decode_transfer_seconds) == (0, 0)
    assert second.prefill_transfer_seconds == pytest.approx(2 * 0.5 + 100)
    assert second.decode_transfer_seconds == pytest.approx(4 * 0.5 + 4)
    assert found.first_token_seconds == pytest.approx(5 * 1000 + 101)
    assert found.token_seconds == pytest.approx((5 * 40 + 6) / 4)
    assert found.total_seconds == pytest.approx(5 * 1040 + 107)
    assert found.slowest_seconds == pytest.approx(3 * 1040)
    assert found.tokens_per_second == pytest.approx(5 / 3120)


def test_an_unknown_link_is_the_slowest_one() -> None:
    fleet = linked(gpu(0), gpu(1))
    one_way = replace(fleet, links=fleet.links[:1])
    stages = [("vgpu:0", 0, 2), ("vgpu:1", 2, 4), ("vgpu:0", 4, 5)]
    times = Costs(LAYERS, load(100, 5)).latency
    assert times.seconds_of(stages, one_way) == times.seconds_of(stages, fleet)
    free = times.seconds_of(stages, replace(fleet, links=()))
    assert free is not None
    assert all(stage.prefill_transfer_seconds == 0 for stage in free.stages)


def test_one_new_token_needs_no_decode_step() -> None:
    found = Costs(LAYERS, load(100, 1)).latency.seconds_of(
        [("vgpu:0", 0, 5)], Fleet(devices=(gpu(),))
    )
    assert found is not None
    assert found.token_seconds is None
    assert found.total_seconds == found.first_token_seconds


@pytest.mark.parametrize("objective", ["latency", "throughput"])
@pytest.mark.parametrize("name", ["glm", "tied"])
def test_the_planner_optimises_what_the_forecast_says(name: str, objective: str) -> None:
    fleet = linked(
        gpu(0, 2e9, 3e12, budget_bytes=9 * MIB),
        gpu(1, 5e9, 1e12, budget_bytes=8 * MIB),
        seconds=1e-5,
        speed=3e8,
    )
    problem = PlanProblem(fleet=fleet, workload=load(333, 40), objective=objective)  # type: ignore[arg-type]
    plan = find_plan(tiny.regular(name), replace(problem, use_all=True))
    seconds = plan.forecast.seconds
    assert seconds is not None
    assert len(seconds.stages) == 2
    told = {"latency": seconds.total_seconds, "throughput": seconds.slowest_seconds}
    assert told[objective] == pytest.approx(plan.value, rel=1e-9)


@pytest.mark.parametrize("number", [-1.0, float("nan"), float("inf")])
def test_impossible_times_are_refused(number: float) -> None:
    found = Costs(LAYERS, load(100, 1)).latency.seconds_of(
        [("vgpu:0", 0, 5)], Fleet(devices=(gpu(),))
    )
    assert found is not None
    with pytest.raises(FormatError, match="is not a valid duration"):
        replace(found, total_seconds=number)
    with pytest.raises(FormatError, match="is not a valid duration"):
        replace(found.stages[0], decode_seconds=number)


@pytest.mark.parametrize(
    ("schedule", "dpo"), [("sequential", False), ("1f1b", True), ("1f1b", False), ("gpipe", False)]
)
def test_a_step_of_training_has_passes_and_updates(schedule: str, dpo: bool) -> None:
    made = rehearsing.made_up([rehearsing.Layer(weight=1000, result=1, saved=2)] * 4)
    kinds = tuple(
        replace(kind, traces=tuple(replace(trace, moved_bytes=(50.0,)) for trace in kind.traces))
        for kind in made.kinds
    )
    workload = rehearsing.load(100, method="full", micro_batches=4, schedule=schedule, dpo=dpo)
    replay = replay_of(replace(made, kinds=kinds), workload)
    fleet = Fleet(devices=(gpu(0), gpu(1)))
    times = LatencyModel(replay, [(place,) for place in range(4)])
    found = times.seconds_of([("vgpu:0", 0, 2), ("vgpu:1", 2, 4)], fleet)
    assert found is not None
    # Four forward and four backward passes, with DPO four more forward passes; AdamW reads weights,
    # gradients and two states, and writes all but the gradients.
    stage, update = 2 * (12 if dpo else 8) * 50, 2 * 7 * 1000
    assert [each.prefill_seconds for each in found.stages] == pytest.approx([stage + update] * 2)
    # In a pipeline of two stages four micro-batches take five times as long as one in a stage.
    rounds = 2 if schedule == "sequential" else 5 / 4
    assert found.total_seconds == pytest.approx(rounds * (stage + update))
    assert found.tokens_per_second == pytest.approx(400 / found.total_seconds)
    assert (found.first_token_seconds, found.token_seconds) == (None, None)
