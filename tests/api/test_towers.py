"""Image-text models, planned, spread and asked about a picture: as on one device."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import towers
from closeness import close
from image_checkpoints import GLM_4V_9B
from tiers import only
from torch import nn

import duoka
from duoka import Constraints, Fleet, Training, Workload, models
from duoka.checker.prove import prove
from duoka.planner.request import PlanProblem
from duoka.planner.solve import find_plan
from duoka.tools.demo.checkpoint import CONFIG
from duoka.tracing import TraceSpec, profile_training

pytestmark = pytest.mark.filterwarnings("ignore")

FAMILIES = ("glm4v", "glm4v_moe", "glm46v", "qwen2_vl", "gemma3", "llava", "internvl")
SIZE = (100, 80)
ANSWER = {
    "max_new_tokens": 3,
    "min_new_tokens": 3,
    "do_sample": False,
    "output_logits": True,
    "return_dict_in_generate": True,
}
LARGE_TOWER = {
    **CONFIG,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_layers": 2,
    "num_attention_heads": 2,
    "kv_channels": 16,
    "multi_query_group_num": 1,
    "boi_token_id": 50,
    "eoi_token_id": 51,
    "vision_config": {
        "hidden_size": 32,
        "num_hidden_layers": 6,
        "num_heads": 2,
        "intermediate_size": 2**16,  # a block of the tower has 16 MiB, the text hardly any
        "patch_size": 14,
        "image_size": 56,
        "num_positions": 17,
    },
}
BLOCKS = "model.vision.transformer.layers."


def work(inputs: dict[str, Any]) -> Workload:
    return Workload(
        prompt_tokens=inputs["input_ids"].shape[1],
        new_tokens=3,
        dtype="float32",
        images=1,
        image_size=SIZE[::-1],
    )


@torch.no_grad()
def holds(model: Any, inputs: dict[str, Any], plan: duoka.Plan) -> None:
    """Whether a model answers as planned what it answers on one device."""
    expected = model.generate(**inputs, **ANSWER)
    answered = duoka.dispatch(copy.deepcopy(model), plan).generate(**inputs, **ANSWER)
    assert answered.sequences.equal(expected.sequences)
    assert close(torch.stack(answered.logits), torch.stack(expected.logits))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_planned_and_custom_maps_answer_as_one_device(name: str) -> None:
    model = towers.build(name)
    inputs = towers.image_inputs(model, [SIZE], prompt_tokens=40)
    auto = duoka.plan(model, "virtual:2x1GiB", work(inputs), use_all=True)
    assert len(auto.devices) == 2
    holds(model, inputs, auto)
    balanced = duoka.plan(
        model, "virtual:3x1GiB", work(inputs), constraints=Constraints(strategy="balanced")
    )
    assert len(balanced.devices) == 3
    holds(model, inputs, balanced)
    # Text and tower on devices of their own, as people write it down.
    towered = {
        module: int("vision" in module or "visual" in module or "projector" in module)
        for module, _ in auto.placement.entries
    }
    assert set(towered.values()) == {0, 1}
    assert not duoka.check(model, towered, inputs=inputs).faults


@pytest.mark.slow
def test_a_tower_that_is_larger_than_a_card_is_cut_between_its_blocks() -> None:
    shapes: Any = models.build(LARGE_TOWER)
    torch.manual_seed(5)
    model = type(shapes)(shapes.config).float().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
    inputs = towers.image_inputs(model, [SIZE], prompt_tokens=24)
    plan = duoka.plan(model, "virtual:3x64MiB", work(inputs))
    at = {name: device for name, device in plan.placement.entries if name.startswith(BLOCKS)}
    assert at.keys() == {f"{BLOCKS}{number}" for number in range(6)}, "no block is cut inside"
    assert set(at.values()) == set(plan.devices)
    holds(model, inputs, plan)


def test_training_on_a_picture_is_checked_where_the_picture_fits(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LARGE_TOWER), encoding="utf-8")
    report = duoka.check(
        config,
        fleet="virtual:2x192MiB",
        workload=Workload(prompt_tokens=40, new_tokens=1, dtype="float32"),
        train=Training(method="lora"),
        images=[(56, 56)],
    )
    assert report.ok
    assert report.fits
    assert report.notes == ()
    assert report.workload is not None
    assert (report.workload.images, report.workload.image_size) == (1, (56, 56))
    assert report.subject is not None
    tower = [device for name, device in report.subject.entries if name.startswith(BLOCKS)]
    assert set(tower) == {"vgpu:0", "vgpu:1"}
    plan = duoka.plan(config, "virtual:2x192MiB", report.workload, use_all=True)
    assert report.subject.entries == plan.placement.entries


IMAGES: dict[str, Any] = {"prompt_tokens": 400, "new_tokens": 0, "dtype": "bfloat16", "images": 1}


@pytest.mark.parametrize(
    "case",
    only(
        [("large", Training(), 1)],
        [
            ("large", Training(), 1),
            ("llava", Training(method="full"), 3),
            ("llava", Training(gradient_checkpointing=True), 2),
            ("qwen2_vl", Training(optimizer="sgd"), 1),
            ("gemma3", Training(master_weights=True), 1),
        ],
    ),
)
def test_training_on_pictures_is_measured_as_it_is_forecast(
    case: tuple[str, Training, int],
) -> None:
    """Cut in front of, inside and behind the tower; the rules hold for every length."""
    name, training, batch = case
    model = towers.build(name) if name != "large" else models.build(LARGE_TOWER)
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    build = partial(models.build, config, dtype=torch.bfloat16)
    work = Workload(**IMAGES, batch=batch, image_size=(56, 56), training=training)
    spec = TraceSpec(fingerprint=name, conditions=work.conditions)
    profile, is_regular = profile_training(build, spec, work)
    assert is_regular or name == "qwen2_vl"  # whose tower takes images one by one
    chain = [block for block in profile.blocks if block.tied_to is None]
    fleet = Fleet.parse("virtual:2x1GiB")
    for cut in (1, 4, len(chain) - 2):
        pins = tuple(
            (module, fleet.names[int(index >= cut)])
            for index, block in enumerate(chain)
            for module in block.modules
        )
        problem = PlanProblem(fleet=fleet, workload=work, constraints=Constraints(pins=pins))
        plan = find_plan(profile, problem)
        for forecast, measured in zip(plan.forecast.devices, prove(plan, build()), strict=True):
            assert forecast.allocated_bytes == pytest.approx(
                measured.allocated_bytes, rel=1e-3, abs=2**14
            )
            assert forecast.reserved_bytes == measured.reserved_bytes


@pytest.mark.slow
def test_a_vision_model_at_full_size_learns_from_a_picture(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(GLM_4V_9B), encoding="utf-8")
    report = duoka.check(
        config,
        fleet="5xRTX3090",
        workload=Workload(prompt_tokens=2047, new_tokens=1),
        train=Training(),
        images=[(1120, 1120)],
    )
    assert report.ok
    assert report.fits
    assert len(report.devices) == 5
    assert max(peak.reserved_bytes for peak in report.memory) < 18 * 2**30
    assert report.workload is not None
    plan = duoka.plan(config, "5xRTX3090", report.workload)
    assert len(plan.devices) == 4


def test_training_beside_quantized_weights_is_checked_as_it_is_planned(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG), encoding="utf-8")
    work = Workload(prompt_tokens=31, new_tokens=1, quantize="nf4")
    training = Training(method="lora")
    report = duoka.check(config, fleet="virtual:2x64MiB", workload=work, train=training)
    learnt = Workload(prompt_tokens=32, new_tokens=0, quantize="nf4", training=training)
    plan = duoka.plan(config, "virtual:2x64MiB", learnt, use_all=True)
    assert report.subject is not None
    assert dict(report.subject.entries) == plan.device_map
