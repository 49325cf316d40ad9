"""A block that is wrapped in `torch.compile`.

It builds its positions on the CPU; compiled or not, the sum mixes them with a GPU tensor.
"""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        ramp = torch.linspace(0.0, 1.0, x.shape[-1])
        return self.fc(x) + ramp  # fault: mixed-devices


class Model(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.block = torch.compile(Block(width))

    def forward(self, x):
        return self.block(self.stem(x))


PLACEMENT = {"stem": 0, "block": 1}
TRAIN = False


def build():
    return Model()


def inputs():
    return (torch.randn(2, 6),)
