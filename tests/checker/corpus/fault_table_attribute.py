"""Rotary tables kept as plain attributes: `self.cos = ...` instead of a buffer.

Placing the model doesn't move them, so they stay on the CPU. Both products fail.
"""

import torch
from torch import nn


def tables(length, dim):
    angle = torch.outer(torch.arange(length), 1 / 100 ** (torch.arange(0, dim, 2) / dim))
    return angle.cos(), angle.sin()


class Attention(nn.Module):
    def __init__(self, width, max_length=16):
        super().__init__()
        self.cos, self.sin = tables(max_length, width)
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, width, bias=False)
        self.wv = nn.Linear(width, width, bias=False)

    def rotate(self, x):
        even, odd = x[..., ::2], x[..., 1::2]
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        first = even * cos - odd * sin  # fault: mixed-devices
        second = even * sin + odd * cos  # fault: mixed-devices
        return torch.stack((first, second), dim=-1).flatten(-2)

    def forward(self, x):
        q, k = self.rotate(self.wq(x)), self.rotate(self.wk(x))
        return x + torch.softmax(q @ k.mT, dim=-1) @ self.wv(x)


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Attention(8) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


PLACEMENT = {"blocks.0": 0, "blocks.1": 0, "blocks.2": 1}
TRAIN = False


def build():
    return Tower()


def inputs():
    return (torch.randn(2, 5, 8),)
