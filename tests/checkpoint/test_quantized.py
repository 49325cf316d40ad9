"""What a config and the names of tensors say about a checkpoint that was published quantized."""

from __future__ import annotations

import pytest

from duoka.checkpoint.quantized import METHODS, group_parts, method_of, without_quantization
from duoka.errors import ModelError


@pytest.mark.parametrize("name", METHODS)
def test_methods_are_known_by_their_names(name: str) -> None:
    stated = {"quantization_config": {"quant_method": name}}
    assert method_of(stated) == name
    assert method_of({"text_config": stated}) == name


def test_what_is_not_quantized_and_what_is_not_known() -> None:
    assert method_of({"model_type": "llama"}) is None
    for stated in ({"quant_method": "spell"}, {}, {"quant_method": ["gptq"]}):
        with pytest.raises(ModelError, match="is not supported"):
            method_of({"quantization_config": stated})


def test_a_config_without_its_quantization() -> None:
    inner = {"hidden_size": 8, "quantization_config": {"quant_method": "fp8"}}
    assert without_quantization({"text_config": inner, "quantization_config": {}}) == {
        "text_config": {"hidden_size": 8}
    }


def test_settings_of_bitsandbytes_without_a_method() -> None:
    assert method_of({"quantization_config": {"load_in_4bit": True}}) == "bitsandbytes"


@pytest.mark.parametrize(
    "part",
    [
        *("qweight", "scales", "weight_packed", "SCB", "weight_scale_inv", "weight.absmax"),
        *("weight.nested_quant_map", "weight.quant_state.bitsandbytes__nf4"),
    ],
)
def test_tensors_are_parts_of_weights(part: str) -> None:
    names = (f"a.q.{part}", "a.q.weight", "a.norm.weight", "a.k_proj.k_scale", "a.q.input_scale")
    assert group_parts(names) == {
        "a.q.weight": {part: f"a.q.{part}", "weight": "a.q.weight"},
        "a.norm.weight": {"weight": "a.norm.weight"},
    }


def test_parts_of_stacks() -> None:
    names = ("experts.up_proj_blocks", "experts.up_proj_scales", "experts.up_proj_bias")
    assert group_parts(names) == {
        "experts.up_proj": {"_blocks": names[0], "_scales": names[1]},
        names[2]: {"weight": names[2]},
    }
