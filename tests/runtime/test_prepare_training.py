"""What text reaches of a model, and what is frozen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import families
import pytest
import torch
import towers

from duoka.forecast.workload import Training, Workload
from duoka.runtime.image_inputs import ImagePrompts
from duoka.runtime.prepare_training import find_unreached, prepare_for_training

WORK = Workload(new_tokens=0, dtype="float32", training=Training())
UNREACHED = {
    "llava": ["vision_tower", "multi_modal_projector"],
    "llava_next": ["image_newline", "vision_tower", "multi_modal_projector"],
    "qwen2_vl": ["visual"],
    "qwen2_5_omni_thinker": ["audio_tower", "visual"],
    "kosmos-2.5": ["vision_model", "image_to_text_projection"],
    "t5gemma2": ["encoder.vision_tower", "encoder.multi_modal_projector"],
}


@pytest.mark.parametrize("name", UNREACHED)
def test_no_text_reaches_a_tower(name: str) -> None:
    # Some are in a module of the model's in newer versions of transformers.
    unreached = [name.removeprefix("model.") for name in find_unreached(towers.build(name))]
    assert unreached == UNREACHED[name]


def test_images_reach_a_tower() -> None:
    """All of it but the layers behind the one whose features the text reads."""
    model = towers.build("llava")
    assert find_unreached(model, ImagePrompts(model, [(56, 56)])) == [
        "model.vision_tower.encoder.layers.1",
        "model.vision_tower.post_layernorm",
    ]
    prepare_for_training(model, replace(WORK, images=1, image_size=(56, 56)))
    assert not any("vision" in name for name, it in model.named_parameters() if it.requires_grad)
    model = towers.build("llava")
    assert WORK.training is not None
    training = replace(WORK.training, train_vision=True)
    prepare_for_training(model, replace(WORK, images=1, image_size=(56, 56), training=training))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert any("vision_tower.encoder.layers.0" in name for name in trained)
    assert not any("vision_tower.encoder.layers.1" in name for name in trained)


@pytest.mark.parametrize("name", ["llama", "mixtral", "t5", "gpt2", "deepseek_v3"])
def test_text_reaches_all_of_a_language_model(name: str) -> None:
    """Experts as well: tokens choose some of them."""
    assert [name for name in find_unreached(families.build(name)) if "bias" not in name] == []


@pytest.mark.parametrize("method", ["lora", "full"])
def test_what_is_frozen_keeps_its_type(method: Any) -> None:
    model = towers.build("llava").to(torch.bfloat16)
    training = Training(method=method, master_weights=True)
    prepare_for_training(model, replace(WORK, dtype="bfloat16", training=training))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    for name, parameter in model.named_parameters():
        is_reached = name.startswith(("model.language_model", "lm_head"))
        assert (name in trained) == (is_reached and (method == "full" or "lora_" in name)), name
        assert parameter.dtype == (torch.float32 if name in trained else torch.bfloat16), name
        assert is_reached or "lora_" not in name
