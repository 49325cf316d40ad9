"""`functools.partial` and `reduce` over tensors that are brought together first."""

from functools import partial, reduce

import torch
import torch.nn.functional as F
from torch import nn


class Branches(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.activation = partial(F.leaky_relu, negative_slope=0.2)
        self.branches = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        outputs = [self.activation(branch(x)) for branch in self.branches]
        home = outputs[0].device
        total = reduce(torch.add, (output.to(home) for output in outputs))
        return self.out(total), sum(output.mean().item() for output in outputs)


PLACEMENT = {"branches.0": 0, "branches.1": 1, "branches.2": 0, "branches.3": 1, "out": 1}
TRAIN = False


def build():
    return Branches()


def inputs():
    return (torch.randn(2, 4),)
