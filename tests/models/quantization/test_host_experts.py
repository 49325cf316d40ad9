"""Experts on the host compute what they compute on the GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from closeness import HALF_TOLERANCE
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from duoka import virtual
from duoka.models.boxes import whole_box
from duoka.models.quantization import (
    ExpertStack,
    expert_modules,
    keep_on_host,
    num_bytes,
    on_host,
)
from duoka.models.quantization.host_experts import IMPLEMENTATION, use_implementation
from duoka.models.quantization.stacked import quantize_stack
from duoka.runtime.dispatch.place_tensors import move_tensors
from duoka.runtime.load.fill import Quantizer

HIDDEN, EXPERTS, TOP_K = 256, 8, 3
SIZES = {
    "hidden_size": HIDDEN, "intermediate_size": 192, "moe_intermediate_size": 192,
    "num_experts": EXPERTS, "num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K,
}  # fmt: skip
CLASSES: dict[str, Any] = {"qwen3_moe": Qwen3MoeExperts, "gpt_oss": GptOssExperts}
"""gpt_oss transposes its weights and has biases."""
# The layouts of the CPU and of a GPU round scales differently.
TOLERANCES = {"none": HALF_TOLERANCE, "int8": 0.01, "int4": 0.03, "nf4": 0.01}
BIAS_DIMENSIONS = 2


@pytest.fixture(autouse=True)
def _gpus() -> None:
    virtual.set_gpus([None])


def make_layers(family: str, device: str = "cpu") -> Any:
    """Make two layers of experts in bfloat16, with the same weights each time."""
    config = AutoConfig.for_model(family, **SIZES)
    config._experts_implementation = "eager"
    with torch.device("meta"):
        layers = nn.ModuleList(CLASSES[family](config).to(torch.bfloat16) for _ in range(2))
    layers.to_empty(device="cpu")
    generator = torch.manual_seed(0)
    for parameter in layers.parameters():
        parameter.data.normal_(std=0.05, generator=generator)
    return layers.to(device)


def quantize(layer: Any, scheme: Any) -> Any:
    if scheme != "none":
        for key, stack in list(layer.named_parameters()):
            if stack.ndim > BIAS_DIMENSIONS:
                made = quantize_stack(stack.data, scheme, is_transposed=layer.is_transposed)
                layer.register_parameter(key, nn.Parameter(made, requires_grad=False))
        use_implementation(layer)
    return layer


def make_hosted(family: str, scheme: str, device: str, slots: int = 0) -> Any:
    """Make the layers with the experts of the first on the host, filled as in loading."""
    sources = dict(make_layers(family).named_parameters())
    layers = make_layers(family).to("meta")
    quantize(layers[0], scheme)
    size = sum(map(num_bytes, layers[0].parameters()))
    keep_on_host(layers, ["0"], slots * size // EXPERTS)
    names = [name for name, _ in (*layers.named_parameters(), *layers.named_buffers())]
    move_tensors(layers, dict.fromkeys(names, torch.device(device)))
    for name, target in layers.named_parameters():
        if isinstance(target, ExpertStack):
            quantizer = Quantizer(torch.device(device))
            quantizer.put(name, target.data, whole_box(target.shape), sources[name].data)
        else:
            target.data.copy_(sources[name].data)
    return layers


def inputs(tokens: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.manual_seed(tokens)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    weights, index = scores.softmax(1).topk(TOP_K)
    return hidden.to(device), index.to(device), weights.bfloat16().to(device)


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("scheme", TOLERANCES)
@pytest.mark.parametrize("device", ["cpu", "vgpu:0"])
def test_the_host_computes_what_the_device_does(family: str, scheme: str, device: str) -> None:
    reference = quantize(make_layers(family, device)[0], scheme)
    hosted = make_hosted(family, scheme, device)
    assert [name for name, _ in on_host(hosted)] == ["0"]
    assert all(parameter.device.type == "cpu" for parameter in hosted[0].parameters())
    for tokens in (1, 2, 21):
        sent = inputs(tokens, device)
        with torch.no_grad():
            expected, outputs = reference(*sent), hosted[0](*sent)
        assert (str(outputs.device), outputs.dtype) == (device, expected.dtype)
        difference = (outputs.cpu().float() - expected.cpu().float()).norm()
        assert difference / expected.cpu().float().norm() < TOLERANCES[scheme]


@pytest.mark.parametrize("family", CLASSES)
def test_other_layers_keep_the_forward_of_transformers(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers share a configuration, and each has the implementation that was chosen for it."""
    layers = make_hosted(family, "none", "vgpu:0")
    assert expert_modules(layers) == ["0", "1"]
    assert layers[1].config._experts_implementation == IMPLEMENTATION
    sent = inputs(5, "vgpu:0")
    with torch.no_grad():
        assert torch.equal(layers[1](*sent), make_layers(family, "vgpu:0")[1](*sent))
    chosen: list[nn.Module] = []

    def record(module: nn.Module, hidden: Tensor, *_: Tensor) -> Tensor:
        chosen.append(module)
        return hidden

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._local_mapping, "recorded", record)
    other = make_layers(family).to("meta")
    other[0].config._experts_implementation = "recorded"
    keep_on_host(other, ["0"])
    other[1](*inputs(5, "meta"))
    assert chosen == [other[1]]


def test_an_odd_expert_of_a_transposed_stack_is_filled_like_an_even_one() -> None:
    """Its rows and columns are exchanged once, whatever was filled before."""
    hosted = make_hosted("gpt_oss", "none", "cpu")
    source = make_layers("gpt_oss")[0].gate_up_proj
    for number in range(EXPERTS):
        assert torch.equal(hosted[0].gate_up_proj.data.expert(number).weight, source[number].T)
