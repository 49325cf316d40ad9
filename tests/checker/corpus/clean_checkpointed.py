"""Activation checkpointing, both ways, around blocks that are placed."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x, scale):
        return x + scale * self.fc(self.norm(x))


class Model(nn.Module):
    def __init__(self, width=6, depth=4):
        super().__init__()
        self.inp = nn.Linear(3, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x):
        h = self.inp(x)
        for index, block in enumerate(self.blocks):
            h = checkpoint(block, h, 0.5, use_reentrant=index % 2 == 0)
        return h.pow(2).mean()


PLACEMENT = {"inp": 0, "blocks.0": 0, "blocks.1": 0, "blocks.2": 1, "blocks.3": 1}
TRAIN = True


def build():
    return Model()


def inputs():
    return (torch.randn(2, 4, 3),)
