"""The forecast is the measurement: small models, planned, then run step by step on virtual GPUs.

No length here is one that the profiles were traced at.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import tiny
import torch
import towers
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import one_of_each
from tiny import MIB

from duoka import Fleet, Workload, models
from duoka.forecast.costs import Costs
from duoka.forecast.profile import Profile
from duoka.forecast.replay import Replay
from duoka.forecast.stage_bytes import StageBytes
from duoka.planner.constraints import Constraints
from duoka.planner.request import PlanProblem
from duoka.planner.solve import find_plan, solve
from duoka.tracing import TraceSpec, trace_workload

ONE, TWO = "virtual:1GiB", "virtual:2x1GiB"
UNEQUAL = "virtual:512MiB,1GiB"


def load(
    prompt: int, new: int, batch: int = 1, chunk: int | None = None, **others: Any
) -> Workload:
    return Workload(
        batch=batch,
        prompt_tokens=prompt,
        new_tokens=new,
        dtype="bfloat16",
        prefill_chunk_tokens=chunk,
        **others,
    )


CASES = [
    ("glm", ONE, load(1333, 18)),
    ("glm", TWO, load(707, 6, batch=3)),
    ("glm", UNEQUAL, load(1900, 5, chunk=333)),
    ("llama", TWO, load(2900, 4)),
    ("llama", TWO, load(1111, 6, batch=2, chunk=350)),
    ("llama", ONE, load(505, 9, batch=5)),
    ("tied", TWO, load(1333, 6)),
    ("tied", TWO, load(1901, 5, batch=2, chunk=640)),
    ("window", ONE, load(501, 20)),  # decoding fills the window of 512
    ("window", TWO, load(1333, 6)),
    ("window", TWO, load(1900, 5, chunk=333)),  # a chunk begins before it is full
    ("window", TWO, load(1500, 4, batch=2, chunk=640)),
    ("experts", TWO, load(1333, 6)),
    ("experts", TWO, load(707, 5, batch=3, chunk=250)),
    ("bloom", TWO, load(901, 6)),
    ("bloom", TWO, load(603, 4, batch=2)),
    ("mamba2", ONE, load(1333, 20)),
    ("mamba2", TWO, load(700, 6, batch=2, chunk=300)),
    ("hybrid", TWO, load(333, 5, batch=2)),
    ("pair", TWO, load(703, 5)),  # the encoder's output goes by way of the embedding's GPU
    ("pair", TWO, load(300, 5, batch=3)),
    ("llama", TWO, load(1333, 9, cache="int8")),
    ("llama", TWO, load(901, 4, logits="all")),
    ("llama", UNEQUAL, load(1901, 5, batch=2, chunk=640, cache="int8")),
    ("tower", TWO, load(444, 5, images=1, image_size=(100, 200))),
    ("tower", ONE, load(1500, 5, batch=3, images=1, image_size=(100, 200))),
]


@pytest.mark.parametrize(
    ("name", "fleet", "workload"),
    one_of_each(CASES, lambda case: (case[1], case[2].cache)),
    ids=[
        f"{name}-{fleet.removeprefix('virtual:')}-{w.prompt_tokens}+{w.new_tokens}x{w.batch}-{w.cache}"
        for name, fleet, w in CASES
    ],
)
def test_forecast_is_what_is_measured(name: str, fleet: str, workload: Workload) -> None:
    devices = Fleet.parse(fleet)
    plan = find_plan(
        tiny.profile_for(name, workload),
        PlanProblem(fleet=devices, workload=workload, use_all=True),
    )
    assert len(plan.forecast.devices) == len(devices.devices)
    measured = tiny.measure(plan, tiny.CONFIGS[name])
    for forecast, (allocated, reserved) in zip(plan.forecast.devices, measured, strict=True):
        assert forecast.allocated_bytes == pytest.approx(allocated, rel=0.01)
        assert forecast.reserved_bytes == pytest.approx(reserved, rel=0.03)
        assert forecast.allocated_bytes <= forecast.budget_bytes


@pytest.mark.parametrize("name", ["bloom", "pair"])
def test_a_cut_behind_an_embedding_is_measured_as_it_is_forecast(name: str) -> None:
    """Masks are made between the norm behind an embedding and the first layer."""
    workload, devices = load(603, 4, batch=2), Fleet.parse(TWO)
    profile = tiny.profile_for(name, workload)
    names = [block.modules for block in profile.blocks if block.tied_to is None]
    pins = tuple(
        (module, device)
        for block, device in zip(names[:2], devices.names, strict=True)
        for module in block
    )
    problem = PlanProblem(fleet=devices, workload=workload, constraints=Constraints(pins=pins))
    plan = find_plan(profile, problem)
    measured = tiny.measure(plan, tiny.CONFIGS[name])
    for forecast, (allocated, reserved) in zip(plan.forecast.devices, measured, strict=True):
        assert forecast.allocated_bytes == pytest.approx(allocated, rel=0.001)
        assert forecast.reserved_bytes == pytest.approx(reserved, rel=0.001)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "last", "too_high"),
    [
        # Its language model is given all masks at once, and they stay with the embedding.
        ("gemma3", "model.vision_tower.encoder.layers.0", 0.001),
        # A parameter runs behind its projector, before the features go to the embedding, where
        # they are brought: the forecast counts them where they were made as well.
        ("llava_onevision", "model.multi_modal_projector.linear_1", 0.004),
        # Model code moves what the tower's layers made on to those of the text.
        ("qwen3_vl", "model.visual.deepstack_merger_list.0.linear_fc2", 0.004),
    ],
)
def test_a_cut_in_a_tower_is_measured_as_it_is_forecast(
    name: str, last: str, too_high: float
) -> None:
    workload = load(400, 3, images=1, image_size=(towers.IMAGE_SIZE, towers.IMAGE_SIZE))
    model = towers.build(name)
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    spec = TraceSpec(fingerprint=name, conditions=workload.conditions)
    profile = trace_workload(models.build(config, dtype=torch.bfloat16), spec, [workload])
    modules = [module for block in profile.blocks for module in block.modules]
    behind = modules[modules.index(last) + 1]
    pins = ((last, "vgpu:0"), (behind, "vgpu:1"))
    problem = PlanProblem(
        fleet=Fleet.parse(TWO), workload=workload, constraints=Constraints(pins=pins)
    )
    plan = find_plan(profile, problem)
    for forecast, measured in zip(plan.forecast.devices, tiny.measure(plan, config), strict=True):
        told = forecast.allocated_bytes, forecast.reserved_bytes
        for one, other in zip(told, measured, strict=True):
            assert 0 <= one / other - 1 <= too_high


def test_a_forecast_holds_on_a_device_that_is_hardly_large_enough() -> None:
    """Where cached memory must be given back, what fits is still told apart from what doesn't."""
    workload = load(1333, 6)
    profile = tiny.regular("llama")
    roomy = find_plan(profile, PlanProblem(fleet=Fleet.parse(ONE), workload=workload))
    (enough,) = roomy.forecast.devices
    budgets = range(-(-enough.allocated_bytes // MIB), enough.reserved_bytes // MIB)
    tried = (
        solve(profile, PlanProblem(fleet=tiny.fleet(budget), workload=workload))
        for budget in budgets
    )
    plan = next(found for found in tried if found)
    (forecast,) = plan.forecast.devices
    ((allocated, reserved),) = tiny.measure(plan, tiny.CONFIGS["llama"])  # it overflows nowhere
    assert forecast.allocated_bytes == pytest.approx(allocated, rel=0.01)
    assert forecast.reserved_bytes == pytest.approx(reserved, rel=0.03)


@pytest.mark.slow
def test_parts_add_up() -> None:
    workload = load(1333, 6, batch=2)
    plan = find_plan(tiny.regular("glm"), PlanProblem(fleet=Fleet.parse(ONE), workload=workload))
    (device,) = plan.forecast.devices
    parts = device.weight_bytes + device.kv_cache_bytes + device.activation_bytes
    assert parts == device.allocated_bytes
    assert device.overhead_bytes == device.reserved_bytes - device.allocated_bytes
    assert device.free_bytes == device.budget_bytes - device.reserved_bytes
    assert device.headroom_bytes == device.budget_bytes - device.requested_bytes
    # Two for keys and values, four layers, four heads of 32, two bytes; the last token isn't kept.
    kept = 2 * 4 * (4 * 32 * 2) * 2 * (workload.context_tokens - 1)
    assert 0.9 * kept < device.kv_cache_bytes < 1.3 * kept


def test_weights_are_the_models() -> None:

    for name in ("glm", "tied"):
        model = models.build(tiny.CONFIGS[name])
        tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
        itemsize = 2 / model.dtype.itemsize
        expected = sum(
            t.nbytes * (itemsize if t.is_floating_point() and t.is_meta else 1) for t in tensors
        )
        assert tiny.regular(name).weight_bytes == expected


# Costs, as the search asks for them.

PROFILES = [
    tiny.made_up([3 * MIB, MIB, MIB, MIB, 2 * MIB], tiny.Costs(cache=4096, work=9000)),
    tiny.made_up([3 * MIB, MIB, MIB, MIB, 0], tiny.Costs(cache=700), tied_to={4: 0}),
    tiny.made_up([100, 200, 200, 300, 300, 100], tiny.Costs(cache=100_000, result=70_000)),
]
workloads = st.builds(
    Workload,
    batch=st.integers(1, 3),
    prompt_tokens=st.integers(1, 900),
    new_tokens=st.integers(1, 60),
    dtype=st.just("bfloat16"),
    prefill_chunk_tokens=st.one_of(st.none(), st.integers(64, 512)),
)


def stages(costs: Costs) -> list[tuple[int, int]]:
    return list(itertools.combinations(range(costs.num_blocks + 1), 2))


@settings(max_examples=examples(25))
@given(workload=workloads, profile=st.sampled_from(PROFILES))
def test_bounds_never_exceed_what_is_needed(workload: Workload, profile: Profile) -> None:
    costs = Costs(profile, workload)
    for start, stop in stages(costs):
        needed = costs.requested_bytes(start, stop, 2**50)
        assert needed is not None
        assert costs.lower_bound_bytes[start, stop] <= needed


@pytest.mark.parametrize("name", ["tied", pytest.param("window", marks=pytest.mark.slow)])
@settings(max_examples=examples(4))
@given(workload=workloads, data=st.data())
def test_bounds_never_exceed_what_models_need(
    name: str, workload: Workload, data: st.DataObject
) -> None:
    costs = Costs(tiny.regular(name), workload)
    start, stop = data.draw(st.sampled_from(stages(costs)))
    needed = costs.requested_bytes(start, stop, 2**50)
    assert needed is not None
    assert costs.lower_bound_bytes[start, stop] <= needed


@pytest.mark.parametrize("profile", PROFILES)
def test_a_bound_is_no_empty_word(profile: Profile) -> None:
    costs = Costs(profile, load(800, 20))
    for start, stop in stages(costs):
        peaks = costs.stage_bytes(start, stop, 2**50)
        assert peaks is not None
        assert costs.lower_bound_bytes[start, stop] >= peaks.weight_bytes


@settings(max_examples=examples(10))
@given(workload=workloads, profile=st.sampled_from(PROFILES))
def test_stages_of_equal_number_cost_the_same(workload: Workload, profile: Profile) -> None:
    costs = Costs(profile, workload)
    brief = Replay(profile, workload, brief=True)
    by_number: dict[int, int] = {}
    for start, stop in stages(costs):
        peaks = brief.run(costs.blocks_of(start, stop))
        assert peaks is not None
        number = int(costs.stage_classes[start, stop])
        assert by_number.setdefault(number, peaks.reserved_bytes) == peaks.reserved_bytes
    assert len(by_number) < len(stages(costs)), "nothing is alike"


def test_a_tied_block_goes_with_its_partner() -> None:
    costs = Costs(PROFILES[1], load(100, 5))
    assert costs.chain == [0, 1, 2, 3]
    assert costs.blocks_of(0, 2) == (0, 1, 4)
    assert costs.blocks_of(1, 4) == (1, 2, 3)


def test_a_stage_over_its_budget_is_refused() -> None:
    costs = Costs(PROFILES[0], load(500, 20))
    needed = costs.requested_bytes(0, 5, 2**50)
    assert needed is not None
    bound = int(costs.lower_bound_bytes[0, 5])
    assert bound <= needed
    assert costs.requested_bytes(0, 5, bound - 1) is None


def test_what_was_replayed_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int | None] = []
    real = Replay.run

    def run(
        whole: Replay, blocks: Sequence[int], capacity_bytes: int | None = None, **options: Any
    ) -> Any:
        runs.append(capacity_bytes)
        return real(whole, blocks, capacity_bytes, **options)

    monkeypatch.setattr(Replay, "run", run)
    costs = Costs(PROFILES[0], load(500, 20))
    roomy = costs.stage_bytes(0, 5, 2**50)
    assert roomy is not None
    bound = int(costs.lower_bound_bytes[0, 5])
    for _ in range(2):
        assert costs.stage_bytes(0, 5, bound - 1) is None
    assert runs == [2**50, bound - 1]


def test_free_is_not_reserved_and_headroom_is_not_requested() -> None:
    device = StageBytes(
        device="cuda:0",
        weight_bytes=5,
        kv_cache_bytes=2,
        activation_bytes=1,
        allocated_bytes=8,
        reserved_bytes=12,
        requested_bytes=7,
        budget_bytes=20,
    )
    assert (device.overhead_bytes, device.free_bytes, device.headroom_bytes) == (4, 8, 13)
