"""Re-entrant activation checkpointing around a block that makes its mask on the CPU.

The fault is met in the forward pass, without gradients, and again when backward recomputes.
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        future = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        scores = (q @ k.mT).masked_fill(future, -1e4)  # fault: mixed-devices
        return x + self.out(scores.softmax(-1) @ v)


class Model(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.inp = nn.Linear(3, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))

    def forward(self, x):
        h = self.inp(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=True)
        return h.pow(2).mean()


PLACEMENT = {"inp": 0, "blocks.0": 0, "blocks.1": 1}
TRAIN = True


def build():
    return Model()


def inputs():
    return (torch.randn(2, 4, 3),)
