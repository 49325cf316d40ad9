"""A vision block that is cut in its middle: attention on one card, the MLP on the next.

`x + self.mlp(...)` adds the residual on cuda:0 to what comes from cuda:1.
"""

import torch
from torch import nn


class VisionAttention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.proj((q @ k.mT).softmax(-1) @ v)


class VisionBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = VisionAttention(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # fault: mixed-devices


class Tower(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.patch_embed = nn.Linear(12, width)
        self.blocks = nn.ModuleList(VisionBlock(width) for _ in range(3))

    def forward(self, patches):
        x = self.patch_embed(patches)
        for block in self.blocks:
            x = block(x)
        return x


PLACEMENT = {
    "patch_embed": 0,
    "blocks.0": 0,
    "blocks.1.norm1": 0,
    "blocks.1.attn": 0,
    "blocks.1.norm2": 0,
    "blocks.1.mlp": 1,
    "blocks.2": 1,
}
TRAIN = False


def build():
    return Tower()


def inputs():
    return (torch.randn(2, 5, 12),)
