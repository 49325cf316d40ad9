"""Plans for maps by hand: judged, forecast as they will run, and refused when they don't fit."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import rehearsing
import tiny
from tiers import only
from tiny import MIB

from duoka import Device, Fleet, Plan, Workload
from duoka.errors import InfeasibleError, PlacementError, UsageError
from duoka.forecast.profile import Profile
from duoka.forecast.replay import Replay
from duoka.planner import resolve
from duoka.planner.device_map import DeviceMap
from duoka.planner.request import PlanProblem
from duoka.planner.solve import find_plan

pytestmark = pytest.mark.usefixtures("single_sequences")

LOAD = Workload(prompt_tokens=700, new_tokens=40, dtype="bfloat16", prefill_chunk_tokens=None)
LAYERS = tiny.made_up([60 * MIB, *[40 * MIB] * 6, 60 * MIB], tiny.Costs(cache=2048))
TIED = tiny.made_up([60 * MIB, *[40 * MIB] * 4, 0], tiny.Costs(cache=2048), tied_to={5: 0})
SHORT = Workload(prompt_tokens=300, new_tokens=9, dtype="bfloat16", prefill_chunk_tokens=None)
CHUNKED = replace(SHORT, batch=3, prefill_chunk_tokens=100)


def ask(device_map: object, *budgets_mib: float, load: Workload = LOAD) -> PlanProblem:
    return PlanProblem(
        fleet=tiny.fleet(*budgets_mib), workload=load, device_map=DeviceMap.of(device_map)
    )


def scattered(profile: Profile, num_devices: int, seed: int) -> dict[str, int]:
    """Every block anywhere, tied ones with their partners."""
    chance = random.Random(seed)
    at: list[int] = []
    for block in profile.blocks:
        at.append(chance.randrange(num_devices) if block.tied_to is None else at[block.tied_to])
    pairs = zip(profile.blocks, at, strict=True)
    return {module: device for block, device in pairs for module in block.modules}


def test_a_plan_says_what_the_map_says() -> None:
    device_map = {"": 1, "block.0": 0, "block.7": 0}
    plan = find_plan(LAYERS, ask(device_map, 300, 400))
    assert plan.device_map == {
        f"block.{n}": "vgpu:0" if n in (0, 7) else "vgpu:1" for n in range(8)
    }
    assert plan.objective == "given"
    free = [device.free_bytes for device in plan.forecast.devices]
    assert plan.value == min(free)
    assert plan.binding_device == plan.forecast.devices[free.index(min(free))].device
    assert [d.weight_bytes // MIB for d in plan.forecast.devices] == [120, 240]
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("budgets", [(240, 200, 220), (900, 900, 900)])
@pytest.mark.parametrize("profile", [LAYERS, TIED])
def test_duokas_own_plan_by_hand_is_forecast_the_same(
    profile: Profile, budgets: tuple[int, ...]
) -> None:
    own = find_plan(profile, replace(ask({}, *budgets), device_map=None, use_all=True))
    plan = find_plan(profile, ask(own.device_map, *budgets))
    assert plan.forecast == own.forecast
    assert plan.placement == own.placement
    assert own.value == min(device.headroom_bytes for device in plan.forecast.devices)
    tightest = min(plan.forecast.devices, key=lambda device: device.free_bytes)
    assert plan.binding_device == tightest.device
    assert plan.value == plan.bound == tightest.free_bytes


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_map_to_train_with_is_forecast_by_places_too(schedule: str) -> None:
    layer = rehearsing.Layer(weight=2 * MIB, result=MIB, saved=6 * MIB)
    profile = rehearsing.made_up([layer] * 6)
    load = rehearsing.load(1, method="full", micro_batches=8, schedule=schedule)
    own = find_plan(
        profile, replace(ask({}, 200, 190, 180, load=load), device_map=None, use_all=True)
    )
    plan = find_plan(profile, ask(own.device_map, 200, 190, 180, load=load))
    assert (plan.forecast, plan.placement) == (own.forecast, own.placement)
    assert own.value == min(device.headroom_bytes for device in plan.forecast.devices)
    held = [device.activation_bytes // (6 * MIB) for device in plan.forecast.devices]
    assert len(held) == 3
    assert held[0] > 0


@pytest.mark.parametrize("num_blocks", [11, 20])
def test_a_map_on_more_unequal_gpus_than_can_be_searched_is_answered(num_blocks: int) -> None:
    layers = tiny.made_up([60 * MIB + 512 * n for n in range(num_blocks)], tiny.Costs(cache=64))
    turns = {f"block.{n}": n for n in range(num_blocks)}
    problem = ask(turns, *[90 + n / 4 for n in range(21)])
    with pytest.raises(UsageError, match="sets of"):
        find_plan(layers, replace(problem, device_map=None))
    plan = find_plan(layers, problem)
    assert plan.device_map == {f"block.{n}": f"vgpu:{n}" for n in range(num_blocks)}
    assert plan.value == min(device.free_bytes for device in plan.forecast.devices)
    assert not [reason for reason in plan.why if "duoka's own plan" in reason.text]


def test_the_reasons_count_crossings() -> None:
    turns = {f"block.{n}": n % 2 for n in range(8)}
    first, second = find_plan(LAYERS, ask(turns, 600, 600)).why
    assert "cross devices 7 times" in first.text
    assert "uses vgpu:0: no activations cross" in second.text
    own = find_plan(LAYERS, replace(ask({}, 600, 600), device_map=None))
    (only,) = find_plan(LAYERS, ask(own.device_map, 600, 600)).why
    assert "no activations cross devices" in only.text
    # To the embedding's device, where a tied head is.
    (told, *_) = find_plan(TIED, ask({"": 1, "block.0": 0, "block.5": 0}, 600, 600)).why
    assert "cross devices 2 times" in told.text


def test_speeds_are_those_of_each_blocks_device() -> None:
    devices = tuple(
        Device(
            name=f"vgpu:{n}",
            budget_bytes=600 * MIB,
            memory_bytes_per_second=speed,
            flops_per_second=1e15,
        )
        for n, speed in enumerate((1e9, 4e9))
    )
    problem = replace(ask({"": 0}, 1), fleet=Fleet(devices=devices))
    seconds = []
    for device_map in ({"": 0}, {f"block.{n}": n % 2 for n in range(8)}, {"": 1}):
        plan = find_plan(LAYERS, replace(problem, device_map=DeviceMap.of(device_map)))
        assert plan.forecast.seconds is not None
        seconds.append(plan.forecast.seconds.total_seconds)
    assert seconds[1] == pytest.approx((seconds[0] + seconds[2]) / 2)
    assert find_plan(LAYERS, ask({"": 0}, 600)).forecast.seconds is None


def test_what_does_not_fit_is_refused_device_by_device() -> None:
    device_map = {"": 1, "block.0": 0, "block.1": 2}
    with pytest.raises(InfeasibleError) as caught:
        find_plan(LAYERS, ask(device_map, 50, 100, 300))
    told = str(caught.value)
    assert "vgpu:0 needs" in told
    assert "vgpu:1 needs" in told
    assert "vgpu:2" not in told
    assert caught.value.shortfall_bytes >= 10 * MIB + 160 * MIB
    with pytest.raises(InfeasibleError) as caught:
        resolve.answer(LAYERS, ask({"": 0}, 240, 300))
    assert "duoka's plan instead of the map" in str(caught.value.hint)
    own = find_plan(LAYERS, replace(ask({}, 240, 300), device_map=None))
    for device in own.devices:
        assert device in str(caught.value.hint)


def test_fragmentation_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Replay.run

    def run(replay: Replay, *given: Any, **named: Any) -> Any:
        if len(given) > 1:
            return None
        found = real(replay, *given, **named)
        return found and replace(found, reserved_bytes=601 * MIB)

    monkeypatch.setattr(Replay, "run", run)
    with pytest.raises(
        InfeasibleError,
        match=r"vgpu:1 the budget of 600.00 MiB is exceeded because of fragmentation",
    ) as caught:
        find_plan(LAYERS, ask({"": 1}, 600, 600))
    assert caught.value.shortfall_bytes > 0


def test_what_goes_with_a_map() -> None:
    for problem in (
        replace(ask({"": 0}, 600), use_all=True),
        replace(ask({"": 0}, 600), objective="headroom"),
    ):
        with pytest.raises(UsageError, match="have no effect"):
            find_plan(LAYERS, problem)
    with pytest.raises(UsageError, match="supports 512"):
        find_plan(replace(LAYERS, max_context_tokens=512), ask({"": 0}, 600))
    with pytest.raises(PlacementError) as caught:
        find_plan(LAYERS, ask({"block.0": 0}, 600))
    assert len(caught.value.missing) == 7


# The forecast of a map is what virtual GPUs measure, wherever its blocks are.


@pytest.mark.parametrize("load", [SHORT, pytest.param(CHUNKED, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", only(["glm", "pair"], tiny.CONFIGS))
def test_scattered_blocks_are_forecast_exactly(name: str, load: Workload) -> None:
    if name == "pair" and load is CHUNKED:
        pytest.skip("an encoder can't support prefill chunks")
    profile = tiny.profile_for(name, load)
    device_map = scattered(profile, 3, seed=0)
    plan = find_plan(profile, ask(device_map, 512, 512, 512, load=load))
    forecast = [(d.allocated_bytes, d.reserved_bytes) for d in plan.forecast.devices]
    assert forecast == tiny.measure(plan, tiny.CONFIGS[name])


# The CPU.


def test_the_cpu_computes_only_where_a_map_says_so() -> None:
    fleet = Fleet(devices=(*tiny.fleet(330, 330).devices, Device(name="cpu", budget_bytes=2**40)))
    problem = replace(ask({}, 1), fleet=fleet, device_map=None)
    own = find_plan(LAYERS, problem)
    assert "cpu" not in own.devices
    assert "No module runs on the CPU, which" in own.why[-1].text
    assert own == replace(
        find_plan(LAYERS, replace(problem, fleet=tiny.fleet(330, 330))), why=own.why
    )
    plan = find_plan(LAYERS, replace(problem, device_map=DeviceMap.of({"": 0, "block.7": "cpu"})))
    assert plan.devices == ("vgpu:0", "cpu")
    alone = Fleet(devices=fleet.devices[2:])
    assert find_plan(LAYERS, replace(problem, fleet=alone)).devices == ("cpu",)
