"""Towers whose features model code moves to the text's embeddings: cut between their blocks."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import towers
from tests import tiny
from tiers import only

from duoka import Fleet, Workload, virtual
from duoka.forecast.allocator import SMALL_SEGMENT_BYTES
from duoka.forecast.profile import Profile
from duoka.planner.constraints import Constraints
from duoka.planner.placement import Placement
from duoka.planner.request import PlanProblem
from duoka.planner.solve import find_plan
from duoka.runtime.call.encode_images import encodes_apart
from duoka.runtime.dispatch.dispatch import dispatch
from duoka.tracing import TraceSpec, trace_workload

TOWER, TEXT = "model.vision_tower", "model.language_model"
WORKLOAD = Workload(
    prompt_tokens=444,
    new_tokens=5,
    dtype="bfloat16",
    prefill_chunk_tokens=None,
    images=1,
    image_size=(100, 200),
)
TWO = Fleet.parse("virtual:2x1GiB")
APART = encodes_apart(towers.build("llava"))


def profile() -> Profile:
    return tiny.profile_for("tower", WORKLOAD)


@pytest.mark.slow
def test_a_tower_falls_into_its_layers() -> None:
    blocks = profile().blocks
    assert [block.modules for block in blocks] == [
        (f"{TEXT}.embed_tokens",),
        (f"{TOWER}.embeddings",),
        (f"{TOWER}.pre_layrnorm",),
        *[(f"{TOWER}.encoder.layers.{number}",) for number in range(4)],
        (f"{TOWER}.post_layernorm",),
        ("model.multi_modal_projector.linear_1",),
        ("model.multi_modal_projector.linear_2",),
        *([] if APART else [()]),
        (f"{TEXT}.rotary_emb", f"{TEXT}.layers.0"),
        *[(f"{TEXT}.layers.{number}",) for number in range(1, 4)],
        (f"{TEXT}.norm",),
        ("lm_head",),
        (),
    ]
    # Where the features are spliced in, unless a step of its own made them: with the embedding.
    assert APART or blocks[10].tied_to == 0


@pytest.mark.slow
def test_text_alone_has_no_returns() -> None:
    plain = tiny.regular("tower", Workload().conditions)
    assert all(block.modules for block in plain.blocks[:-1])
    assert all(block.tied_to is None for block in plain.blocks[:-1])


@pytest.mark.parametrize("cut", only([4], range(1, 11)))
def test_a_cut_inside_the_tower_is_measured_as_it_is_forecast(cut: int) -> None:
    chain = [block for block in profile().blocks if block.tied_to is None]
    names = TWO.names
    pins = tuple(
        (name, names[int(number >= cut)])
        for number, block in enumerate(chain)
        for name in block.modules
    )
    problem = PlanProblem(fleet=TWO, workload=WORKLOAD, constraints=Constraints(pins=pins))
    plan = find_plan(profile(), problem)
    assert plan.device_map[chain[cut].modules[0]] == plan.devices[1]
    measured = tiny.measure(plan, tiny.CONFIGS["tower"])
    for forecast, (allocated, reserved) in zip(plan.forecast.devices, measured, strict=True):
        assert 0 <= forecast.allocated_bytes - allocated <= 0.003 * allocated
        # Features count where they were made and where they are brought: at most one segment more.
        assert 0 <= forecast.reserved_bytes - reserved <= SMALL_SEGMENT_BYTES * APART


@pytest.mark.parametrize("name", ["glm4v", "qwen2_5_vl", "llava_next"])
def test_a_cut_inside_a_tower_gives_the_same_logits(name: str) -> None:
    workload = dataclasses.replace(WORKLOAD, dtype="float32", image_size=(112, 112))
    spec = TraceSpec(fingerprint=name, conditions=workload.conditions)
    blocks = trace_workload(towers.build(name).to("meta"), spec, [workload]).blocks
    model = towers.build(name)
    inputs = towers.image_inputs(model, [(112, 112)], prompt_tokens=400)
    with torch.no_grad():
        expected = model(**inputs).logits
    behind = next(index for index, block in enumerate(blocks) if block.tied_to is not None)
    for cut in (2, behind // 2, behind):
        entries = tuple(
            (module, f"vgpu:{int(index >= cut)}")
            for index, block in enumerate(blocks)
            for module in block.modules
        )
        with virtual.gpus([None, None]), torch.no_grad():
            spread = dispatch(copy.deepcopy(model), Placement(entries=entries))
            logits = spread(**{key: value.to("vgpu:0") for key, value in inputs.items()}).logits
            assert torch.allclose(logits.cpu(), expected, atol=1e-4)
