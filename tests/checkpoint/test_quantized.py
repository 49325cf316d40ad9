"""What a config and the names of tensors say about a checkpoint that was published quantized."""

from __future__ import annotations

import pytest

from duoka.checkpoint.headers import TensorInfo
from duoka.checkpoint.quantized import METHODS, method_of, sort_tensors, without_quantization
from duoka.errors import ModelError


@pytest.mark.parametrize("name", METHODS)
def test_methods_are_known_by_their_names(name: str) -> None:
    stated = {"quantization_config": {"quant_method": name}}
    assert method_of(stated) is METHODS[name]
    assert method_of({"text_config": stated}) is METHODS[name]


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


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("gptq", "a.q.qweight"),
        ("awq", "a.q.scales"),
        ("compressed-tensors", "a.q.weight_packed"),
        ("bitsandbytes", "a.q.weight.quant_state.bitsandbytes__nf4"),
        ("bitsandbytes", "a.q.SCB"),
        ("torchao", "a.q._weight_scale"),
        ("fp8", "a.q.weight_scale_inv"),
        ("fbgemm_fp8", "a.q.input_scale_ub"),
    ],
)
def test_tensors_are_parts_of_weights(name: str, tensor: str) -> None:
    names = (tensor, "a.q.weight", "a.norm.weight", "a.k_proj.k_scale")
    stored = sort_tensors(METHODS[name], {each: TensorInfo(name=each) for each in names})
    assert {held.name for held in stored.weights["a.q.weight"]} == {tensor, "a.q.weight"}
    assert stored.plain == ("a.norm.weight",)
