"""The vision tower of GLM-4V-9B: EVA2-CLIP-E, and its adapter to the text model.

Modules are named like the published tensors. An image is split into patches of the tower's width;
after all blocks four neighbouring patches become one feature of the text model's width.

Sources: Sun et al. 2023 (EVA-CLIP, arXiv:2303.15389) for blocks with norms after the sublayers;
Wang et al. 2023 (CogVLM, arXiv:2311.03079) for the combination of this tower with a text model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from duoka.errors import UsageError


class EvaClipConfig(PreTrainedConfig):
    """The published ``vision_config``: sizes of the tower."""

    model_type = "chatglm_vision"

    hidden_size: int = 1792
    num_hidden_layers: int = 63
    num_heads: int = 16
    intermediate_size: int = 15360
    patch_size: int = 14
    image_size: int = 1120
    num_positions: int = 6401
    in_channels: int = 3
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-6
    dropout_prob: float = 0.0
    scaling_factor: float = 8.0

    @property
    def num_features(self) -> int:
        """The number of features of an image, without its begin and end."""
        return (self.image_size // self.patch_size // 2) ** 2


class PatchEmbedding(nn.Module):
    """Embeds pixels as patches after a class token, with learned positions."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, size = config.hidden_size, config.patch_size
        self.shape = (config.in_channels, config.image_size, config.image_size)
        self.proj = nn.Conv2d(config.in_channels, width, kernel_size=size, stride=size)
        self.cls_embedding = nn.Parameter(torch.zeros(1, width))
        self.position_embedding = nn.Embedding(config.num_positions, width)

    def forward(self, pixels: Tensor) -> Tensor:
        """Embed [images, channels, height, width] as [images, 1 + patches, tower's width]."""
        if pixels.shape[1:] != self.shape:
            raise UsageError(
                f"pixels are {list(pixels.shape)}; this tower reads [images, "
                f"{', '.join(map(str, self.shape))}]",
                hint="use the model's image processor, which scales images to this size",
            )
        patches = self.proj(pixels.to(self.proj.weight.dtype)).flatten(2).transpose(1, 2)
        first = self.cls_embedding.expand(len(pixels), 1, -1)
        return torch.cat((first, patches), dim=1) + self.position_embedding.weight


class Attention(nn.Module):
    """Bidirectional attention between the class token and all patches."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout_prob
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Compute [images, tokens, width] from [images, tokens, width]."""
        images, tokens, width = hidden_states.shape
        fused = self.query_key_value(hidden_states)
        fused = fused.view(images, tokens, 3, self.num_heads, width // self.num_heads)
        query, key, value = fused.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        output: Tensor = self.dense(mixed.transpose(1, 2).reshape(images, tokens, width))
        return functional.dropout(output, self.dropout, self.training)


class MLP(nn.Module):
    """Two linear layers with an activation between them."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.activation = ACT2FN[config.hidden_act]
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Compute [images, tokens, width] from [images, tokens, width]."""
        output: Tensor = self.fc2(self.activation(self.fc1(hidden_states)))
        return output


class EvaClipBlock(nn.Module):
    """Attention and MLP, each followed by a norm and added to the residual."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.attention = Attention(config)
        self.input_layernorm = nn.LayerNorm(width, eps=eps)
        self.mlp = MLP(config)
        self.post_attention_layernorm = nn.LayerNorm(width, eps=eps)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Compute [images, tokens, width] from [images, tokens, width]."""
        hidden_states = hidden_states + self.input_layernorm(self.attention(hidden_states))
        output: Tensor = hidden_states + self.post_attention_layernorm(self.mlp(hidden_states))
        return output


class Blocks(nn.Module):
    """All blocks in order."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EvaClipBlock(config) for _ in range(config.num_hidden_layers))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Compute [images, tokens, width] from [images, tokens, width]."""
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return hidden_states


class VisionAdapter(nn.Module):
    """Projects features with a gated MLP of the text model's width."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.linear_proj = nn.Linear(width, width, bias=False)
        self.norm1 = nn.LayerNorm(width)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.dense_h_to_4h = nn.Linear(width, inner, bias=False)
        self.dense_4h_to_h = nn.Linear(inner, width, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """Compute [images, tokens, text's width] from [images, tokens, text's width]."""
        features = functional.gelu(self.norm1(self.linear_proj(features)))
        gated = functional.silu(self.gate_proj(features)) * self.dense_h_to_4h(features)
        output: Tensor = self.dense_4h_to_h(gated)
        return output


class EvaClip(nn.Module):
    """The vision tower: pixels → features of an image, its begin and end included."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        vision, width = config.vision_config, config.hidden_size
        self.config = vision
        self.patch_embedding = PatchEmbedding(vision)
        self.transformer = Blocks(vision)
        self.conv = nn.Conv2d(vision.hidden_size, width, kernel_size=2, stride=2)
        self.linear_proj = VisionAdapter(config)
        self.boi = nn.Parameter(torch.zeros(1, 1, width))
        self.eoi = nn.Parameter(torch.zeros(1, 1, width))

    def forward(self, pixels: Tensor) -> Tensor:
        """Compute [images, 2 + tokens, text's width] from [images, channels, height, width]."""
        patches = self.transformer(self.patch_embedding(pixels))[:, 1:]
        side = self.config.image_size // self.config.patch_size
        grid = patches.transpose(1, 2).unflatten(2, (side, side))
        features = self.linear_proj(self.conv(grid).flatten(2).transpose(1, 2))
        # A device map may place these parameters and the adapter on different devices.
        edges = (edge.to(features.device) for edge in (self.boi, self.eoi))
        begin, end = (edge.expand(len(pixels), 1, -1) for edge in edges)
        whole: Tensor = torch.cat((begin, features, end), dim=1) / self.config.scaling_factor
        return whole
