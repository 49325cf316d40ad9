"""The operation is looked up by a name from the configuration: `getattr(torch, name)`."""

import operator

import torch
from torch import nn


class Merge(nn.Module):
    def __init__(self, how, width=4):
        super().__init__()
        self.how = how
        self.a, self.b, self.c = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        merge = getattr(torch, self.how)
        ab = merge(self.a(x), self.b(x))  # fault: mixed-devices
        return operator.sub(ab, self.c(x))  # fault: mixed-devices


PLACEMENT = {"a": 0, "b": 1, "c": 2}
TRAIN = False


def build():
    return Merge("minimum")


def inputs():
    return (torch.randn(2, 4),)
