"""Images in passes and prompts in chunks: the same answers, and the memory that was forecast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import towers
from closeness import close
from torch import Tensor
from transformers import PreTrainedModel

import duoka
from duoka import virtual
from duoka.errors import UsageError
from duoka.forecast.workload import image_passes
from duoka.planner.placement import Placement
from duoka.runtime.call.encode_images import (
    FEATURES,
    arguments_with_features,
    encodes_apart,
    reads_in_chunks,
)
from duoka.runtime.call.stepper import Stepper
from duoka.runtime.dispatch.dispatch import dispatch
from duoka.runtime.image_inputs import ImagePrompts, prompts_for

FAMILIES = ("llava", "glm4v", "qwen2_vl", "qwen3_vl", "glm4v_moe", "glm46v", "gemma3", "internvl")
IMAGES, SIZE, TOKENS = 3, (112, 112), 800
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not encodes_apart(towers.build("llava")), reason="transformers before 5.18"),
]


def pictures_and_text(model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Three images that differ, in a prompt that isn't all the same word."""
    prompts = ImagePrompts(model, [SIZE] * IMAGES)
    generator = torch.Generator().manual_seed(1)
    pictures = {
        name: torch.randn(tensor.shape, generator=generator)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in prompts.pictures(1).items()
    }
    return pictures, prompts.text(1, 0)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_passes_change_nothing(name: str) -> None:
    model: Any = towers.build(name)
    pictures, text = pictures_and_text(model)
    whole = model(**pictures, **text).logits
    for vision_batch in (None, 2, 1):
        arguments = arguments_with_features(model, pictures, image_passes(IMAGES, vision_batch))
        assert not {"pixel_values"} & arguments.keys()
        assert close(model(**arguments, **text).logits, whole)
        kept = arguments[FEATURES]["image"]
        assert not {"hidden_states", "last_hidden_state"} & kept.keys(), "for nobody"


@pytest.mark.parametrize("name", FAMILIES)
def test_generate_takes_features(name: str) -> None:
    """With any passes and chunks the same tokens."""
    model: Any = towers.build(name)
    model.generation_config.eos_token_id = None
    pictures, text = pictures_and_text(model)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**pictures, **text, **options)
    for vision_batch, chunk in ((1, None), (2, 100)):
        if chunk is not None and not reads_in_chunks(model):
            continue
        arguments = arguments_with_features(model, pictures, image_passes(IMAGES, vision_batch))
        output = model.generate(**arguments, **text, **options, prefill_chunk_size=chunk)
        assert output.equal(expected)


@pytest.mark.parametrize(
    "name",
    [
        *FAMILIES[:2],
        *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES[2:]),
    ],
)
@pytest.mark.parametrize("parts", [{"vision_batch": 2, "chunk": 100}, {}, {"vision_batch": 1}])
def test_the_forecast_is_measured(name: str, parts: dict[str, int]) -> None:
    model = towers.build(name)
    chunk = parts.get("chunk")
    if chunk is not None and not reads_in_chunks(model):
        pytest.skip("its images are looked at from both sides")
    workload = duoka.Workload(
        prompt_tokens=TOKENS,
        new_tokens=6,
        dtype="float32",
        images=IMAGES,
        image_size=SIZE,
        vision_batch=parts.get("vision_batch"),
        prefill_chunk_tokens=chunk,
    )
    plan = duoka.plan(model, "virtual:2x1GiB", workload, use_all=True)
    for stage, (allocated, reserved) in zip(plan.forecast.devices, peaks(plan, model), strict=True):
        assert stage.allocated_bytes == pytest.approx(allocated, rel=0.03)
        assert stage.reserved_bytes == pytest.approx(reserved, rel=0.03)


def test_every_chunk_of_many_counts() -> None:
    """What a growing KV cache leaves behind between the first chunks and the last is reserved."""
    model = towers.build("llava")
    workload = duoka.Workload(
        prompt_tokens=40_000,
        new_tokens=2,
        dtype="float32",
        images=1,
        image_size=SIZE,
        prefill_chunk_tokens=4000,
    )
    plan = duoka.plan(model, "virtual:2x8GiB", workload, use_all=True)
    for stage, (_, reserved) in zip(plan.forecast.devices, peaks(plan, model), strict=True):
        assert stage.reserved_bytes == pytest.approx(reserved, rel=0.001)


def peaks(plan: duoka.Plan, model: PreTrainedModel) -> list[tuple[int, int]]:
    """Allocated and reserved bytes of each device, by running every step."""
    entries = tuple(
        (module, f"vgpu:{plan.devices.index(name)}") for module, name in plan.placement.entries
    )
    prompts = prompts_for(model, plan.workload.conditions)
    with virtual.gpus([None, None], data="meta") as world, torch.no_grad():
        dispatch(model, Placement(entries=entries), empty=True)
        stepper = Stepper.of(model, plan.workload, torch.device("vgpu:0"), prompts)
        stepper.run(plan.workload, decode_steps=plan.workload.new_tokens - 1)
        return [
            (world.max_memory_allocated(number), world.max_memory_reserved(number))
            for number in range(2)
        ]


@pytest.mark.slow
def test_parts_are_chosen_where_the_whole_does_not_fit() -> None:
    """The largest passes that fit; the plan says so, and gives its reason."""
    model = towers.build("qwen2_vl")
    workload = duoka.Workload(
        prompt_tokens=3000, new_tokens=8, dtype="float32", images=8, image_size=(224, 224)
    )
    chosen = []
    for budget in (400, 100, 40):
        plan = duoka.plan(model, f"virtual:{budget}MiB", workload)
        assert plan.request.workload.prefill_chunk_tokens == "auto"
        chosen.append((plan.workload.vision_batch, plan.workload.prefill_chunk_tokens))
    assert chosen == [(None, None), (1, 1024), (1, 256)]
    assert any("encoded 1 at a time" in reason.text for reason in plan.why)
    assert any("chunks of 256 tokens" in reason.text for reason in plan.why)


@pytest.mark.parametrize(
    ("name", "parts", "problem"),
    [
        ("mllama", {"vision_batch": 1}, "encodes all images of a prompt at once"),
        ("mllama", {"prefill_chunk_tokens": 64}, "doesn't support chunked prefill with images"),
        ("gemma3", {"prefill_chunk_tokens": 64}, "doesn't support chunked prefill with images"),
    ],
)
def test_parts_that_a_model_does_not_know(name: str, parts: Any, problem: str) -> None:
    workload = duoka.Workload(
        prompt_tokens=64, new_tokens=8, dtype="float32", images=1, image_size=(56, 56), **parts
    )
    with pytest.raises(UsageError, match=problem):
        duoka.plan(towers.build(name), "virtual:1GiB", workload)
