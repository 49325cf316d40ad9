"""Running sums of layer outputs with `itertools.accumulate`, which calls `torch.add` in C."""

from itertools import accumulate

import torch
from torch import nn


class Dense(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        outputs = [layer(x) for layer in self.layers]
        sums = list(accumulate(outputs, torch.add))  # fault: mixed-devices
        return sums[-1]


PLACEMENT = {"layers.0": 0, "layers.1": 0, "layers.2": 1}
TRAIN = False


def build():
    return Dense()


def inputs():
    return (torch.randn(2, 4),)
