"""Made-up images in each family's format: the model's own code accepts them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import towers
from PIL import Image
from torch import nn
from transformers import Glm4vConfig, LlamaConfig, PreTrainedModel

import duoka
from duoka import Constraints, Workload, models, virtual
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import ModelError, UsageError
from duoka.models.from_checkpoint import build_model
from duoka.planner.request import PlanProblem
from duoka.planner.solve import find_plan
from duoka.runtime.image_inputs import _processor, prompts_for

FAMILIES = (
    "glm4v", "glm46v", "glm4v_moe", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "llava_next",
    "llava_onevision", "gemma3", "paligemma", "mllama", "internvl",
    "mistral3", "aya_vision", "blip-2", "instructblip", "git", "kosmos-2", "florence2",
    "pix2struct", "got_ocr2", "ovis2", "video_llama_3",
)  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tiny_model_takes_the_images(name: str) -> None:
    model = towers.build(name)
    before = {key: (id(value), value.device) for key, value in model.named_parameters()}
    inputs = towers.image_inputs(model, [(100, 80)], batch=2, prompt_tokens=32)
    assert {key: (id(value), value.device) for key, value in model.named_parameters()} == before
    with torch.no_grad():
        model(**inputs)


@pytest.mark.parametrize("name", ["glm4v", "qwen2_5_vl", "qwen3_vl", "llava_next", "mistral3"])
def test_images_of_several_sizes_in_one_prompt(name: str) -> None:
    model = towers.build(name)
    inputs = towers.image_inputs(model, [(100, 80), (140, 280)], prompt_tokens=400)
    assert inputs["input_ids"].shape == (1, 400) or name == "llava_next"
    with torch.no_grad():
        model(**inputs)


def full_size() -> PreTrainedModel:
    config = {**Glm4vConfig().to_dict(), "architectures": ["Glm4vForConditionalGeneration"]}
    return models.build(config, dtype=torch.bfloat16)


def test_a_full_size_model_without_weights() -> None:
    model = full_size()
    with virtual.gpus([None], data="meta"):
        inputs = towers.image_inputs(model, [(1120, 1120)], device="vgpu:0", prompt_tokens=8192)
        is_image = inputs["input_ids"] == model.config.image_token_id
        assert is_image.sum().item() == 1600
        assert inputs["input_ids"].shape == (1, 8192)
        assert inputs["pixel_values"].shape == (6400, 3 * 2 * 14 * 14)
        assert inputs["pixel_values"].dtype == torch.bfloat16
        assert inputs["image_grid_thw"].tolist() == [[1, 80, 80]]
        around = inputs["input_ids"][0, [-1600 - 10, -9]].tolist()
    assert around == [model.config.image_start_token_id, model.config.image_end_token_id]
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_model_without_images() -> None:
    model = towers.build("mistral4")
    with pytest.raises(ModelError, match="takes no images"):
        towers.image_inputs(model, [(10, 10)])


def test_a_family_that_is_not_known() -> None:
    class Strange(PreTrainedModel):
        config_class = LlamaConfig

        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            self.head = nn.Linear(2, 2)

        def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor) -> torch.Tensor:
            return self.head(pixel_values)

    model = Strange(LlamaConfig(vocab_size=10, hidden_size=4, num_attention_heads=1))
    with pytest.raises(ModelError, match="no image processor") as caught:
        towers.image_inputs(model, [(10, 10)])
    assert "inputs explicitly" in (caught.value.hint or "")


def test_code_that_reads_pixels_is_refused() -> None:
    with pytest.raises(ModelError, match=r"image inputs of Idefics2\w+ for images of 100x80"):
        towers.image_inputs(towers.build("idefics2"), [(100, 80)])


def test_an_image_that_the_processor_refuses() -> None:
    with pytest.raises(ModelError, match=r"4000x10.*aspect ratio"):
        towers.image_inputs(towers.build("qwen2_vl"), [(4000, 10)])


class Published(PreTrainedModel):
    """As GLM-4V's published code has it: pictures are `images`, and three tokens in the prompt."""

    config_class = LlamaConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.head = nn.Linear(2, 2)

    def forward(self, input_ids: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        return self.head(images)


def test_pictures_of_published_code() -> None:
    vision = {"image_size": 28, "patch_size": 14, "hidden_size": 8}
    config = LlamaConfig(vision_config=vision, boi_token_id=20, eoi_token_id=21)
    inputs = towers.image_inputs(Published(config), [(100, 50)], batch=2, prompt_tokens=16)
    assert inputs["images"].shape == (2, 3, 28, 28)
    (begin,) = (inputs["input_ids"][0] == 20).nonzero()[0].tolist()
    assert inputs["input_ids"].shape == (2, 16)
    assert inputs["input_ids"][0, begin + 2] == 21


PICTURED = Workload(
    prompt_tokens=400, new_tokens=4, dtype="bfloat16", images=1, image_size=(100, 200)
)


def test_prompts_are_no_shorter_than_their_images() -> None:
    model = models.build(tiny.CONFIGS["tower"], dtype=torch.bfloat16)
    prompts = prompts_for(model, PICTURED.conditions)
    assert prompts is not None
    assert prompts_for(model, Workload().conditions) is None
    # 8 by 8 patches, and the words around them.
    assert 64 < prompts.least_tokens < 80
    assert prompts.inputs(2, 0)["input_ids"].shape == (2, prompts.least_tokens)
    assert prompts.inputs(3, 400)["input_ids"].shape == (3, 400)


@pytest.mark.slow
def test_a_prompt_that_is_too_short_for_its_images_is_refused() -> None:
    short = dataclasses.replace(PICTURED, prompt_tokens=60, prefill_chunk_tokens=None)
    problem = PlanProblem(fleet=duoka.Fleet.parse("virtual:1GiB"), workload=short)
    profile = tiny.regular("tower", short.conditions)
    with pytest.raises(UsageError, match=r"1 image of 200x100 .* need \d+ tokens.* has 60"):
        find_plan(profile, problem)


def test_a_text_model_can_not_be_planned_with_images() -> None:
    model = models.build(tiny.CONFIGS["llama"], dtype=torch.bfloat16)
    with pytest.raises(ModelError, match="takes no images"):
        duoka.plan(model, "virtual:1GiB", PICTURED)


LONG = Workload(
    prompt_tokens=7680,
    new_tokens=4,
    dtype="bfloat16",
    prefill_chunk_tokens=None,
    images=1,
    image_size=(1120, 1120),
)


def vision_config() -> dict[str, Any]:
    config = Glm4vConfig().to_dict()
    config["text_config"]["rope_parameters"] |= {
        "mrope_section": [8, 12, 12],
        "partial_rotary_factor": 0.5,
    }
    return {**config, "architectures": ["Glm4vForConditionalGeneration"]}


@pytest.mark.slow
def test_a_tower_on_two_of_five_cards() -> None:
    config = vision_config()
    model = models.build(config, dtype=torch.bfloat16)
    inside = (("model.visual.blocks.11", "vgpu:0"), ("model.visual.blocks.12", "vgpu:1"))
    limits = Constraints(pins=inside)
    plan = duoka.plan(model, "virtual:5x24GiB", LONG, use_all=True, constraints=limits)
    assert len(plan.forecast.devices) == 5
    assert dict(inside).items() <= plan.device_map.items()
    measured = tiny.measure(plan, config)
    for forecast, (allocated, reserved) in zip(plan.forecast.devices, measured, strict=True):
        assert forecast.allocated_bytes == pytest.approx(allocated, rel=0.003)
        assert forecast.reserved_bytes == pytest.approx(reserved, rel=0.003)


def test_tiles_are_those_of_the_familys_processor() -> None:
    """InternVL's processor cuts images into tiles, which its image processor alone does not."""
    config = towers.configuration("internvl")
    config.vision_config.image_size = [towers.IMAGE_SIZE] * 2
    processor = _processor(config, {})
    assert processor.crop_to_patches
    assert len(processor(images=[Image.new("RGB", (200, 100))])["pixel_values"]) == 9


def test_images_are_as_large_as_the_checkpoint_says(tmp_path: Path) -> None:
    """Published settings differ from a family's own: they decide how many tokens an image is."""
    config = towers.build("qwen2_vl").config.to_dict()
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "architectures": ["Qwen2VLForConditionalGeneration"]})
    )
    workload = dataclasses.replace(PICTURED, image_size=(280, 280), dtype="float32")

    def least_tokens() -> int:
        model = build_model(Checkpoint.open(tmp_path), workload)
        prompts = prompts_for(model, workload.conditions)
        assert prompts is not None
        return prompts.least_tokens

    usual, fingerprint = least_tokens(), Checkpoint.open(tmp_path).fingerprint
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"max_pixels": 140 * 140, "image_processor_type": "Qwen2VLImageProcessor"})
    )
    assert usual - least_tokens() == 100 - 25
    assert Checkpoint.open(tmp_path).fingerprint != fingerprint
