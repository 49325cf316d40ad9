"""The parts of a small GLM-like decoder, with nothing wrong in them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        variance = x.float().square().mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + 1e-5).to(x.dtype))


class RotaryTable(nn.Module):
    """Angles for half of a head's channels."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 10000.0 ** (-torch.arange(0, dim, 2) / dim))

    def forward(self, start: int, length: int) -> Tensor:
        steps = torch.arange(start, start + length, device=self.inv_freq.device)
        return torch.outer(steps, self.inv_freq)  # [tokens, dim / 2]


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Turn the first half of each head; x is [batch, heads, tokens, dim]."""
    turning, passing = x.chunk(2, dim=-1)
    even, odd = turning[..., ::2], turning[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return torch.cat((turned.flatten(-2), passing), dim=-1)


class SelfAttention(nn.Module):
    """Multi-query attention; keys and values are one tensor, [2, batch, 1, tokens, dim]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.dim = heads, width // heads
        self.query_key_value = nn.Linear(width, width + 2 * self.dim)
        self.dense = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, angles: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v = self.query_key_value(x).split([x.shape[-1], self.dim, self.dim], dim=-1)
        q = rotated(q.unflatten(-1, (self.heads, self.dim)).transpose(1, 2), angles)
        kv = torch.stack((rotated(k.unsqueeze(1), angles), v.unsqueeze(1)))
        if past is not None:
            kv = torch.cat((past, kv), dim=-2)
        k, v = (part.expand(-1, self.heads, -1, -1) for part in kv)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        return self.dense(out.transpose(1, 2).flatten(2)), kv


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(width, 4 * width, bias=False)
        self.dense_4h_to_h = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.dense_h_to_4h(x).chunk(2, dim=-1)
        return self.dense_4h_to_h(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(width)
        self.self_attention = SelfAttention(width, heads)
        self.post_attention_layernorm = RMSNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: Tensor, angles: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
        attended, kv = self.self_attention(self.input_layernorm(x), angles, past)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), kv
