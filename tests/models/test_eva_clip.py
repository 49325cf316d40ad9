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


class Slow:
    """The tower's arithmetic with its weights."""

    def __init__(self, tower: EvaClip) -> None:
        self.weights = dict(tower.named_parameters())
        self.sizes = tower.config

    def linear(self, name: str, values: Tensor) -> Tensor:
        bias = self.weights.get(f"{name}.bias")
        return values @ self.weights[f"{name}.weight"].T + (0 if bias is None else bias)

    def norm(self, name: str, values: Tensor, eps: float) -> Tensor:
        centred = values - values.mean(-1, keepdim=True)
        scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt()
        return scaled * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def convolved(self, name: str, values: Tensor) -> list[Tensor]:
        """Row by row, what each square comes to; what fills no square is left out."""
        kernel, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        side = kernel.shape[-1]
        squares = [
            values[:, top : top + side, left : left + side]
            for top in range(0, values.shape[1] - side + 1, side)
            for left in range(0, values.shape[2] - side + 1, side)
        ]
        return [(kernel * square).sum((1, 2, 3)) + bias for square in squares]

    def block(self, layer: str, states: Tensor) -> Tensor:
        eps, width = self.sizes.layer_norm_eps, self.sizes.hidden_size // self.sizes.num_heads
        fused = self.linear(f"{layer}.attention.query_key_value", states).chunk(3, dim=-1)
        heads = [
            torch.softmax(query @ key.T / math.sqrt(width), dim=-1) @ value
            for query, key, value in zip(*(part.split(width, -1) for part in fused), strict=True)
        ]
        mixed = self.linear(f"{layer}.attention.dense", torch.cat(heads, -1))
        states = states + self.norm(f"{layer}.input_layernorm", mixed, eps)
        inner = functional.gelu(self.linear(f"{layer}.mlp.fc1", states))
        mixed = self.linear(f"{layer}.mlp.fc2", inner)
        return states + self.norm(f"{layer}.post_attention_layernorm", mixed, eps)

    def adapted(self, features: Tensor) -> Tensor:
        features = self.linear("linear_proj.linear_proj", features)
        features = functional.gelu(self.norm("linear_proj.norm1", features, 1e-5))
        gate = functional.silu(self.linear("linear_proj.gate_proj", features))
        features = gate * self.linear("linear_proj.dense_h_to_4h", features)
        return self.linear("linear_proj.dense_4h_to_h", features)

    def features(self, picture: Tensor) -> Tensor:
        """[channels, height, width] to [tokens, text's width]."""
        patches = self.convolved("patch_embedding.proj", picture)
        states = torch.stack([self.weights["patch_embedding.cls_embedding"][0], *patches])
        states = states + self.weights["patch_embedding.position_embedding.weight"]
        for number in range(self.sizes.num_hidden_layers):
            states = self.block(f"transformer.layers.{number}", states)
        side = math.isqrt(len(states) - 1)
        grid = states[1:].T.reshape(-1, side, side)
        features = self.adapted(torch.stack(self.convolved("conv", grid)))
        whole = torch.cat((self.weights["boi"][0], features, self.weights["eoi"][0]))
        return whole / self.sizes.scaling_factor


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES)
def test_against_the_formula(shape: dict[str, Any]) -> None:
    built = tower(**shape)
    side = shape["image_size"]
    pictures = torch.randn(2, built.config.in_channels, side, side)
    features, slow = built(pictures), Slow(built)
    assert features.shape == (2, built.config.num_features + 2, 6)
    assert close(features, torch.stack([slow.features(picture) for picture in pictures]))


@pytest.mark.parametrize("shape", [(1, 3, 12, 24), (1, 1, 24, 24), (3, 24, 24)])
def test_pixels_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=r"this tower reads \[images, 3, 24, 24\]"):
        tower(**SHAPES[0])(torch.zeros(shape))
