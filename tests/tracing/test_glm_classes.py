"""Every GLM class of transformers is planned, with its default configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import only
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import duoka

TEXTS = dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
PICTURES = dict(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
CLASSES = sorted(name for name in {**TEXTS, **PICTURES} if name.startswith("glm"))
KNOWN = {
    "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "glm46v", "glm4v", "glm4v_moe",
    "glm5_next", "glm_ocr", "glmga",
}  # fmt: skip
# Of zai-org/GLM-4.1V-9B-Thinking and GLM-4.5V: the defaults' sections don't fit their head size.
_SECTIONS = {
    "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12],
    "partial_rotary_factor": 0.5,
}  # fmt: skip
_PUBLISHED: dict[str, dict[str, Any]] = {
    name: {"rope_parameters": _SECTIONS, "head_dim": 128}
    for name in ("glm46v", "glm4v", "glm4v_moe", "glmga")
}


def test_all_are_known() -> None:
    """A new class comes here, and is planned below."""
    assert {*CLASSES} <= KNOWN


@pytest.mark.parametrize("name", only(["glm5_next"], CLASSES))
def test_a_class_is_planned(name: str, tmp_path: Path) -> None:
    """With four of its layers; the weights are those of transformers' own model."""
    changes = {"num_hidden_layers": 4, **_PUBLISHED.get(name, {})}
    changes = {"text_config": changes} if name in PICTURES else changes
    config = CONFIG_MAPPING[name](**changes).to_dict()
    config |= {"dtype": "bfloat16", "architectures": [PICTURES.get(name) or TEXTS[name]]}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    plan = duoka.plan(tmp_path, "4xH200", duoka.Workload(prompt_tokens=448, new_tokens=64))
    factory = AutoModelForImageTextToText if name in PICTURES else AutoModelForCausalLM
    with torch.device("meta"):
        model = factory.from_config(AutoConfig.from_pretrained(tmp_path))
    weight_bytes = sum(stage.weight_bytes for stage in plan.forecast.devices)
    expected = sum(tensor.numel() * tensor.itemsize for tensor in model.state_dict().values())
    assert weight_bytes == pytest.approx(expected, rel=5e-3)  # each tensor takes whole blocks
