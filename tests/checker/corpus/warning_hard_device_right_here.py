"""A mask made with `device="cuda:0"` by a layer that happens to lie on cuda:0.

Nothing fails on this placement; on another one it would.
"""

import torch
from torch import nn


class Causal(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        size = x.shape[1]
        mask = torch.ones(size, size, device="cuda:0").triu(1)  # warning: hard-coded-device
        return x + (q @ k.mT - 1e9 * mask).softmax(-1) @ v


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Causal(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x):
        return self.mlp(self.attention(x))


PLACEMENT = {"attention": "cuda:0", "mlp": "cuda:1"}
TRAIN = False


def build():
    return Model()


def inputs():
    return (torch.randn(1, 4, 8),)
