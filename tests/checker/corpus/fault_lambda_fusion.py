"""The way in which two streams are fused is chosen from a table of lambdas.

The chosen lambda multiplies a gate of cuda:1 with a state of cuda:0.
"""

import torch
from torch import nn

FUSIONS = {
    "sum": lambda a, b: a + b.to(a.device),
    "gate": lambda a, b: a * b.sigmoid(),  # fault: mixed-devices
    "left": lambda a, _: a,
}


class Fused(nn.Module):
    def __init__(self, fusion, width=6):
        super().__init__()
        self.fuse = FUSIONS[fusion]
        self.state = nn.Linear(width, width)
        self.gate = nn.Linear(width, width)

    def forward(self, x):
        return self.fuse(self.state(x), self.gate(x))


PLACEMENT = {"state": 0, "gate": 1}
TRAIN = False


def build():
    return Fused("gate")


def inputs():
    return (torch.randn(2, 6),)
