"""BLOOM-like attention: the ALiBi bias goes into `baddbmm`.

The bias is built from a Python list on the CPU in every forward, and `baddbmm` takes no CPU tensor
beside GPU tensors.
"""

import math

import torch
from torch import nn


def alibi(num_heads, length):
    slopes = torch.tensor([2 ** (-8 * (head + 1) / num_heads) for head in range(num_heads)])
    return slopes[:, None, None] * torch.arange(length)[None, None, :]


class AlibiAttention(nn.Module):
    def __init__(self, width, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.dense = nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        shape = (batch * self.num_heads, length, width // self.num_heads)
        q, k, v = (part.reshape(shape) for part in self.qkv(x).chunk(3, dim=-1))
        bias = alibi(self.num_heads, length).repeat(batch, 1, 1)
        scale = 1 / math.sqrt(shape[-1])
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=scale)  # fault: mixed-devices
        context = scores.softmax(-1) @ v
        return x + self.dense(context.reshape(batch, length, width))


PLACEMENT = {"0": "cuda:0", "1": "cuda:1"}
TRAIN = False


def build():
    return nn.Sequential(AlibiAttention(8, 2), AlibiAttention(8, 2))


def inputs():
    return (torch.randn(2, 3, 8),)
