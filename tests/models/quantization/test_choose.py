"""Which weights are quantized."""

from __future__ import annotations

import copy

import pytest
import tiny
import torch
from torch import nn

from duoka import models
from duoka.models.quantization import Scheme, is_composed, notes, parts, quantize_model
from duoka.models.quantization.weights import computes_in, quantize


@pytest.mark.parametrize(
    ("name", "count", "said"),
    [
        ("glm", 24, "embeddings (1); the head and tied weights (1)"),
        ("tied", 28, "embeddings (1)"),
        ("experts", 24, "other layers (4)"),
    ],
)
def test_linear_layers_but_head_routers_and_stacks(name: str, count: int, said: str) -> None:
    model = models.build(tiny.CONFIGS[name], dtype=torch.bfloat16)
    quantize_model(model, "int8")
    chosen = [name for name, each in model.named_parameters() if is_composed(each)]
    assert len(chosen) == count
    assert not any(part in name for name in chosen for part in ("embed", "head", "gate.", "norm"))
    told = notes(model, "int8")
    assert f"{count} weights" in told[0]
    assert said in told[1]
    assert "duoka bench --quality" in told[2]


@pytest.mark.parametrize("scheme", ["int8", "int4", "nf4"])
def test_weights_without_data_are_as_each_would_be_made(
    scheme: Scheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of each shape is quantized, the others are made like it."""
    made: list[torch.Tensor] = []

    def counted(weight: torch.Tensor, scheme: Scheme) -> torch.Tensor:
        made.append(weight)
        return quantize(weight, scheme)

    model = models.build(tiny.CONFIGS["llama"], dtype=torch.bfloat16)
    plain = dict(model.named_parameters())
    monkeypatch.setattr("duoka.models.quantization.choose.quantize", counted)
    quantize_model(model, scheme)
    weights = {name: each for name, each in model.named_parameters() if is_composed(each)}
    assert len(made) == len({weight.shape for weight in made}) < len(weights)
    for name, weight in weights.items():
        alone = quantize(plain[name].detach(), scheme)
        assert type(weight.data) is type(alone)
        assert weight.shape == alone.shape
        assert computes_in(weight) == torch.bfloat16
        pairs = zip(parts(weight).items(), parts(alone).items(), strict=True)
        for (key, part), (other_key, other) in pairs:
            assert key == other_key
            assert (part.shape, part.stride(), part.dtype) == (
                other.shape,
                other.stride(),
                other.dtype,
            )


def test_shapes_that_a_kernel_does_not_take_stay() -> None:
    config = {**tiny.CONFIGS["llama"], "intermediate_size": 776}
    model = models.build(config, dtype=torch.bfloat16)
    quantize_model(model, "int4")
    kept = [name for name, each in model.named_parameters() if "mlp" in name]
    assert kept
    assert not any(is_composed(model.get_parameter(name)) for name in kept)
    assert "shapes unsupported by int4" in notes(model, "int4")[1]


def test_routers_are_known_by_where_they_are() -> None:
    """A layer called "classifier" is one only inside of a router, as in Switch transformers."""
    model = models.build(tiny.CONFIGS["llama"], dtype=torch.bfloat16)
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    mlp.router = nn.Module()
    mlp.router.classifier = nn.Linear(64, 64, bias=False, device="meta", dtype=torch.bfloat16)
    attention.classifier = copy.deepcopy(mlp.router.classifier)
    quantize_model(model, "int8")
    assert not is_composed(mlp.router.classifier.weight)
    assert is_composed(attention.classifier.weight)
    assert "routers (1)" in notes(model, "int8")[1]


def test_what_is_left_out_is_told_only_where_something_is() -> None:
    model = models.build(tiny.CONFIGS["llama"], dtype=torch.bfloat16)
    model.model.embed_tokens = model.lm_head = nn.Identity()
    quantize_model(model, "int8")
    assert not any(text.startswith("Not quantized") for text in notes(model, "int8"))


def test_nothing_to_quantize_is_said() -> None:
    config = {**tiny.CONFIGS["llama"], "hidden_size": 40, "intermediate_size": 72, "head_dim": 8}
    config |= {"num_attention_heads": 5, "num_key_value_heads": 5}
    model = models.build(config, dtype=torch.bfloat16)
    quantize_model(model, "nf4")
    assert notes(model, "nf4")[0].startswith("No weight is quantized")
