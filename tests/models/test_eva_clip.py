"""GLM-4V's tower against the same arithmetic, one picture, head and patch at a time."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from closeness import close
from torch import Tensor
from torch.nn import functional

from duoka.errors import UsageError
from duoka.models.eva_clip import EvaClip, EvaClipConfig

SHAPES = [
    {"image_size": 24, "patch_size": 4, "num_positions": 37},
    {"image_size": 20, "patch_size": 4, "num_positions": 26},  # the last row of patches is left out
    {"image_size": 12, "patch_size": 6, "num_positions": 5, "num_heads": 4, "in_channels": 1},
    {"image_size": 16, "patch_size": 4, "num_positions": 17, "scaling_factor": 3.0, "num_heads": 1},
]


def tower(**changes: Any) -> EvaClip:
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_heads": 2, "intermediate_size": 10}
    vision = EvaClipConfig(**{**sizes, **changes})
    torch.manual_seed(5)
    config = SimpleNamespace(vision_config=vision, hidden_size=6, intermediate_size=14)
    built = EvaClip(config)
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return built


def slowly(tower: EvaClip, picture: Tensor) -> Tensor:
    """[channels, height, width] to [tokens, text's width]."""
    weights, sizes = dict(tower.named_parameters()), tower.config

    def linear(name: str, values: Tensor) -> Tensor:
        bias = weights.get(f"{name}.bias")
        return values @ weights[f"{name}.weight"].T + (0 if bias is None else bias)

    def norm(name: str, values: Tensor, eps: float) -> Tensor:
        centred = values - values.mean(-1, keepdim=True)
        scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt()
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def convolved(name: str, values: Tensor) -> list[Tensor]:
        """Row by row, what each square comes to; what fills no square is left out."""
        kernel, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
        side = kernel.shape[-1]
        squares = [
            values[:, top : top + side, left : left + side]
            for top in range(0, values.shape[1] - side + 1, side)
            for left in range(0, values.shape[2] - side + 1, side)
        ]
        return [(kernel * square).sum((1, 2, 3)) + bias for square in squares]

    embedding = "patch_embedding."
    patches = convolved(f"{embedding}proj", picture)
    states = torch.stack([weights[f"{embedding}cls_embedding"][0], *patches])
    states = states + weights[f"{embedding}position_embedding.weight"]
    for number in range(sizes.num_hidden_layers):
        layer, eps = f"transformer.layers.{number}.", sizes.layer_norm_eps
        query, key, value = linear(f"{layer}attention.query_key_value", states).chunk(3, dim=-1)
        width = sizes.hidden_size // sizes.num_heads
        heads = [
            torch.softmax(q @ k.T / math.sqrt(width), dim=-1) @ v
            for q, k, v in zip(*(part.split(width, -1) for part in (query, key, value)), strict=True)
        ]
        mixed = linear(f"{layer}attention.dense", torch.cat(heads, -1))
        states = states + norm(f"{layer}input_layernorm", mixed, eps)
        inner = functional.gelu(linear(f"{layer}mlp.fc1", states))
        mixed = linear(f"{layer}mlp.fc2", inner)
        states = states + norm(f"{layer}post_attention_layernorm", mixed, eps)
    side = math.isqrt(len(states) - 1)
    grid = states[1:].T.reshape(-1, side, side)
    features = linear("linear_proj.linear_proj", torch.stack(convolved("conv", grid)))
    features = functional.gelu(norm("linear_proj.norm1", features, 1e-5))
    gate = functional.silu(linear("linear_proj.gate_proj", features))
    features = linear("linear_proj.dense_4h_to_h", gate * linear("linear_proj.dense_h_to_4h", features))
    whole = torch.cat((weights["boi"][0], features, weights["eoi"][0]))
    return whole / sizes.scaling_factor


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES)
def test_against_the_formula(shape: dict[str, Any]) -> None:
    built = tower(**shape)
    side = shape["image_size"]
    pictures = torch.randn(2, built.config.in_channels, side, side)
    features = built(pictures)
    assert features.shape == (2, built.config.num_features + 2, 6)
    assert close(features, torch.stack([slowly(built, picture) for picture in pictures]))


@pytest.mark.parametrize("shape", [(1, 3, 12, 24), (1, 1, 24, 24), (3, 24, 24)])
def test_pixels_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=r"this tower reads \[images, 3, 24, 24\]"):
        tower(**SHAPES[0])(torch.zeros(shape))
